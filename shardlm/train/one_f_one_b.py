"""The 1F1B pipeline schedule: in every tick each stage takes one microbatch forward and another backward, so that what
a stage keeps does not grow with the number of microbatches. Owns the ticks and where gradients are summed; the circular
schedule, which autodiff turns round, is layers/pipeline.py's.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from shardlm.layers.packed import Packed
from shardlm.layers.pipeline import Schedule, after, split_rows, stage_rules, to_layers, to_stages
from shardlm.layers.stack import run_repeat, spreading
from shardlm.layers.stage_weights import add_at, ahead, cast_ahead
from shardlm.mesh import manual_over, without_axes
from shardlm.state import ModelDef
from shardlm.train.mtp import together

Tree = Any


@dataclasses.dataclass(frozen=True)
class Stages:
    """A model as stage programs see it: `model` runs under the rules of one stage, `body` is the segment in stages."""

    model: ModelDef
    schedule: Schedule
    body: int
    losses: tuple[Callable, Callable]  # (lm, hidden, rows) -> (total, parts, aux) and (total, aux) -> total

    def first_layer(self, stage: jax.Array) -> jax.Array:
        """The number in the model of a stage's first layer, int32 scalars."""
        segments = self.model.config.segments
        before = sum(segment.num_layers for segment in segments[: self.body])
        return before + self.schedule.first_of(stage) * len(segments[self.body].pattern)

    @property
    def unroll(self) -> int:
        return self.model.execution.unroll or self.schedule.slots

    @property
    def spread(self) -> Callable:
        """How a stage's weights are held, so that gradients are summed once a step."""
        return spreading(nnx.state(self.model.outline().segments[self.body].blocks), self.model.execution)

    def join(self, own: Tree, shared: Tree) -> Tree:
        return shared | {"segments": shared["segments"] | {self.body: own}}


def split_params(params: Tree, body: int) -> tuple[Tree, Tree]:
    """(parameters of the segment in stages, all others)."""
    segments = {i: s for i, s in params["segments"].items() if i != body}
    return params["segments"][body], params | {"segments": segments}


def loss_and_gradients(model: ModelDef, params: Tree, rows: Tree, losses: tuple[Callable, Callable]):
    """Sums over all microbatches of ((total, parts, aux), gradients of the total), in one pass over the ticks
    (https://arxiv.org/abs/2104.04473, figure 4 top, with a backward in every tick).

    rows    tree of [B, T] that a microbatch needs: tokens, segment_ids, positions, weights and what `losses` reads; a
            microbatch whose rows are all zero must have no loss
    losses  the tokens' losses and the adding of auxiliary ones, as in `Stages`
    Stage s takes microbatch i - s forward and i - (2S - 2 - s) backward in tick i. Of the microbatches in between it
    keeps each layer's input, and makes the rest again layer by layer, whatever remat says of other schedules.
    """
    execution, config = model.execution, model.config
    rules, body = execution.rules, config.pipelined_segment()
    schedule = Schedule(config.segments[body].repeats, rules.mesh.pipeline, 1, execution.microbatches, True)
    inner = ModelDef.make(config, dataclasses.replace(execution, rules=stage_rules(rules)))
    stages = Stages(inner, schedule, body, losses)
    own, shared = split_params(params, body)
    lay_out = functools.partial(jax.tree.map, lambda a: to_stages(a, schedule))
    everywhere = jax.tree.map(_on_all_stages, shared)
    rows = jax.tree.map(lambda a: split_rows(a, schedule.microbatches, rules, "whole_seq"), rows)
    replicas, staged, whole = rules.replicas(), PartitionSpec(None, "pipeline"), PartitionSpec()
    run = manual_over(
        ("pipeline", *replicas),
        functools.partial(_ticks, stages, replicas),
        in_specs=(staged, whole, PartitionSpec("pipeline", replicas or None)),
        out_specs=((whole, whole, (whole, staged, whole)), (staged, whole)),
    )
    held = lay_out(cast_ahead(own, ahead(execution)))
    (total, parts, (before, inside, behind)), (d_own, d_shared) = run(held, everywhere, rows)
    (d_own,) = jax.linear_transpose(lay_out, own)(d_own)
    inside = jax.tree.map(lambda a: to_layers(a, schedule), inside)
    inside = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), inside)
    return (total, parts, together(before, inside, behind)), stages.join(d_own, d_shared)


