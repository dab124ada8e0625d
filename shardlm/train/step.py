"""The training step: loss and gradients over microbatches, clipping, the update, and the skipping of bad steps. A
pure function of state and batch; jit, donation and compiler options are train/program.py's."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

from shardlm.layers.moe import LOSSES
from shardlm.layers.packed import Packed
from shardlm.layers.param import Execution
from shardlm.models.transformer import Transformer
from shardlm.ops.cross_entropy import HeadLayout, cross_entropy
from shardlm.ops.ring_attention import zigzag
from shardlm.optim import weight_gradients
from shardlm.rules import Rules
from shardlm.state import ModelDef, TrainState
from shardlm.train import offload, one_f_one_b
from shardlm.train.mtp import further_rows, mtp_losses, together

Batch = dict[str, jax.Array]
"""tokens, targets, segment_ids, positions int32 [B, T] and loss_mask float32 [B, T] (data/loader.py); where there are
images, what layers/packed.py's of_rows has of them besides."""
Gradient = Callable[[Any, Batch, jax.Array, Any], tuple[Any, dict[str, jax.Array], Any]]
"""(params, batch, loss scale, the state's link) -> (gradients where the optimizer rests, losses, new link)."""


class Objective(Protocol):
    """What training makes smaller: a mean over the tokens of a batch, or over whatever else it counts.

    counted   "tokens" or "pairs": what the mean is over
    reported  the metrics that evaluations state, the loss first
    columns   float32 [B, T] of a batch beside those that all have
    """

    counted: str
    reported: tuple[str, ...]
    columns: tuple[str, ...]

    def count(self, batch: Batch) -> jax.Array:
        """How many of them are in the batch, a float32 scalar."""

    def used(self, batch: Batch, microbatches: int) -> int | jax.Array:
        """How many of the batch's microbatches hold anything: the first ones."""

    def weights(self, batch: Batch, scale: jax.Array) -> Any:
        """float32 [B, T], or a tree of them: what each token weighs in the sums, for a mean over this batch, times
        `scale`. Parts of the batch keep their weights."""

    def sums(self, model: ModelDef, params: Any, batch: Batch, weights: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        """(what is differentiated, with the layers' auxiliary losses, and what it is made of), by these weights."""

    def metrics(self, parts: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """The metrics, "loss" among them, from what `sums` is made of."""


@dataclasses.dataclass(frozen=True)
class NextToken:
    """Cross-entropy of the next token; z_loss is the weight of the squared log-partition (ops/cross_entropy.py),
    mtp_loss that of the mean loss of the modules that predict further tokens (mtp.py), where the model has any."""

    z_loss: float = 0.0
    mtp_loss: float = 0.0
    counted = "tokens"
    reported = ("loss",)
    columns = ()

    def count(self, batch: Batch) -> jax.Array:
        return jnp.sum(batch["loss_mask"])

    def used(self, batch: Batch, microbatches: int) -> int:
        return microbatches

    def weights(self, batch: Batch, scale: jax.Array) -> jax.Array:
        return batch["loss_mask"] * (scale / jnp.maximum(jnp.sum(batch["loss_mask"]), 1))

    def sums(self, model: ModelDef, params: Any, batch: Batch, weights: jax.Array):
        return loss_sums(model, params, batch, weights, self.z_loss, self.mtp_loss)

    def metrics(self, parts: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return losses_and_loads(parts)


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """What the step needs beyond the model and the optimizer.

    accumulation  microbatches per step; their gradients are summed before one update
    clip_norm     largest global gradient norm; 0 does not clip
    ema_decay     of the average of the weights
    objective     what is made smaller
    one_f_one_b   microbatches go through pipeline stages by one_f_one_b.py
    elementwise   whether the optimizer treats every element alone
    """

    accumulation: int = 1
    clip_norm: float = 1.0
    ema_decay: float = 0.0
    objective: Objective = NextToken()
    one_f_one_b: bool = False
    elementwise: bool = False


def loss_sums(
    model: ModelDef, params: Any, batch: Batch, weights: jax.Array, z_loss: float = 0.0, mtp_loss: float = 0.0
):
    """Weighted sum of the tokens' losses with the layers' auxiliary ones, and what it is made of: {"nll", "z_loss"} and
    the auxiliary values [layers, ...]. weights float32 [B, T]."""
    lm = model.model(params)
    rows = training_rows(model, batch, weights, mtp_loss)
    ctx = Packed.of_rows(rows, rows["weights"], model.execution)
    hidden, _, aux = lm(rows["tokens"], rows["positions"], ctx)
    total, parts, further = row_losses(z_loss, mtp_loss)(lm, hidden, rows)
    aux = together(aux, further)
    return with_auxiliary(total, aux), parts | aux


def training_rows(model: ModelDef, batch: Batch, weights: jax.Array, mtp_loss: float) -> Any:
    """The batch with its tokens' "weights" and, where there are modules that predict further tokens, what they see as
    "further", in the order in which rows are attended to."""
    mtp, rows = model.config.mtp, batch | {"weights": weights}
    if mtp and mtp_loss:
        rows["further"] = further_rows(batch, weights, mtp.depth, mtp_loss, model.execution.rules)
    return in_order(rows, model.execution)


def in_order(rows: Any, execution: Execution) -> Any:
    """A tree of [B, T] with its tokens in the order that attention over the context axis wants: zigzag for a ring."""
    if execution.context_attention == "ring" and execution.rules.act.axes("whole_seq"):
        return jax.tree.map(lambda a: zigzag(a, execution.rules), rows)
    return rows


def with_auxiliary(total: jax.Array, aux: dict[str, jax.Array]) -> jax.Array:
    """The tokens' losses and the layers' auxiliary ones."""
    return total + sum(jnp.sum(aux[name]) for name in LOSSES if name in aux)


def losses_and_loads(parts: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """A step's metrics from its parts: loss, z_loss, mtp_loss where further tokens are predicted, and `loads`, in nats
    per counted token."""
    further = {name: parts[name] for name in ("mtp_loss",) if name in parts}
    return {"loss": parts["nll"], "z_loss": parts["z_loss"]} | further | loads(parts)


def loads(parts: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The metrics of mixtures of experts: balance_loss and router_z_loss (weighted means), expert_load [layers, E] as
    fractions of the pairs, load_imbalance (the busiest expert's load over the mean, in the worst layer) and
    dropped_fraction of the pairs; none of other models."""
    if "expert_load" not in parts:
        return {}
    load = parts["expert_load"]
    fractions = load / jnp.maximum(jnp.sum(load, axis=-1, keepdims=True), 1e-9)
    metrics = {name: jnp.sum(parts[name]) for name in LOSSES}
    dropped = jnp.sum(parts["dropped"]) / jnp.maximum(jnp.sum(load), 1e-9)
    imbalance = jnp.max(fractions) * load.shape[-1]
    return metrics | {"dropped_fraction": dropped, "load_imbalance": imbalance, "expert_load": fractions}


def token_losses(lm: Transformer, hidden: jax.Array, targets: jax.Array, weights: jax.Array, z_loss: float):
    """hidden [B, T, D] and targets int32 [B, T] -> what `cross_entropy` returns for the model's output head."""
    own = {"layout": head_layout(lm), "z_loss": z_loss, "bias": lm.bias_of_head()}
    return cross_entropy(hidden, lm.head_param()[...], targets, weights, **own)


def head_layout(lm: Transformer) -> HeadLayout:
    """How the model's output head rests and what becomes of its products."""
    return HeadLayout(lm.head_param().get_metadata("names"), lm.execution.rules, lm.config.logits)


def gradients(model: ModelDef, params: Any, batch: Batch, scale: jax.Array, config: StepConfig):
    """Mean loss over what the objective counts in the batch and its gradients times `scale`, over all microbatches.

    Each microbatch's tokens weigh the same wherever they fall, so the result does not depend on the accumulation.
    Returns (gradients where the rules rest them, the objective's metrics).
    """
    weights = config.objective.weights(batch, scale)
    used = config.objective.used(batch, config.accumulation)
    grads, parts = accumulated(model, params, batch, weights, config, used)
    return grads, config.objective.metrics(jax.tree.map(lambda a: a / scale, parts))


def accumulated(model: ModelDef, params: Any, batch: Batch, weights: Any, config: StepConfig, count):
    """Gradients of the weighted loss and its parts, summed over the first `count` (an int or int32 scalar) of the
    config's microbatches."""
    grads, _, parts = accumulated_with({}, model, params, batch, weights, config, count)
    return grads, parts


def accumulated_with(own: Batch, model: ModelDef, params: Any, batch: Batch, weights: Any, config: StepConfig, count):
    """(gradients, those of `own`, parts) of the batch with these arrays of its tokens, [B, T, ...], besides."""
    rules = model.execution.rules
    sums = config.objective.sums
    grad = jax.value_and_grad(lambda p, o, b, w: sums(model, p, b | o, w), argnums=(0, 1), has_aux=True)

    once = jax.jit(grad, inline=True)  # traced once for its types and the loop

    def micro(i, carry):
        total, grads, of_own = carry
        (_, parts), (new, new_own) = once(params, *jax.tree.map(lambda a: a[i], split))
        new = model.place(new, rules.grads)
        of_own = jax.tree.map(lambda a, n: jax.lax.dynamic_update_index_in_dim(a, n, i, 0), of_own, new_own)
        return jax.tree.map(jnp.add, total, parts), jax.tree.map(jnp.add, grads, new), of_own

    if config.one_f_one_b:
        # Of next tokens, which all pipelines train on.
        rows = training_rows(model, batch, weights, config.objective.mtp_loss)
        losses = row_losses(config.objective.z_loss, config.objective.mtp_loss), with_auxiliary
        (_, parts, aux), grads = one_f_one_b.loss_and_gradients(model, params, rows, losses)
        parts, of_own = parts | aux, {}
        grads = model.place(grads, rules.grads)
    elif config.accumulation == 1 or rules.mesh.pipeline > 1:  # a pipeline takes the microbatches in one call
        (_, parts), (grads, of_own) = grad(params, own, batch, weights)
        grads = model.place(grads, rules.grads)
    else:
        zeros = model.place(jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params), rules.grads)
        split = jax.tree.map(lambda a: microbatches(a, config.accumulation, rules), (own, batch, weights))
        parts = jax.eval_shape(once, params, *jax.tree.map(lambda a: a[0], split))[0][1]
        start = (jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), parts), zeros, jax.tree.map(_zeros, split[0]))
        parts, grads, of_own = jax.lax.fori_loop(0, _kept_from_xla(count), micro, start)
        of_own = jax.tree.map(lambda a: together_again(a, rules), of_own)
    return grads, of_own, parts


def _zeros(a: jax.Array) -> jax.Array:
    return jnp.zeros(a.shape, a.dtype, out_sharding=jax.typeof(a).sharding)


def _kept_from_xla(count: int | jax.Array) -> jax.Array:
    """`count` as a loop's limit that XLA does not know while it optimises loops, so that it runs one microbatch after
    the other. Of known length it would unroll the loop twice and make zeros for what the second one keeps while the
    first one's is there (an 8B with remat=dots as data=2 x tensor=4: 32.1 GiB for 28.1, compiled for H100)."""
    return jax.lax.optimization_barrier(jnp.int32(count))


def whole_batch(model: ModelDef, config: StepConfig) -> Gradient:
    """Gradients that XLA sums over all devices."""

    def gradient(params, batch, scale, link):
        grads, losses = gradients(model, params, batch, scale, config)
        return jax.tree.map(lambda g: g / scale, model.place(grads, model.execution.rules.optimizer)), losses, link

    return gradient


def row_losses(z_loss: float, mtp_loss: float):
    """Of hidden [B, T, D] and `training_rows`: (the tokens' losses, what they are made of, auxiliary values of modules
    that predict further tokens)."""

    def losses(lm: Transformer, hidden: jax.Array, rows: Any):
        total, parts = token_losses(lm, hidden, rows["targets"], rows["weights"], z_loss)
        if "further" not in rows:
            return total, parts, {}
        weighted, value, aux = mtp_losses(lm, hidden, rows["further"])
        return total + weighted, parts | {"mtp_loss": value / mtp_loss}, aux

    return losses


def microbatches(a: jax.Array, count: int, rules: Rules) -> jax.Array:
    """[B, T, ...] -> [count, B / count, T, ...]. Microbatch i takes rows i, i + count, ..., so that no row changes
    device."""
    rows = rules.act.spec("batch", None, "whole_seq")
    split = a.reshape(a.shape[0] // count, count, *a.shape[1:], out_sharding=rows)
    return jnp.moveaxis(split, 1, 0)


def together_again(a: jax.Array, rules: Rules) -> jax.Array:
    """What `microbatches` made, as it was."""
    a = jnp.moveaxis(a, 0, 1)
    return a.reshape(-1, *a.shape[2:], out_sharding=rules.act.spec("batch", "whole_seq"))


def filled_microbatches(batch: Batch, count: int) -> jax.Array:
    """How many microbatches there are up to the last that holds a token, at least 1: an int32 scalar."""
    filled = jnp.any(batch["segment_ids"] > 0, axis=1)  # [B], row r in microbatch r % count
    return jnp.max(jnp.where(filled, jnp.arange(len(filled)) % count + 1, 1))


def make_train_step(
    model: ModelDef,
    tx: optax.GradientTransformation,
    rate: optax.Schedule,
    config: StepConfig,
    gradient: Gradient | None = None,
):
    """The step: (TrainState, Batch) -> (TrainState, metrics). `gradient` is where gradients come from: of the whole
    batch unless replicas exchange them in their own way (replicas.py).

    A step whose loss or gradient norm is not finite changes nothing but the counters. Metrics are scalars: the
    objective's (`losses_and_loads`, preference.py), grad_norm (before clipping), learning_rate (`rate` of the updates
    made so far), tokens, attention_pairs (query-key pairs attended, for the FLOP count), finite (1 or 0), the state's
    skipped and bad_steps and, in fp16, loss_scale.
    """
    update = make_update(model, tx, rate, config)

    def step(state: TrainState, batch: Batch):
        scale = scale_of(state)
        found = offload.with_copy(gradient or whole_batch(model.bound(state.frozen), config), model.execution.dtype)
        grads, losses, link = found(state.params, batch, scale, state.link)
        return update(state, batch, grads, losses, link)

    return step


def scale_of(state: TrainState) -> jax.Array:
    """What the loss is multiplied by."""
    return state.loss_scale.scale if state.loss_scale else jnp.float32(1)


def make_update(model: ModelDef, tx: optax.GradientTransformation, rate: optax.Schedule, config: StepConfig):
    """What a step does with its gradients, where the optimizer rests: (state, batch, gradients, losses, link) -> (the
    new state, metrics), as `make_train_step` has them. Of the batch "segment_ids" and "positions" are counted."""
    rules = model.execution.rules

    def step(state: TrainState, batch: Batch, grads, losses, link):
        scale = scale_of(state)
        norm = optax.tree.norm(weight_gradients(grads))
        finite = jnp.isfinite(norm) & jnp.isfinite(losses["loss"])
        if config.clip_norm:
            shrink = jnp.minimum(1.0, config.clip_norm / jnp.maximum(norm, 1e-30))
            grads = jax.tree.map(lambda g: g * shrink, grads)

        def update(old, grads):
            split, opt_state, ema = old
            updates, opt_state = tx.update(grads, opt_state, split)
            moved = optax.apply_updates(split, updates)
            if ema is not None:
                ema = jax.tree.map(lambda old, new: old + (1 - config.ema_decay) * (new - old), ema, moved)
            return keep_finite((moved, opt_state, ema), old)

        def keep_finite(new, old):
            return jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, old)

        old = model.place(state.params, rules.optimizer), state.opt_state, state.ema
        moved, opt_state, ema = offload.update(update, old, grads, by_layer=config.elementwise)
        link = keep_finite(link, state.link)
        # An overflow in float16 is the loss scale's business until the scale cannot go lower.
        counts_as_bad = ~finite if state.loss_scale is None else ~finite & (scale <= 1)
        bad_steps = jnp.where(finite, 0, state.bad_steps + counts_as_bad)
        new = TrainState(
            params=model.place(moved, rules.rest),
            opt_state=opt_state,
            step=state.step + 1,
            ema=ema,
            loss_scale=state.loss_scale.update(finite) if state.loss_scale else None,
            skipped=state.skipped + ~finite,
            bad_steps=bad_steps,
            link=link,
            frozen=state.frozen,
        )
        metrics = losses | {"grad_norm": norm, "finite": finite.astype(jnp.float32)} | counts(batch)
        metrics |= {"learning_rate": rate(state.step - state.skipped), "skipped": new.skipped, "bad_steps": bad_steps}
        if state.loss_scale:
            metrics["loss_scale"] = scale
        return new, metrics

    return step


def make_eval_step(model: ModelDef, objective: Objective):
    """(params, frozen, Batch) -> float32 scalars: sums of what the objective reports, and under the name of what it
    counts their number. `frozen` is the training state's."""

    def evaluate(params, frozen, batch: Batch):
        count = objective.count(batch)
        _, parts = objective.sums(model.bound(frozen), params, batch, objective.weights(batch, count))
        metrics = objective.metrics(parts)
        return {name: metrics[name] for name in objective.reported} | {objective.counted: count}

    return evaluate


def counts(batch: Batch) -> dict[str, jax.Array]:
    """Work in a batch: tokens that are not padding, and the (query, key) pairs causal attention visits."""
    real = (batch["segment_ids"] > 0).astype(jnp.float32)
    return {"tokens": jnp.sum(real), "attention_pairs": jnp.sum(real * (batch["positions"] + 1))}
