"""Which experts a token goes to, with what weights, and the losses that keep experts evenly used. Pure functions of one
device's tokens; sums over devices are the caller's (layers/moe.py)."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from shardlm.errors import ShardlmError

Scoring = Literal["softmax", "sigmoid", "sqrtsoftplus", "sparsemixer"]


@dataclasses.dataclass(frozen=True)
class Router:
    """How scores become choices.

    scoring         of the router's logits: softmax over all experts (https://arxiv.org/abs/2401.04088, section 2.1) or
                    sigmoid of each (DeepSeek-V3, https://arxiv.org/abs/2412.19437, eq. 15), or the square root of its
                    softplus (DeepSeek V4); sparsemixer chooses as `sparsely_mixed` says (Phi-3.5 MoE)
    normalize       the weights of the chosen experts sum to 1; softmax over the chosen logits is the same thing
    groups          experts are chosen from the best `top_groups` of this many groups (DeepSeek-V2,
                    https://arxiv.org/abs/2405.04434, section 2.2.2); a group's score is its best expert's, or, with
                    sigmoid, the sum of its best two
    scale           factor on all weights
    eps             beside the sum of the chosen ones, which they are divided by
    jitter          of sparsemixer, by which rivals are told
    by_logits       the bias counts beside the logits in the choice, and not beside the scores (Kolibri 1)
    """

    scoring: Scoring = "softmax"
    normalize: bool = True
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    eps: float = 1e-20
    jitter: float = 0.0
    by_logits: bool = False


def check_router(router: Router, num_experts: int, top_k: int) -> None:
    """Raises ShardlmError for numbers that do not fit together."""
    if not 1 <= top_k <= num_experts:
        raise ShardlmError(f"top_k={top_k} of num_experts={num_experts}; choose top_k from 1 to {num_experts}")
    if router.groups < 1 or num_experts % router.groups:
        divisors = ", ".join(str(g) for g in range(1, num_experts + 1) if num_experts % g == 0)
        raise ShardlmError(f"num_experts={num_experts} cannot be split into groups={router.groups}; choose {divisors}")
    if not 1 <= router.top_groups <= router.groups:
        raise ShardlmError(
            f"top_groups={router.top_groups} of groups={router.groups}; choose top_groups from 1 to {router.groups}"
        )
    reach = num_experts // router.groups * router.top_groups
    if top_k > reach:
        raise ShardlmError(
            f"top_k={top_k} experts do not fit into top_groups={router.top_groups} of {num_experts // router.groups} "
            f"experts each; choose top_k up to {reach}, or more groups"
        )


def scores(logits: jax.Array, router: Router) -> jax.Array:
    """float32 [..., E] -> the same shape, each at least 0."""
    if router.scoring == "sqrtsoftplus":
        return jnp.sqrt(jax.nn.softplus(logits))
    return jax.nn.sigmoid(logits) if router.scoring == "sigmoid" else jax.nn.softmax(logits, axis=-1)


def route(
    scores: jax.Array, bias: jax.Array | None, top_k: int, router: Router, logits: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """scores float32 [n, E] and a bias float32 [E] that counts in the choice only (https://arxiv.org/abs/2408.15664)
    -> (weights float32 [n, k], experts int32 [n, k]), best first. `logits` [n, E], of which scores were made, where
    the choice is by those."""
    preferred = logits if router.by_logits else scores
    preference = jax.lax.stop_gradient(preferred if bias is None else preferred + bias)
    if router.groups > 1:
        preference = jnp.where(_in_best_groups(preference, router), preference, -jnp.inf)
    experts = jax.lax.top_k(preference, top_k)[1]
    return weights_of(scores, experts, router), experts


def sparsely_mixed(logits: jax.Array, top_k: int, jitter: float) -> tuple[jax.Array, jax.Array]:
    """logits float32 [n, E] -> (weights float32 [n, k], experts int32 [n, k]): one expert after the other, the best of
    those that are left. Its weight is the softmax over its rivals, whose logits are less by at most 2 * jitter of the
    larger magnitude of the two (https://arxiv.org/abs/2409.12136, as transformers' Phi-3.5 MoE evaluates; it trains
    with experts that are drawn, here the same are taken)."""
    weights, experts, left = [], [], logits
    for _ in range(top_k):
        best = jnp.max(jax.lax.stop_gradient(left), axis=-1, keepdims=True)
        behind = (best - logits) / jnp.maximum(jnp.abs(logits), best)
        rivals = jnp.where(jax.lax.stop_gradient(behind) > 2 * jitter, -jnp.inf, left)
        chosen = jnp.argmax(left, axis=-1)
        hit = jax.nn.one_hot(chosen, logits.shape[-1], dtype=logits.dtype)
        weights.append(jnp.sum(hit * jax.nn.softmax(rivals, axis=-1), axis=-1))
        experts.append(chosen.astype(jnp.int32))
        left = jnp.where(hit > 0, -jnp.inf, left)
    return jnp.stack(weights, axis=-1), jnp.stack(experts, axis=-1)


def weights_of(scores: jax.Array, experts: jax.Array, router: Router) -> jax.Array:
    """Of the chosen experts int32 [n, k], by scores float32 [n, E]: float32 [n, k]."""
    chosen = jax.nn.one_hot(experts, scores.shape[-1], dtype=scores.dtype)  # a gather's gradient would be a scatter
    weights = jnp.einsum("nke,ne->nk", chosen, scores)
    if router.normalize:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + router.eps)
    return weights * router.scale


def _in_best_groups(preference, router: Router):
    """bool [n, E]: whether the expert's group is among the best."""
    grouped = preference.reshape(-1, router.groups, preference.shape[-1] // router.groups)
    best = jax.lax.top_k(grouped, 1 if router.scoring == "softmax" else min(2, grouped.shape[-1]))[0]
    groups = jax.lax.top_k(best.sum(axis=-1), router.top_groups)[1]
    kept = jax.nn.one_hot(groups, router.groups).sum(axis=1) > 0
    return jnp.repeat(kept, grouped.shape[-1], axis=-1)


@jax.custom_vjp
def with_load(weights: jax.Array, bias: jax.Array, load: jax.Array) -> jax.Array:
    """weights, unchanged; the "gradient" of the bias is load - mean(load), so that whatever sums gradients over
    microbatches, devices and pipeline stages sums the load, and an optimizer that subtracts its sign lowers the bias of
    overloaded experts (https://arxiv.org/abs/2408.15664, algorithm 1)."""
    return weights


with_load.defvjp(
    lambda weights, bias, load: (weights, load), lambda load, d_weights: (d_weights, load - jnp.mean(load), None)
)


def row_balance(probabilities: jax.Array, chosen: jax.Array, top_k: int, sum_over_row) -> jax.Array:
    """The load-balance loss of each row, float32 [B]: E / (k n) times the sum over experts of the pairs they got and
    their mean probability (https://arxiv.org/abs/2412.19437, eq. 17 to 20; https://arxiv.org/abs/2101.03961, eq. 4,
    for one row). 1 where the load is even. Taken by row, it does not depend on how rows make batches.

    probabilities [B, T, E], which sum to 1, and chosen [B, T, E], 1 for each chosen expert, both zero for padding;
    `sum_over_row` sums [B, ...] over the devices that share the rows.
    """
    E = probabilities.shape[-1]
    pairs = sum_over_row(chosen.sum(axis=1))
    tokens = jnp.maximum(pairs.sum(axis=-1, keepdims=True) / top_k, 1)
    mean = sum_over_row(probabilities.sum(axis=1)) / tokens
    return jnp.sum(E / (top_k * tokens) * pairs * mean, axis=-1)
