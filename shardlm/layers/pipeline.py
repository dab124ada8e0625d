"""Runs the layers of one segment in stages over the `pipeline` axis. Owns the circular schedule, where microbatches go
round the stages, and how weights and rows reach their stage; what a stage computes is stack.py's.

Outside the stages `pipeline` is one more axis that splits the batch: embedding, head and any layers that are not
pipelined work on every device, on its own rows, so that no stage is longer than the others.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardlm.layers.stage_weights import cast_ahead
from shardlm.mesh import manual_with_gradient, shard_map, without_axes
from shardlm.rules import Rules

Tree = Any


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The circular schedule (https://arxiv.org/abs/2104.04473, section 2.2; without buffers between rounds): groups of
    `stages` microbatches go round `rounds` times, and each time round a stage runs its next `slots` layers. One round
    is GPipe's order (https://arxiv.org/abs/1811.06965).

    With `both_ways` it is 1F1B (train/one_f_one_b.py), whose ticks go forward and backward.

    In tick i stage s works on job j = i - s: round (j % (S * R)) // S of microbatch (j // (S * R)) * S + j % S.
    """

    num_layers: int
    stages: int
    rounds: int
    microbatches: int
    both_ways: bool = False

    @property
    def slots(self) -> int:
        """Layers a stage runs in a tick, the most that a place (a round of a stage) holds."""
        return math.ceil(self.num_layers / (self.stages * self.rounds))

    @property
    def short(self) -> int:
        """Places that hold one layer fewer, the last ones: as many as there are empty slots. All wait for the longest
        place, so that a step takes as long as with `slots` layers in each."""
        return self.stages * self.rounds * self.slots - self.num_layers

    def held(self, place: jax.Array) -> jax.Array:
        """bool [slots], False for an empty slot of a place, int32 scalar round * stages + stage."""
        if self.short > 1:
            return jnp.arange(self.slots) < self.slots - (place >= self.full)
        return place * self.slots + jnp.arange(self.slots) < self.num_layers

    def first_of(self, place: jax.Array) -> jax.Array:
        """The first layer of a place, int32 scalars."""
        behind = jnp.maximum(place - self.full, 0) if self.short > 1 else 0
        return place * self.slots - behind

    @property
    def full(self) -> int:
        """Places that hold as many as there are slots, the first ones."""
        return self.stages * self.rounds - self.short

    @property
    def ticks(self) -> int:
        return self.microbatches * self.rounds + (self.stages - 1) * (2 if self.both_ways else 1)

    def bubble_fraction(self) -> float:
        """Share of the devices' time in the pipelined layers that does no useful work: filling and draining, and
        empty slots."""
        return 1 - self.num_layers * self.microbatches / (self.stages * self.slots * self.ticks)

    def job(self, tick: jax.Array, stage: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(round, microbatch, whether there is one) for int32 scalars tick and stage."""
        j = tick - stage
        inside = (j >= 0) & (j < self.microbatches * self.rounds)
        j = jnp.clip(j, 0, self.microbatches * self.rounds - 1)
        lap = self.stages * self.rounds
        return (j % lap) // self.stages, j // lap * self.stages + j % self.stages, inside


Stage = Callable[[Tree, Tree, jax.Array, jax.Array, Tree, jax.Array | None, jax.Array], tuple[jax.Array, Tree, Tree]]
"""(held and masters [rounds * slots, ...] as stage_weights.py has them, the first slot, int32 scalar, x [B, T, D], what
else belongs to the microbatch, which slots hold a layer, bool [slots], or None for all, the layer in the first slot,
int32 scalar) -> (x, masters, sums to add up [slots, ...])."""


def pipelined(
    stage: Stage,
    weights: Tree,
    x: jax.Array,
    extra: Tree,
    learned: Tree,
    *,
    rules: Rules,
    schedule: Schedule,
    policy,
    dtype,
    spread,
):
    """x [B, T, D] through all layers, which compute in the type `dtype`; `extra` are arrays [B, T, ...] by name that go
    along with its rows, and so are `learned`, of which there are gradients.

    weights are stacked [L, ...] at rest, "pipeline" in their specs; x and extra are split over the batch axes, the
    pipeline one among them. `stage` runs under `stage_rules(rules)`, and gets a zeroed `extra` while the pipeline fills
    and drains. `policy` says what of a stage the backward pass keeps (jax.checkpoint), `spread` how it holds masters
    that are summed once a step (own_sums.py). Returns (x, the stage's sums over microbatches, stacked [L, ...]).
    """
    lay_out = functools.partial(jax.tree.map, lambda a: to_stages(a, schedule))
    held = lay_out(cast_ahead(jax.lax.stop_gradient(weights), dtype))
    stream = split_rows(x, schedule.microbatches, rules, "seq", "embed")
    extra, learned = jax.tree.map(lambda a: split_rows(a, schedule.microbatches, rules, "whole_seq"), (extra, learned))
    # Manual over the replicas too: they meet once, when the gradients leave, and not in every layer of every tick.
    replicas = rules.replicas()
    own, shared = PartitionSpec(None, "pipeline"), PartitionSpec("pipeline", replicas or None)
    run = manual_with_gradient(
        ("pipeline", *replicas),
        functools.partial(_run, stage, schedule, policy, replicas, spread),
        in_specs=(own, shared, shared),
        out_specs=(shared, own),
        fixed_specs=(shared, own),
    )
    stream, sums = run((extra, held), lay_out(weights), stream, learned)
    sums = jax.tree.map(lambda a: to_layers(a, schedule), sums)
    return join_rows(stream, rules, "seq", "embed"), sums


def _run(stage: Stage, schedule: Schedule, policy, replicas, spread, fixed, masters, stream, learned):
    """One stage: masters [rounds, 1, slots, ...], stream [M / stages, B, T, D]; fixed are (extra, held), of the leading
    dimensions of stream and masters, learned is as extra.

    Microbatch g * stages + p waits in slot g on stage p. It moves one stage down a tick until stage 0 takes it, and
    from the last stage the same way back to where it waited. These moves are linear, so that differentiating the scan
    keeps nothing of them.
    """
    S, R, slots = schedule.stages, schedule.rounds, schedule.slots
    extra, held = fixed
    held, masters = jax.tree.map(lambda a: a.reshape(-1, *a.shape[3:]), (held, masters))
    masters = spread(masters)
    share = stream.shape[0]
    extra = jax.tree.map(lambda a: jax.lax.all_gather(a, "pipeline", tiled=True), extra)  # [M, ...]
    extra |= jax.tree.map(_gathered, learned)
    me = jax.lax.axis_index("pipeline")
    up = [(s, (s + 1) % S) for s in range(S)]
    down = [((s + 1) % S, s) for s in range(S)]

    # Taking a layer's weights is part of what is recomputed: kept, they would be a copy of the weights for every tick
    # (Llama 3 8B in 4 stages and 2 rounds: 135 GiB a GPU instead of 28, compiled).
    @functools.partial(jax.checkpoint, policy=policy, prevent_cse=False)
    def lap_of(held, masters, lap_round, x, mine):
        place = lap_round * S + me
        full = schedule.held(place) if schedule.short else None
        return stage(held, masters, lap_round * slots, x, mine, full, schedule.first_of(place))

    def tick(carry, i):
        state, arriving, leaving, done, sums, masters = carry
        lap, last = i % (S * R), i - (S - 1)
        arriving = jnp.where(lap == 0, stream[jnp.minimum(i // (S * R), share - 1)], arriving)
        lap_round, microbatch, busy = schedule.job(i, me)
        x = jnp.where((me == 0) & (lap_round == 0), arriving, state)
        mine = jax.tree.map(lambda a: jnp.where(busy, a[microbatch % S * share + microbatch // S], 0), extra)
        x, masters, new = lap_of(held, masters, lap_round, x, mine)
        sums = jax.tree.map(lambda total, a: _add_at(total, a, lap_round), sums, new)
        leaving = jnp.where(me == S - 1, x, leaving)
        finished = (last >= 0) & (last % (S * R) == S * R - 1)
        slot = jnp.clip(last // (S * R), 0, share - 1)
        done = jax.lax.dynamic_update_index_in_dim(done, jnp.where(finished, leaving, done[slot]), slot, 0)
        state = jax.lax.ppermute(x, "pipeline", up)
        if R > 1:
            arriving = after(state, arriving)
        arriving = _while_in(lap < S - 1, lambda a: jax.lax.ppermute(a, "pipeline", down), arriving, R)
        if R > 1:
            leaving = after(arriving, leaving)
        leaving = _while_in(last % (S * R) >= S * (R - 1), lambda a: jax.lax.ppermute(a, "pipeline", down), leaving, R)
        return (state, arriving, leaving, done, sums, masters), None

    shapes = jax.eval_shape(lap_of, held, masters, 0, stream[0], jax.tree.map(lambda a: a[0], extra))[2]
    sums = jax.tree.map(lambda s: jnp.zeros((R, *s.shape), s.dtype), shapes)
    empty = jnp.zeros_like(stream[0])
    start = (empty, empty, empty, jnp.zeros_like(stream), sums, masters)
    (_, _, _, done, sums, _), _ = jax.lax.scan(tick, start, jnp.arange(schedule.ticks))
    sums = jax.lax.psum(sums, replicas) if replicas else sums
    return done, jax.tree.map(lambda a: a[:, None], sums)


def _gathered(a: jax.Array) -> jax.Array:
    """all_gather over the stages, whose transpose XLA is given for shares of rows: of whole ones that are split, jax
    0.10.2 fails to lower it."""
    spec = jax.typeof(a).sharding.spec
    return shard_map(lambda a: jax.lax.all_gather(a, "pipeline", tiled=True), in_specs=spec, out_specs=spec)(a)


def after(first: jax.Array, tree: Tree) -> Tree:
    """The tree, once the floating-point array `first` is there.

    XLA:CPU starts collectives outside a conditional and those in it in any order, and a collective-permute waits for
    all devices of the program: two devices of a stage that differ in the order wait for each other for ever. The order
    needs real data, since the compiler drops its own barriers: where `first` is NaN, which spoils the step anyway, the
    tree is zero.
    """

    def local(first, tree):
        there = ~jnp.isnan(first.reshape(-1)[0])
        return jax.tree.map(lambda a: jnp.where(there, a, jnp.zeros_like(a)), tree)

    specs = jax.tree.map(lambda a: jax.typeof(a).sharding.spec, (first, tree))
    return shard_map(local, in_specs=specs, out_specs=specs[1])(first, tree)


def _while_in(condition, move, a, rounds):
    """Moves only in the ticks that need it, where there are others; every device agrees on the condition."""
    return move(a) if rounds == 1 else jax.lax.cond(condition, move, lambda a: a, a)


def _add_at(total, a, index):
    """total [rounds, ...] plus a [...] at `index`, without a scatter."""
    here = jnp.arange(total.shape[0]) == index
    return total + jnp.where(here.reshape(-1, *[1] * a.ndim), a, 0)


def to_stages(a: jax.Array, schedule: Schedule) -> jax.Array:
    """[L, ...] at rest -> [rounds, stages, slots, ...] with the stages on their devices: an all-to-all over `pipeline`.
    Empty slots get zero weights, with which a block returns its input."""
    R, S, P = schedule.rounds, schedule.stages, schedule.slots
    spec, around = jax.typeof(a).sharding.spec, [(0, 0)] * (a.ndim - 1)
    if schedule.short > 1:
        full, rest = jnp.split(a, [P * schedule.full])
        rest = jnp.reshape(rest, (schedule.short, P - 1, *a.shape[1:]), out_sharding=PartitionSpec(None, *spec))
        rest = jnp.pad(rest, [(0, 0), (0, 1), *around])
        rest = jnp.reshape(rest, (-1, *a.shape[1:]), out_sharding=spec)
        a = jnp.concatenate([full, rest])
    else:
        a = jnp.pad(a, [(0, schedule.short), *around])
    a = jnp.reshape(a, (R, S, P, *a.shape[1:]), out_sharding=PartitionSpec(None, None, *spec))
    return jax.reshard(a, PartitionSpec(None, "pipeline", None, *without_axes(spec, ("pipeline",))[1:]))


def to_layers(a: jax.Array, schedule: Schedule) -> jax.Array:
    """[rounds, stages, slots, ...] -> [L, ...], whole on every device."""
    a = jax.reshard(a, PartitionSpec()).reshape(-1, *a.shape[3:])
    if schedule.short <= 1:
        return a[: schedule.num_layers]
    full, rest = jnp.split(a, [schedule.slots * schedule.full])
    rest = rest.reshape(schedule.short, schedule.slots, *a.shape[1:])[:, :-1]
    return jnp.concatenate([full, rest.reshape(-1, *a.shape[1:])])


def stage_rules(rules: Rules) -> Rules:
    """The rules inside a stage of one replica."""
    return rules.inside("pipeline", *rules.replicas())


def split_rows(a: jax.Array, microbatches: int, rules: Rules, *names: str) -> jax.Array:
    """[B, ...] split over all batch axes -> [M, B / M, ...], microbatches over `pipeline` and their rows over the other
    batch axes. Which rows make a microbatch is chosen so that none changes device."""
    share = microbatches // rules.mesh.pipeline
    before, after = _specs(rules, names)
    return shard_map(lambda a: a.reshape(share, -1, *a.shape[1:]), in_specs=before, out_specs=after)(a)


def join_rows(a: jax.Array, rules: Rules, *names: str) -> jax.Array:
    """The inverse of `split_rows`."""
    before, after = _specs(rules, names)
    return shard_map(lambda a: a.reshape(-1, *a.shape[2:]), in_specs=after, out_specs=before)(a)


def _specs(rules: Rules, names):
    before = rules.act.spec("batch", *names)
    return before, PartitionSpec("pipeline", *rules.inside("pipeline").act.spec("batch", *names))
