"""Which experts a token goes to: against a plain reading of the papers, and the losses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlm.errors import ShardlmError
from shardlm.ops.routing import Router, check_router, route, row_balance, scores, with_load

LOGITS = jax.random.normal(jax.random.key(0), (20, 8))


def plain(logits, bias, top_k, router):
    """One token at a time, with sorting."""
    weights, experts = [], []
    for row in np.asarray(logits, np.float64):
        s = np.exp(row) / np.exp(row).sum() if router.scoring == "softmax" else 1 / (1 + np.exp(-row))
        preference = s + (0 if bias is None else np.asarray(bias))
        size = len(row) // router.groups
        best = 1 if router.scoring == "softmax" else 2
        group_scores = [np.sort(preference[g * size : (g + 1) * size])[-best:].sum() for g in range(router.groups)]
        allowed = np.argsort(group_scores)[::-1][: router.top_groups]
        masked = np.where(np.isin(np.arange(len(row)) // size, allowed), preference, -np.inf)
        chosen = np.argsort(masked)[::-1][:top_k]
        w = s[chosen] / (s[chosen].sum() if router.normalize else 1)
        weights.append(w * router.scale)
        experts.append(chosen)
    return np.array(weights), np.array(experts)


@pytest.mark.parametrize(
    "router",
    [
        Router(),
        Router(normalize=False),
        Router(groups=4, top_groups=2, normalize=False, scale=16.0),
        Router("sigmoid", groups=4, top_groups=2, scale=2.5),
    ],
    ids=["mixtral", "not normalised", "deepseek-v2", "deepseek-v3"],
)
def test_routing_reads_like_the_papers(router):
    bias = jnp.linspace(-0.3, 0.3, 8) if router.scoring == "sigmoid" else None
    weights, experts = route(scores(LOGITS, router), bias, 3, router)
    expected = plain(LOGITS, bias, 3, router)
    np.testing.assert_array_equal(experts, expected[1])
    np.testing.assert_allclose(weights, expected[0], rtol=1e-5)


def test_the_bias_changes_the_choice_and_not_the_weights():
    router = Router("sigmoid", normalize=False)
    s = scores(LOGITS, router)
    bias = jnp.zeros(8).at[5].set(10.0)
    weights, experts = route(s, bias, 2, router)
    assert (experts[:, 0] == 5).all()
    np.testing.assert_allclose(weights[:, 0], s[:, 5], rtol=1e-6)


def test_the_gradient_of_the_bias_is_the_load():
    load = jnp.array([4.0, 0.0, 1.0, 3.0])
    gradient = jax.grad(lambda bias: with_load(jnp.ones(3), bias, load).sum())(jnp.zeros(4))
    np.testing.assert_allclose(gradient, load - 2)


def test_balance_is_one_where_the_load_is_even_and_the_number_of_experts_over_k_where_one_has_all():
    even = jnp.full((1, 8, 4), 0.25)
    chosen = jnp.tile(jnp.array([[1.0, 1, 0, 0], [0, 0, 1, 1]]), (4, 1))[None]
    assert row_balance(even, chosen, 2, lambda a: a)[0] == pytest.approx(1)
    one = jnp.zeros((1, 8, 4)).at[..., 2].set(1)
    assert row_balance(one, one, 1, lambda a: a)[0] == pytest.approx(4)


def test_padding_counts_nothing():
    p = jax.nn.softmax(LOGITS, axis=-1)[None]
    chosen = (jnp.argsort(jnp.argsort(-LOGITS)) < 2).astype(jnp.float32)[None]
    padded = [jnp.concatenate([a, jnp.zeros((1, 5, 8))], axis=1) for a in (p, chosen)]
    np.testing.assert_allclose(row_balance(*padded, 2, lambda a: a), row_balance(p, chosen, 2, lambda a: a), rtol=1e-6)


@pytest.mark.parametrize(
    "router,experts,top_k,message",
    [
        (Router(), 8, 9, "top_k=9 of num_experts=8; choose top_k from 1 to 8"),
        (Router(groups=3), 8, 2, "num_experts=8 cannot be split into groups=3; choose 1, 2, 4, 8"),
        (Router(groups=0), 8, 2, "num_experts=8 cannot be split into groups=0; choose 1, 2, 4, 8"),
        (Router(groups=4, top_groups=5), 8, 2, "top_groups=5 of groups=4; choose top_groups from 1 to 4"),
        (Router(groups=4, top_groups=1), 8, 4, "top_k=4 experts do not fit into top_groups=1"),
    ],
)
def test_refusals(router, experts, top_k, message):
    with pytest.raises(ShardlmError) as caught:
        check_router(router, experts, top_k)
    assert message in str(caught.value)
