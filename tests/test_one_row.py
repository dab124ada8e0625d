import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlm.ops.one_row import einsum_of_one_row

CASES = [  # letters, shapes of x and w, whether the weight is cut into parts
    ("btd,dnh->btnh", (1, 1, 16), (16, 3, 5), True),
    ("btnv,nvd->btd", (1, 1, 4, 5), (4, 5, 7), True),
    ("btd,vd->btv", (1, 1, 10), (12, 10), True),
    ("btnh,rnh->btnr", (1, 1, 4, 6), (8, 4, 6), False),  # heads are not summed over
    ("btd,df->btf", (2, 1, 16), (16, 7), False),
    ("btd,df->btf", (1, 1, 15), (15, 7), False),  # 15 is not in 4 parts
]


@pytest.mark.parametrize("letters, x, w, cut", CASES)
def test_a_product_of_one_row_is_the_einsum(letters, x, w, cut):
    keys = jax.random.split(jax.random.key(0), 2)
    x, w = (jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, (x, w), strict=True))
    with_dtype = lambda x, w: einsum_of_one_row(letters, x, w, preferred_element_type=jnp.float32)  # noqa: E731
    found, expected = with_dtype(x, w), jnp.einsum(letters, x, w, preferred_element_type=jnp.float32)
    assert found.dtype == jnp.float32 and found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert einsum_of_one_row(letters, x, w).dtype == jnp.bfloat16
    assert (str(jax.make_jaxpr(with_dtype)(x, w)).count("reshape") > 0) == cut
