"""What runs apart on each replica of the `data` axis: the door to one replica, replicas with different shares of the
batch, and the refusals of runs whose replicas cannot stand apart. What replicas exchange is compression.py's, and when
they do so seldom diloco.py's."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardlm.errors import ShardlmError
from shardlm.mesh import manual_over
from shardlm.rules import Rules
from shardlm.state import ModelDef
from shardlm.train.compression import EXCHANGE_SPECS, Exchange, ExchangeState
from shardlm.train.config import RunConfig, TrainConfig
from shardlm.train.step import Gradient, StepConfig, accumulated, losses_and_loads

ALIKE, OWN = PartitionSpec(), PartitionSpec("data")  # the same on every replica; a leading dimension of replicas


def over_data(f: Callable, *, in_specs: Any, out_specs: Any) -> Callable:
    """`f` on each replica apart: manual over `data` alone, the other axes stay in the arrays' types."""
    return manual_over(("data",), f, in_specs=in_specs, out_specs=out_specs)


def shares(train: TrainConfig, replicas: int) -> tuple[int, ...]:
    """Microbatches of each replica in a step."""
    return train.shares or (train.accumulation,) * replicas


def own_share(counts: tuple[int, ...]) -> jax.Array | int:
    """Of the replica this runs on; inside `over_data`."""
    return counts[0] if len(set(counts)) == 1 else jnp.array(counts, jnp.int32)[jax.lax.axis_index("data")]


def exchanged_gradients(
    model: ModelDef, replica: ModelDef, config: StepConfig, counts: tuple[int, ...], exchange: Exchange
) -> Gradient:
    """Gradients of which each replica sums its own microbatches and then exchanges the sum (compression.py).

    `replica` is the model under `rules.inside("data")`; replica i takes counts[i] microbatches of equal size. Tokens
    weigh the same whichever replica they fall to, so that without compression uneven shares give the even result.
    """

    def local(params, batch, scale, state):
        total = jax.lax.psum(jnp.sum(batch["loss_mask"]), "data")
        weights = batch["loss_mask"] * (scale / jnp.maximum(total, 1))
        grads, parts = accumulated(replica, params, batch, weights, config, own_share(counts))
        grads = jax.tree.map(lambda g: g / scale, replica.place(grads, replica.execution.rules.optimizer))
        grads, state = exchange(grads, state)
        return grads, jax.tree.map(lambda a: jax.lax.psum(a, "data") / scale, parts), state

    run = over_data(local, in_specs=(ALIKE, OWN, ALIKE, EXCHANGE_SPECS), out_specs=(ALIKE, ALIKE, EXCHANGE_SPECS))

    def gradient(params, batch, scale, state):
        grads, parts, state = run(params, batch, scale, state)
        return model.place(grads, model.execution.rules.optimizer), losses_and_loads(parts), state

    return gradient


def begin_exchange(replica: ModelDef, exchange: Exchange, params: Any) -> ExchangeState:
    """The exchange's state before the first step."""

    def local(params):
        return exchange.init(replica.place(params, replica.execution.rules.optimizer))

    return over_data(local, in_specs=(ALIKE,), out_specs=EXCHANGE_SPECS)(params)


def apart(config: RunConfig) -> bool:
    """Whether the replicas of a run do anything but sum their gradients in float32 every step."""
    uneven = len(set(config.train.shares)) > 1
    return config.slow_link.compression != "none" or uneven or config.local_sgd.inner_steps > 0


def check_replicas(config: RunConfig, rules: Rules) -> None:
    """Refuses what the replicas of `data` cannot do apart: each message says what would work."""
    train, mesh = config.train, rules.mesh
    check_shares(train, rules)
    if not apart(config):
        return
    what = (
        f"local_sgd.inner_steps={config.local_sgd.inner_steps}"
        if config.local_sgd.inner_steps
        else f"slow_link.compression={config.slow_link.compression}"
        if config.slow_link.compression != "none"
        else f"train.shares={train.shares}"
    )
    if mesh.data == 1:
        raise ShardlmError(
            f"{what} works between replicas of the data axis, and mesh.data=1: the mesh is {mesh}. The other axes "
            "exchange exact sums. Set mesh.data to the number of sites or hosts that a slow link joins"
        )
    if any("data" in table.axes("embed") for table in (rules.rest, rules.grads)):
        raise ShardlmError(
            f"{what} needs whole weights and gradients in every replica, and rules={rules.preset} shards them over "
            f"data={mesh.data}; choose rules=hybrid, which shards them over the axes within a replica, or replicated "
            "or zero1"
        )
    if config.local_sgd.inner_steps:
        _check_local_sgd(config)


def check_shares(train: TrainConfig, rules: Rules) -> None:
    """Refuses shares that do not fit the mesh or the batch."""
    if not train.shares:
        return
    mesh, batch_axes = rules.mesh, rules.inside("data").inside("pipeline").act.axes("batch")
    if len(train.shares) != mesh.data:
        raise ShardlmError(
            f"train.shares={train.shares} is for {len(train.shares)} replicas and mesh.data={mesh.data}; "
            "give one number of microbatches to each replica"
        )
    if train.accumulation != 1:
        raise ShardlmError(
            f"train.accumulation={train.accumulation} and train.shares={train.shares}: the shares are the microbatches "
            "of each replica; leave train.accumulation=1"
        )
    ring = [axis for axis in ("pipeline", "context") if mesh.size(axis) > 1]
    if ring:
        # XLA's collective-permute waits for all devices of the program, not only for those it moves data between.
        raise ShardlmError(
            f"train.shares={train.shares} with mesh.{ring[0]}={mesh.size(ring[0])}: its ring would wait for replicas "
            f"that have no microbatch left. Set mesh.{ring[0]}=1 and use fsdp or tensor, or leave train.shares empty"
        )
    ways = sum(train.shares) * mesh.size(*batch_axes)
    if train.global_batch % ways:
        below = train.global_batch // ways * ways
        axes = " x ".join([f"sum of shares={sum(train.shares)}", *(f"{a}={mesh.size(a)}" for a in batch_axes)])
        raise ShardlmError(
            f"train.global_batch={train.global_batch} cannot be split over {axes}, {ways} ways; "
            f"choose {f'{below} or {below + ways}' if below else ways}"
        )


def _check_local_sgd(config: RunConfig) -> None:
    local, train = config.local_sgd, config.train
    if train.steps % local.inner_steps:
        below = train.steps // local.inner_steps * local.inner_steps
        near = f"{below} or {below + local.inner_steps}" if below else str(local.inner_steps)
        raise ShardlmError(
            f"train.steps={train.steps} is not a multiple of local_sgd.inner_steps={local.inner_steps}: the last "
            f"inner steps would not reach the weights; choose {near} steps"
        )
    if config.precision == "fp16":
        raise ShardlmError("local_sgd keeps no common loss scale for precision=fp16; choose bf16 or fp32")
    if config.optim.ema_decay:
        raise ShardlmError(
            f"optim.ema_decay={config.optim.ema_decay} with local_sgd: the weights change once in "
            f"{local.inner_steps} steps and are an average already; set optim.ema_decay=0"
        )
