"""The loss of modules that predict further tokens (layers/mtp.py): which tokens they see and predict in packed rows,
and its sum (https://arxiv.org/abs/2412.19437, eq. 21 to 25)."""

from typing import Any

import jax
import jax.numpy as jnp

from shardlm.errors import ShardlmError
from shardlm.layers.packed import Packed
from shardlm.models.transformer import Transformer
from shardlm.ops.cross_entropy import HeadLayout, cross_entropy
from shardlm.rules import Rules
from shardlm.train.config import RunConfig

Rows = dict[str, jax.Array]
Aux = dict[str, jax.Array]


def further_rows(batch: Rows, weights: jax.Array, depth: int, mtp_loss: float, rules: Rules) -> tuple[Rows, ...]:
    """What each of `depth` modules sees of a batch whose tokens are in order, int32 [B, T] but for `weights`, float32:
    tokens, the ones that it adds to what it knows of each; targets; positions; and segment_ids, 0 where the
    target is of another segment or beyond the row, so that such tokens are padding to it. A prediction weighs as the
    same target does in the loss of next tokens, times mtp_loss / depth: both losses are means over the same number
    (the T of eq. 24)."""
    whole, split = rules.act.spec("batch", None), rules.act.spec("batch", "whole_seq")

    def later(a: jax.Array, places: int) -> jax.Array:
        a = jax.reshard(a, whole)  # a shift crosses devices that share rows
        return jax.reshard(jnp.pad(a[:, places:], [(0, 0), (0, places)]), split)

    targets, segments = batch["targets"], batch["segment_ids"]
    found = []
    for places in range(1, depth + 1):
        own = jnp.where(later(segments, places) == segments, segments, 0)
        found.append(
            {
                "tokens": later(targets, places - 1),
                "targets": later(targets, places),
                "positions": batch["positions"],
                "segment_ids": own,
                "weights": jnp.where(own > 0, later(weights, places), 0) * (mtp_loss / depth),
            }
        )
    return tuple(found)


def mtp_losses(lm: Transformer, hidden: jax.Array, rows: tuple[Rows, ...]) -> tuple[jax.Array, jax.Array, Aux]:
    """hidden [B, T, D] of the model, rows as of `further_rows` -> (the sum that is differentiated, the same not
    differentiable, the modules' auxiliary values [modules, ...])."""
    layout = HeadLayout(lm.head_param().get_metadata("names"), lm.execution.rules, lm.config.logits)
    total = value = jnp.float32(0)
    found: dict[str, list[jax.Array]] = {}
    for depth, own in enumerate(rows):
        ctx = Packed.make(own["segment_ids"], own["weights"], lm.execution)
        hidden, _, aux = lm.run_mtp(hidden, own["tokens"], own["positions"], ctx, None, depth)
        seen = lm.mtp.head_norm(depth, hidden, lm.execution)
        loss, parts = cross_entropy(seen, lm.head_param()[...], own["targets"], own["weights"], layout=layout)
        total, value = total + loss, value + parts["nll"]
        for name, a in aux.items():
            found.setdefault(name, []).append(a)
    return total, value, {name: jnp.stack(values) for name, values in found.items()}


def together(*found: Aux) -> Aux:
    """Auxiliary values of layers one after the other."""
    names = dict.fromkeys(name for aux in found for name in aux)
    return {name: jnp.concatenate([aux[name] for aux in found if name in aux]) for name in names}


def check_mtp(config: RunConfig, model: Any) -> None:
    """Refuses modules that nothing trains, whose weights would only decay. `model` is the run's TransformerConfig."""
    if not model.mtp:
        return
    what = f"the model has {model.mtp.depth} modules that predict further tokens"
    if config.preference.beta or config.grpo.reward or config.distill.teacher:
        given = f"preference.beta={config.preference.beta}" if config.preference.beta else "grpo.reward"
        given = "distill.teacher" if config.distill.teacher else given
        raise ShardlmError(
            f"{what}, and {given} does not train them: leave them out (model.mtp=False), or "
            "train adapters by lora.rank, which leave them as they are"
        )
    if not config.train.mtp_loss:
        raise ShardlmError(
            f"{what}, and train.mtp_loss=0 does not train them: set it to 0.3, or leave them out (model.mtp=0, of a "
            "Pretrained model False)"
        )
