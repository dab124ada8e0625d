"""Local SGD and DiLoCo (https://arxiv.org/abs/2311.08105): each replica of `data` takes inner steps of its own, and an
outer Nesterov step moves the common weights by what the replicas moved on average. Fragments of the layers are
exchanged in turn, beside the inner steps (Streaming DiLoCo, https://arxiv.org/abs/2501.18512).

The state's params are the common weights, which are evaluated and exported; what a replica has of its own is in the
state's link. An inner step is the ordinary one (step.py) on one replica, and nothing in it crosses the link.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardlm.state import ModelDef, TrainState
from shardlm.train.compression import EXCHANGE_SPECS, Exchange, ExchangeState, is_names
from shardlm.train.config import LocalSgdConfig
from shardlm.train.replicas import ALIKE, OWN, over_data, own_share
from shardlm.train.step import Batch, StepConfig, accumulated, losses_and_loads, make_train_step

Tree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LocalSgdState:
    """replicas, each one's weights, optimizer state and counters, every array [R, ...]; momentum of the outer step,
    like gradients; arrived, what was exchanged and waits to be applied, or None; exchange, of the compression."""

    replicas: TrainState
    momentum: Tree
    arrived: Tree | None
    exchange: ExchangeState


LINK_SPECS = LocalSgdState(OWN, ALIKE, ALIKE, EXCHANGE_SPECS)
STATE_SPECS = TrainState(ALIKE, ALIKE, ALIKE, ALIKE, ALIKE, ALIKE, ALIKE, LINK_SPECS)


@dataclasses.dataclass(frozen=True)
class Timetable:
    """Which fragment is exchanged when; steps count from 1. Fragment p takes effect after step (p + 1) * H / P of each
    H inner steps, and is on its way during that step and the overlap - 1 steps before."""

    config: LocalSgdConfig

    def applied_after(self, step: int) -> int | None:
        """The fragment that takes effect after this step."""
        H, P = self.config.inner_steps, self.config.fragments
        due = [p for p in range(P) if (step - H * (p + 1) // P) % H == 0]
        return due[0] if due else None

    def sent_beside(self, step: int) -> int | None:
        """The fragment that is exchanged while this step computes; None where all wait for exchanges."""
        return self.applied_after(step + self.config.overlap - 1) if self.config.overlap else None


@dataclasses.dataclass(frozen=True)
class LocalSgd:
    """The functions of a run; all take the whole state, and are called under its mesh.

    model    as the common weights are evaluated; `replica` is the same under rules.inside("data")
    counts   microbatches of each replica in a step (replicas.shares)
    """

    model: ModelDef
    replica: ModelDef
    tx: optax.GradientTransformation
    rate: optax.Schedule
    step: StepConfig
    config: LocalSgdConfig
    counts: tuple[int, ...]
    exchange: Exchange

    def with_replicas(self, state: TrainState) -> TrainState:
        """A new run's state, from the ordinary one of the same weights."""

        def local(params):
            split = self._split(params)
            zeros = jax.tree.map(jnp.zeros_like, split)
            own = TrainState(params, self.tx.init(split), jnp.int32(0), None, None, jnp.int32(0), jnp.int32(0))
            arrived = zeros if self.config.overlap else None
            return LocalSgdState(_with_leading(own), zeros, arrived, self.exchange.init(split))

        link = over_data(local, in_specs=(ALIKE,), out_specs=LINK_SPECS)(state.params)
        return dataclasses.replace(state, opt_state=(), link=link)

    def inner(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        """Each replica's own step. Metrics are [R], one of each replica: `readings` sums them up."""
        return self._step(state, batch, None)

    def inner_sending(self, fragment: int) -> Callable:
        """As `inner`, while a fragment of what the replicas moved before it is exchanged."""
        return lambda state, batch: self._step(state, batch, fragment)

    def finishing(self, fragment: int) -> Callable[[TrainState], TrainState]:
        """The outer step of a fragment: state -> state. Without overlap it exchanges the fragment first."""

        def local(state: TrainState) -> TrainState:
            own, link = _without_leading(state.link.replicas), state.link
            exchange, arrived = link.exchange, link.arrived
            if arrived is None:
                moved, exchange = self._exchanged(state.params, own.params, exchange, fragment)
            else:
                moved = self._take(arrived, fragment)
            return self._outer(state, own, moved, exchange, fragment)

        return over_data(local, in_specs=(STATE_SPECS,), out_specs=STATE_SPECS)

    def _step(self, state: TrainState, batch: Batch, fragment: int | None):
        def local(params, link: LocalSgdState, batch):
            own, exchange, arrived = _without_leading(link.replicas), link.exchange, link.arrived
            moved = None
            if fragment is not None:
                moved, exchange = self._exchanged(params, own.params, exchange, fragment)
                arrived = self._put(arrived, moved, fragment)
            gradient = partial(self._own_gradient, moved)
            own, metrics = make_train_step(self.replica, self.tx, self.rate, self.step, gradient)(own, batch)
            return LocalSgdState(_with_leading(own), link.momentum, arrived, exchange), _with_leading(metrics)

        run = over_data(local, in_specs=(ALIKE, LINK_SPECS, OWN), out_specs=(LINK_SPECS, OWN))
        link, metrics = run(state.params, state.link, batch)
        return dataclasses.replace(state, step=state.step + 1, link=link), metrics

    def _own_gradient(self, moved, params, batch, scale, link):
        """Of the mean loss over this replica's tokens. Where something is exchanged beside it, the update waits for it:
        else XLA would start the exchange after the layers, beside the small kernels of the update."""
        weights = batch["loss_mask"] / jnp.maximum(jnp.sum(batch["loss_mask"]), 1)
        grads, parts = accumulated(self.replica, params, batch, weights, self.step, own_share(self.counts))
        grads, _ = jax.lax.optimization_barrier((self._split(grads), moved))
        return grads, losses_and_loads(parts), link

    def _exchanged(self, common, own, exchange: ExchangeState, fragment: int):
        """The outer gradient of a fragment: how far the replicas moved back from it, on average by their shares."""
        mine = own_share(self.counts) / sum(self.counts)
        moved = jax.tree.map(lambda old, new: (old - new) * mine, self._split(common), self._split(own))
        residual = jax.tree.map(lambda a: a[0], exchange.residual)
        part = ExchangeState(_with_leading(self._take(residual, fragment)), self._take(exchange.basis, fragment))
        moved, part = self.exchange(self._take(moved, fragment), part)
        left = self._put(residual, _without_leading(part.residual), fragment)
        return moved, ExchangeState(_with_leading(left), self._put(exchange.basis, part.basis, fragment))

    def _outer(self, state: TrainState, own: TrainState, moved, exchange, fragment: int) -> TrainState:
        """Nesterov's step on one fragment, and what the replicas take over of it."""
        rate, decay, mixing = self.config.outer_learning_rate, self.config.outer_momentum, self.config.mixing
        common, mine = (self._take(self._split(tree), fragment) for tree in (state.params, own.params))
        momentum = jax.tree.map(lambda m, g: decay * m + g, self._take(state.link.momentum, fragment), moved)
        common = jax.tree.map(lambda p, m, g: p - rate * (g + decay * m), common, momentum, moved)
        mine = jax.tree.map(lambda p, c: c + mixing * (p - c), mine, common)
        place = lambda whole, part: self.replica.place(  # noqa: E731
            self._put(self._split(whole), part, fragment), self.replica.execution.rules.rest
        )
        own = dataclasses.replace(own, params=place(own.params, mine))
        momentum = self._put(state.link.momentum, momentum, fragment)
        link = dataclasses.replace(state.link, replicas=_with_leading(own), momentum=momentum, exchange=exchange)
        return dataclasses.replace(state, params=place(state.params, common), link=link)

    def _split(self, tree: Tree) -> Tree:
        return self.replica.place(tree, self.replica.execution.rules.optimizer)

    # Fragments: P runs of each stack's layers, the embedding with the first and what follows the layers with the last.

    def _take(self, tree: Tree, fragment: int) -> Tree:
        """A fragment of a tree of weights; a leaf that is not in it is None."""

        def part(path, names, a):
            rows = self._rows(path, names, a, fragment)
            return None if rows is None else a[rows] if names[0] else a

        return self._map(part, tree)

    def _put(self, tree: Tree, parts: Tree, fragment: int) -> Tree:
        """The tree with a fragment of it replaced."""

        def leaf(path, names, a, part):
            rows = self._rows(path, names, a, fragment)
            if rows is None or part is None:
                return a
            return jnp.concatenate([a[: rows.start], part, a[rows.stop :]]) if names[0] else part

        return self._map(leaf, tree, parts)

    def _rows(self, path, names, a, fragment: int) -> slice | None:
        """The layers of a leaf in a fragment; None where there are none."""
        P = self.config.fragments
        if a is None:
            return None
        if not names[0]:
            return slice(None) if fragment == (0 if path[0].key == "embedding" else P - 1) else None
        L = a.shape[0]
        rows = slice(L * fragment // P, L * (fragment + 1) // P)
        return rows if rows.start < rows.stop else None

    def _map(self, f: Callable, *trees: Tree) -> Tree:
        return jax.tree_util.tree_map_with_path(f, self.replica.names, *trees, is_leaf=is_names)


def _with_leading(tree: Tree) -> Tree:
    return jax.tree.map(lambda a: a[None], tree)


def _without_leading(tree: Tree) -> Tree:
    return jax.tree.map(lambda a: a[0], tree)


@dataclasses.dataclass(frozen=True)
class LocalSteps:
    """The compiled programs of a run, as one training step."""

    timetable: Timetable
    inner: Callable
    inner_sending: Mapping[int, Callable]
    finishing: Mapping[int, Callable]

    def __call__(self, step: int, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        """Step number `step`, from 1: the inner step, and what of the outer one falls on it."""
        sent, applied = self.timetable.sent_beside(step), self.timetable.applied_after(step)
        state, metrics = (self.inner if sent is None else self.inner_sending[sent])(state, batch)
        return state if applied is None else self.finishing[applied](state), metrics


SUMMED, LARGEST, SMALLEST = {"tokens", "attention_pairs"}, {"skipped", "bad_steps"}, {"finite"}


def readings(metrics: Mapping[str, jax.Array | float]) -> dict[str, float | list]:
    """A step's metrics as numbers, or lists of them. What each replica has of its own, [R, ...] over `data`, is summed
    up over the replicas that this process holds, so that reading it waits for no other site: a sum is scaled to all
    replicas, a mean is theirs."""

    def value(name: str, metric: jax.Array | float) -> float | list:
        if (
            not isinstance(metric, jax.Array)
            or metric.ndim == 0
            or "data" not in jax.tree.leaves(metric.sharding.spec[:1])
        ):
            return np.asarray(metric).tolist()
        held = {shard.index[0].start or 0: np.asarray(shard.data) for shard in metric.addressable_shards}
        own = np.concatenate(list(held.values()))
        if name in SUMMED:
            return (own.sum(axis=0) * metric.shape[0] / len(own)).tolist()
        change = np.max if name in LARGEST else np.min if name in SMALLEST else np.mean
        return change(own, axis=0).astype(float).tolist()

    return {name: value(name, metric) for name, metric in metrics.items()}