def _ticks(stages: Stages, replicas: tuple[str, ...], own, shared, rows):
    """One stage: own [1, 1, slots, ...] as its layers compute with it, shared in use on every stage, rows [M / stages,
    B, T]. Gradients are summed in float32."""
    S, M = stages.schedule.stages, stages.schedule.microbatches
    me = jax.lax.axis_index("pipeline")
    whole, spread = jax.tree.map(lambda a: a[0, 0], own), stages.spread
    own = spread(whole)
    rows = jax.tree.map(lambda a: jax.lax.all_gather(a, "pipeline", tiled=True), rows)  # [M, B, T]
    up, down = [(s, (s + 1) % S) for s in range(S)], [((s + 1) % S, s) for s in range(S)]
    forward, backward = (functools.partial(run, stages, me, own, shared) for run in (_forward, _backward))
    backward = jax.jit(backward, inline=True)  # traced once for its types and the loop

    def take(m):
        real = (m >= 0) & (m < M)
        return jax.tree.map(lambda a: jnp.where(real, a[jnp.clip(m, 0, M - 1)], 0), rows)

    def tick(carry, i):
        arriving, d_arriving, kept, sums, d_own, d_shared = carry
        there, back = i - me, i - (2 * S - 2 - me)  # on the last stage the same
        leaving, inputs = forward(arriving, take(there))
        kept = jax.lax.dynamic_update_index_in_dim(kept, inputs, there % len(kept), 0)
        inputs, d_arriving, mine = after(leaving, (kept[back % len(kept)], d_arriving, take(back)))
        found, d_own, new, d_leaving = backward(inputs, leaving, d_arriving, mine, d_own)
        sums, d_shared = jax.tree.map(jnp.add, (sums, d_shared), (found, new))
        leaving = after(d_leaving, leaving)
        moved = jax.lax.ppermute(leaving, "pipeline", up), jax.lax.ppermute(d_leaving, "pipeline", down)
        return (*moved, kept, sums, d_own, d_shared), None

    x = jax.eval_shape(lambda s, r: _model(stages, own, s).embed(r["tokens"], r["positions"]), shared, take(0))
    empty = jnp.zeros(x.shape, x.dtype, out_sharding=x.sharding.spec)
    inputs = jnp.zeros((stages.schedule.slots, *x.shape), x.dtype, out_sharding=PartitionSpec(None, *x.sharding.spec))
    d_own = _zeros(_float32(own))
    found, *_ = jax.eval_shape(backward, inputs, empty, empty, take(0), d_own)
    kept = (2 * S - 1, *inputs.shape)
    kept = jnp.zeros(kept, x.dtype, out_sharding=PartitionSpec(None, None, *x.sharding.spec))
    start = (empty, empty, kept, _zeros(found), d_own, _zeros(shared))
    (*_, sums, d_own, d_shared), _ = jax.lax.scan(tick, start, jnp.arange(stages.schedule.ticks))
    total, parts, (before, inside, behind) = sums
    inside = jax.lax.psum(inside, replicas) if replicas else inside
    sums = jax.lax.psum((total, parts, (before, behind)), ("pipeline", *replicas))
    (d_own,) = jax.linear_transpose(spread, _float32(whole))(d_own)
    d_own = jax.lax.psum(d_own, replicas) if replicas else d_own
    d_shared = jax.lax.psum(d_shared, ("pipeline", *replicas))
    stacked = functools.partial(jax.tree.map, lambda a: a[None, None])
    return (sums[0], sums[1], (sums[2][0], stacked(inside), sums[2][1])), (stacked(d_own), d_shared)


def _forward(stages: Stages, me, own, shared, x, rows):
    """One microbatch x [B, T, D] through a stage, of which the first one embeds: (x, the input of each repeat of its
    layers, [slots, B, T, D])."""
    first = lambda x: _before(stages, own, shared, rows)[0][:1]  # noqa: E731
    (x,) = _only_if(me == 0, first, lambda x: x, x)
    rows = after(x, rows)  # what all stages do together comes after what the first one does alone
    layer = _layer(stages, me, shared, rows)
    slots = jnp.arange(stages.schedule.slots)
    return jax.lax.scan(lambda x, slot: (layer(slot[1], x, slot[0])[0][0], x), x, (slots, own), unroll=stages.unroll)


