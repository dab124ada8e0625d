"""Chooses how the replicas of `data` train together: one sum of gradients that XLA makes, an exchange of their own
(replicas.py, compression.py), or local steps with seldom exchanges (diloco.py). Compiles nothing."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding

from shardlm.state import ModelDef, TrainState
from shardlm.train.compression import Exchange
from shardlm.train.config import RunConfig
from shardlm.train.diloco import LocalSgd, LocalSteps, Timetable
from shardlm.train.replicas import apart, begin_exchange, exchanged_gradients, shares
from shardlm.train.step import StepConfig, make_train_step

Tree = Any
Step = Callable[[int, TrainState, Any], tuple[TrainState, dict[str, jax.Array]]]


# Programs that exchange weights beside a step. XLA counts the collectives inside a loop against how many may be under
# way, and with its default of one starts the exchange only after the last loop over layers. Without a limit it starts
# before the first one (compiled: Llama 3 8B, jaxlib 0.10.2; 16 were too few for the first loop).
BESIDE = {"xla_gpu_experimental_parallel_collective_overlap_limit": 1000}


@dataclasses.dataclass(frozen=True)
class Part:
    """A function to compile: of (state, batch) or, without `takes_batch`, of (state,); with compiler options of its
    own. `changes`: it gives a new state first, for one that is donated. `beside`: shapes of what it takes after the
    state instead of a batch."""

    function: Callable
    takes_batch: bool = True
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    changes: bool = True
    beside: Callable[[], tuple] | None = None


@dataclasses.dataclass(frozen=True)
class Strategy:
    """What a program compiles and how it is called.

    begin     makes a new state ready: adds what replicas keep of their own; inside jit
    programs  by name; "step" is the one that every step or most steps run
    assemble  compiled programs by name -> the step, called with its number (from 1), the state and the batch
    traffic   one line on the bytes that cross `data`; "" where XLA decides alone
    """

    begin: Callable[[TrainState], TrainState]
    programs: Mapping[str, Part]
    assemble: Callable[[Mapping[str, Callable]], Step]
    traffic: str = ""


def choose(
    config: RunConfig, model: ModelDef, tx: optax.GradientTransformation, rate: optax.Schedule, step: StepConfig
) -> Strategy:
    """The strategy of a run; under its mesh. `check_replicas` has refused what does not fit together."""
    if not apart(config):
        return _every_step(make_train_step(model, tx, rate, step), lambda state: state)
    rules = model.execution.rules.inside("data")
    replica = ModelDef.make(model.config, dataclasses.replace(model.execution, rules=rules))
    counts = shares(config.train, model.execution.rules.mesh.data)
    exchange = Exchange(config.slow_link.compression, config.slow_link.rank, model.names)
    traffic = _traffic(config, replica, exchange, model.execution.rules.mesh.data)
    if config.local_sgd.inner_steps:
        local = LocalSgd(model, replica, tx, rate, step, config.local_sgd, counts, exchange)
        return _seldom(local, traffic)
    gradient = exchanged_gradients(model, replica, step, counts, exchange)
    begin = lambda state: dataclasses.replace(state, link=begin_exchange(replica, exchange, state.params))  # noqa: E731
    return dataclasses.replace(_every_step(make_train_step(model, tx, rate, step, gradient), begin), traffic=traffic)


def _every_step(step: Callable, begin: Callable) -> Strategy:
    def assemble(compiled):
        return lambda number, state, batch: compiled["step"](state, batch)

    return Strategy(begin, {"step": Part(step)}, assemble)


def _seldom(local: LocalSgd, traffic: str) -> Strategy:
    fragments = range(local.config.fragments)
    beside = fragments if local.config.overlap else ()
    sending = {f"sending {p}": Part(local.inner_sending(p), options=BESIDE) for p in beside}
    finishing = {f"finishing {p}": Part(local.finishing(p), takes_batch=False) for p in fragments}

    def assemble(compiled):
        sends = {p: compiled[f"sending {p}"] for p in beside}
        finishes = {p: compiled[f"finishing {p}"] for p in fragments}
        return LocalSteps(Timetable(local.config), compiled["step"], sends, finishes)

    return Strategy(local.with_replicas, {"step": Part(local.inner), **sending, **finishing}, assemble, traffic)


def gradient_shapes(replica: ModelDef, mesh: Mesh) -> Tree:
    """Gradients as they lie in one replica when it exchanges them."""
    table = replica.execution.rules.optimizer

    def leaf(shape, names):
        sharding = NamedSharding(mesh, table.spec(*names[0], *names[1]))
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    return jax.tree.map(leaf, replica.shapes, replica.names)


def _traffic(config: RunConfig, replica: ModelDef, exchange: Exchange, replicas: int) -> str:
    shapes = gradient_shapes(replica, jax.sharding.get_mesh())
    every = max(1, config.local_sgd.inner_steps)
    before = dataclasses.replace(exchange, compression="none").bytes_sent(shapes, replicas) / 2**20
    after = exchange.bytes_sent(shapes, replicas) / 2**20
    how = f"{exchange.compression} exchanges" if exchange.compression != "none" else "exact exchanges"
    if every > 1:
        how += f" every {every} steps, {after:,.3f} MiB each, which is"
    return (
        f"slow link: {how} {after / every:,.3f} MiB a step from each device over data={replicas}; "
        f"{before:,.3f} MiB without (computed)"
    )
