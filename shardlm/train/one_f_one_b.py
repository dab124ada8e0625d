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
from jax.sharding import PartitionSpec

from shardlm.layers.context import Packed
from shardlm.layers.pipeline import Schedule, after, split_rows, stage_rules, to_layers, to_stages
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
    Stage s takes microbatch i - s forward and i - (2S - 2 - s) backward in tick i, from the input it kept: it runs
    forward twice.
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
    (total, parts, (before, inside, behind)), (d_own, d_shared) = run(lay_out(own), everywhere, rows)
    (d_own,) = jax.linear_transpose(lay_out, own)(d_own)
    inside = jax.tree.map(lambda a: to_layers(a, schedule), inside)
    inside = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), inside)
    return (total, parts, together(before, inside, behind)), stages.join(d_own, d_shared)


def _ticks(stages: Stages, replicas: tuple[str, ...], own, shared, rows):
    """One stage: own [1, 1, slots, ...], shared in use on every stage, rows [M / stages, B, T]."""
    S, M = stages.schedule.stages, stages.schedule.microbatches
    me = jax.lax.axis_index("pipeline")
    own = jax.tree.map(lambda a: a[0, 0], own)
    rows = jax.tree.map(lambda a: jax.lax.all_gather(a, "pipeline", tiled=True), rows)  # [M, B, T]
    up, down = [(s, (s + 1) % S) for s in range(S)], [((s + 1) % S, s) for s in range(S)]
    run = functools.partial(_stage, stages, me)

    def take(m):
        real = (m >= 0) & (m < M)
        return jax.tree.map(lambda a: jnp.where(real, a[jnp.clip(m, 0, M - 1)], 0), rows)

    def tick(carry, i):
        arriving, d_arriving, inputs, sums, grads = carry
        forward, backward = i - me, i - (2 * S - 2 - me)
        inputs = jax.lax.dynamic_update_index_in_dim(inputs, arriving, forward % len(inputs), 0)
        leaving = run(own, shared, arriving, take(forward), losses=False)[0]
        kept, mine = after(leaving, (inputs[backward % len(inputs)], take(backward)))
        (_, total), back, found = jax.vjp(lambda o, s, x: _two(run(o, s, x, mine)), own, shared, kept, has_aux=True)
        d_own, d_shared, d_leaving = back((jnp.where(me == S - 1, 0, d_arriving), jnp.ones_like(total)))
        grads = jax.tree.map(jnp.add, grads, (d_own, d_shared))
        sums = jax.tree.map(jnp.add, sums, (total, *found))
        leaving = after(d_leaving, leaving)
        moved = jax.lax.ppermute(leaving, "pipeline", up), jax.lax.ppermute(d_leaving, "pipeline", down)
        return (*moved, inputs, sums, grads), None

    x = jax.eval_shape(lambda s, r: _model(stages, own, s).embed(r["tokens"], r["positions"]), shared, take(0))
    empty = jnp.zeros(x.shape, x.dtype, out_sharding=x.sharding.spec)
    zeros = functools.partial(jax.tree.map, lambda s: jnp.zeros(s.shape, s.dtype, out_sharding=_spec(s)))
    _, total, *found = jax.eval_shape(run, own, shared, empty, take(0))
    inputs = jnp.zeros((2 * S - 1, *x.shape), x.dtype, out_sharding=PartitionSpec(None, *x.sharding.spec))
    start = (empty, empty, inputs, zeros((total, *found)), zeros((own, shared)))
    (*_, sums, grads), _ = jax.lax.scan(tick, start, jnp.arange(stages.schedule.ticks))
    total, parts, (before, inside, behind) = sums
    inside = jax.lax.psum(inside, replicas) if replicas else inside
    sums = jax.lax.psum((total, parts, (before, behind)), ("pipeline", *replicas))
    d_own = jax.lax.psum(grads[0], replicas) if replicas else grads[0]
    d_shared = jax.lax.psum(grads[1], ("pipeline", *replicas))
    stacked = functools.partial(jax.tree.map, lambda a: a[None, None])
    return (sums[0], sums[1], (sums[2][0], stacked(inside), sums[2][1])), (stacked(d_own), d_shared)


def _two(result):
    """((x, total), the rest): what `jax.vjp` differentiates and what it passes on."""
    x, total, *rest = result
    return (x, total), tuple(rest)


def _stage(stages: Stages, me, own, shared, x, rows, losses: bool = True):
    """What a stage does to x [B, T, D] of one microbatch: (x, its share of the total, parts, aux). The first stage
    embeds, the last one computes the losses; layers outside the segment in stages run on the one or the other."""
    lm = _model(stages, own, shared)
    execution, k, schedule = stages.model.execution, stages.body, stages.schedule
    ctx = Packed.make(rows["segment_ids"], rows["weights"], execution)
    token_losses, with_auxiliary = stages.losses

    def layers(x, which, held=None):
        x, _, aux = lm.run(x, rows["positions"], dataclasses.replace(ctx, held=held), None, which)
        return x, aux

    def last(x):
        x, aux = layers(x, slice(k + 1, None))
        total, parts, further = token_losses(lm, lm.finish(x), rows)
        aux = together(aux, further)
        return with_auxiliary(total, aux), parts, aux

    first = lambda x: layers(lm.embed(rows["tokens"], rows["positions"]), slice(0, k))  # noqa: E731
    x, before = _only_if(me == 0, first, x, lambda x: x)
    rows = after(x, rows)  # what all stages do together comes after what the first one does alone
    ctx = dataclasses.replace(ctx, segment_ids=rows["segment_ids"], weights=rows["weights"])
    x, inside = layers(x, slice(k, k + 1), schedule.held(me) if schedule.short else None)
    if not losses:
        return (x,)
    total, parts, behind = _only_if(me == schedule.stages - 1, last, x)
    held = schedule.held(me)  # empty slots have no losses
    inside = jax.tree.map(lambda a: a.reshape(schedule.slots, -1, *a.shape[1:]), inside)
    inside = jax.tree.map(lambda a: jnp.where(held.reshape(-1, *[1] * (a.ndim - 1)), a, 0), inside)
    return x, with_auxiliary(with_auxiliary(total, before), inside), parts, (before, inside, behind)


def _only_if(condition, work, x, otherwise=None):
    """`work(x)` on the stage where the condition holds; elsewhere `otherwise(x)` for the first result, and zeros."""
    shapes = jax.eval_shape(work, x)
    zeros = lambda tree: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype, out_sharding=_spec(s)), tree)  # noqa: E731
    skip = (lambda x: zeros(shapes)) if otherwise is None else (lambda x: (otherwise(x), *zeros(shapes[1:])))
    return jax.lax.cond(condition, work, skip, x)


def _model(stages: Stages, own, shared):
    return stages.model.model(stages.join(own, shared))


def _spec(shape) -> PartitionSpec:
    return jax.typeof(shape).sharding.spec if isinstance(shape, jax.Array) else shape.sharding.spec


def _on_all_stages(a: jax.Array) -> jax.Array:
    """A resting weight gathered over `pipeline`."""
    return jax.reshard(a, without_axes(jax.typeof(a).sharding.spec, ("pipeline",)))