def _backward(stages: Stages, me, own, shared, inputs, leaving, d_leaving, rows, d_own):
    """Of one microbatch that has gone forward: (the stage's share of (total, parts, aux), d_own with its gradients of
    `own`, its gradients of `shared`, that of what came from the stage before, zero on the first one).

    inputs   [slots, B, T, D], what `_forward` kept
    leaving  [B, T, D], what it returned; read by the last stage, whose two microbatches of a tick are the same
    d_leaving  [B, T, D], gradient of what it returned; not read by the last stage
    """

    def last(leaving, d_leaving):
        run = lambda shared, x: _after(stages, own, shared, x, rows)  # noqa: E731
        total, back, found = jax.vjp(run, shared, leaving, has_aux=True)
        d_shared, d_x = back(jnp.ones_like(total))
        return d_x, total, found, d_shared

    def slot(carry, at):
        d_x, total, d_own = carry
        index, weights, x = at
        (_, own_total), back, aux = jax.vjp(lambda weights, x: layer(weights, x, index), weights, x, has_aux=True)
        d_weights, d_x = back((d_x, jnp.ones_like(own_total)))
        return (d_x, total + own_total, add_at(d_own, d_weights, index)), aux

    def first(d_x):
        (_, total), back, before = jax.vjp(lambda shared: _before(stages, own, shared, rows), shared, has_aux=True)
        (d_shared,) = back((d_x, jnp.ones_like(total)))
        return jnp.zeros_like(d_x), total, before, d_shared

    S, slots = stages.schedule.stages, jnp.arange(stages.schedule.slots)
    skip = lambda leaving, d_leaving: d_leaving  # noqa: E731
    d_x, total, (parts, behind), d_last = _only_if(me == S - 1, last, skip, leaving, d_leaving)
    inputs, rows = after(d_x, (inputs, rows))
    layer = _layer(stages, me, shared, rows)
    start = d_x, jnp.zeros_like(total), d_own
    how = {"reverse": True, "unroll": stages.unroll}
    (d_x, inside_total, d_own), inside = jax.lax.scan(slot, start, (slots, own, inputs), **how)
    d_x, before_total, before, d_first = _only_if(me == 0, first, lambda d_x: d_x, d_x)
    d_shared = jax.tree.map(jnp.add, d_first, d_last)
    return (before_total + inside_total + total, parts, (before, inside, behind)), d_own, d_shared, d_x


def _layer(stages: Stages, me, shared, rows):
    """What runs one repeat of the segment in stages: (its weights, x [B, T, D], its slot) -> ((x, its share of the
    total), aux)."""
    execution, _, with_auxiliary = stages.model.execution, *stages.losses
    held = stages.schedule.held(me)
    ctx = Packed.of_rows(rows, rows["weights"], execution)
    ctx = dataclasses.replace(ctx, held=held if stages.schedule.short else None)
    number = stages.first_layer(me)

    def layer(weights, x, index):
        graph, state = nnx.split(_model(stages, weights, shared).segments[stages.body].blocks)
        x, _, aux = run_repeat(graph, state, x, rows["positions"], ctx, None, number, index, execution)
        aux = jax.tree.map(lambda a: jnp.where(held[index], a, 0), aux)  # empty slots have no losses
        return (x, with_auxiliary(jnp.float32(0), aux)), aux

    return layer


def _before(stages: Stages, own, shared, rows):
    """What the first stage does ahead of its layers, embedding and segments outside: ((x, their losses), aux)."""
    lm, ctx = _outside(stages, own, shared, rows)
    x = lm.enter(rows["tokens"], rows["positions"], ctx)
    x, _, aux = lm.run(x, rows["positions"], ctx, None, slice(0, stages.body))
    return (x, stages.losses[1](jnp.float32(0), aux)), aux


def _after(stages: Stages, own, shared, x, rows):
    """What the last stage does behind its layers: (the tokens' losses and those of segments outside, (parts, aux))."""
    lm, ctx = _outside(stages, own, shared, rows)
    token_losses, with_auxiliary = stages.losses
    x, _, aux = lm.run(x, rows["positions"], ctx, None, slice(stages.body + 1, None))
    total, parts, further = token_losses(lm, lm.finish(x), rows)
    aux = together(aux, further)
    return with_auxiliary(total, aux), (parts, aux)


def _outside(stages: Stages, own, shared, rows):
    """The model, for what is outside the segment in stages, and its context."""
    return _model(stages, own, shared), Packed.of_rows(rows, rows["weights"], stages.model.execution)


def _only_if(condition, work, otherwise, *args):
    """`work(*args)` on the stage where the condition holds; elsewhere `otherwise(*args)` for the first result, and
    zeros for the others."""
    work = jax.jit(work, inline=True)  # traced once for its types and the branch
    others = jax.eval_shape(work, *args)[1:]
    return jax.lax.cond(condition, work, lambda *args: (otherwise(*args), *_zeros(others)), *args)


def _zeros(shapes: Tree) -> Tree:
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype, out_sharding=_spec(s)), shapes)


def _model(stages: Stages, own, shared):
    return stages.model.model(stages.join(own, shared))


def _float32(weights: Tree) -> Tree:
    """Types of sums of their gradients."""
    return jax.tree.map(lambda a: jax.typeof(a).update(dtype=jnp.promote_types(a.dtype, jnp.float32)), weights)


def _spec(shape) -> PartitionSpec:
    return jax.typeof(shape).sharding.spec if isinstance(shape, jax.Array) else shape.sharding.spec


def _on_all_stages(a: jax.Array) -> jax.Array:
    """A resting weight gathered over `pipeline`."""
    return jax.reshard(a, without_axes(jax.typeof(a).sharding.spec, ("pipeline",)))
