import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlm.ops.cpu_einsum import cpu_einsum

IN_PARTS, WEIGHT_FIRST, AS_IT_IS = "reshape", "optimization_barrier", ""
CASES = [  # letters, shapes of x and w, how it is multiplied
    ("btd,nhd->btnh", (1, 1, 16), (4, 5, 16), IN_PARTS),
    ("btnv,dnv->btd", (1, 1, 4, 5), (8, 4, 5), IN_PARTS),
    ("btd,vd->btv", (1, 1, 10), (12, 10), IN_PARTS),
    ("btd,fd->btf", (1, 1, 15), (7, 15), AS_IT_IS),  # 7 is not in 4 parts
    ("btd,nhd->btnh", (3, 2, 16), (4, 5, 16), WEIGHT_FIRST),
    ("btnv,dnv->btd", (8, 1, 4, 5), (7, 4, 5), WEIGHT_FIRST),
    ("btd,fd->btf", (257, 2, 15), (7, 15), WEIGHT_FIRST),
    ("btnh,nhr->btnr", (2, 1, 4, 6), (4, 6, 8), AS_IT_IS),  # heads are not summed over
    ("btd,df->btf", (2, 1, 16), (16, 7), AS_IT_IS),
]


@pytest.mark.parametrize("letters, x, w, how", CASES)
def test_a_product_is_the_einsum(letters, x, w, how):
    keys = jax.random.split(jax.random.key(0), 2)
    x, w = (jax.random.normal(key, shape) for key, shape in zip(keys, (x, w), strict=True))
    product = functools.partial(cpu_einsum, letters)
    found, expected = product(x, w), jnp.einsum(letters, x, w)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    half = (x.astype(jnp.bfloat16), w.astype(jnp.bfloat16))
    assert jax.eval_shape(product, *half).dtype == jnp.bfloat16
    in_float32 = functools.partial(product, preferred_element_type=jnp.float32)
    assert jax.eval_shape(in_float32, *half).dtype == jnp.float32
    program = str(jax.make_jaxpr(product)(x, w))
    assert [name for name in (IN_PARTS, WEIGHT_FIRST) if name in program] == [how] * bool(how)
