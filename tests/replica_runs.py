"""Training steps of runs whose replicas keep something of their own, on eight virtual devices: shared by the tests of
compression, uneven shares and local SGD."""

import dataclasses
import math
import re

import jax
import numpy as np
from small import LLAMA, mesh_of, packed_batch

from shardlm.mesh import MeshSpec
from shardlm.optim import OptimConfig
from shardlm.train.batches import to_devices
from shardlm.train.config import LocalSgdConfig, RunConfig, SlowLinkConfig, TrainConfig
from shardlm.train.diloco import readings
from shardlm.train.program import Program

ALL = MeshSpec(data=2, fsdp=2, tensor=2)
CONFIG = RunConfig(
    model=LLAMA,
    precision="fp32",
    rules="hybrid",
    optim=OptimConfig(learning_rate=1e-2, warmup_steps=4),
    train=TrainConfig(steps=96, global_batch=16, seq_len=16),
)


def changed(config: RunConfig = CONFIG, *, shares=(), rules="hybrid", optim=None, local=None, **slow_link) -> RunConfig:
    """The configuration with some parts of it set."""
    return dataclasses.replace(
        config,
        rules=rules,
        optim=optim or config.optim,
        train=dataclasses.replace(config.train, shares=shares),
        slow_link=SlowLinkConfig(**slow_link),
        local_sgd=local or LocalSgdConfig(),
    )


def train(program: Program, count: int, state=None, first: int = 1, batch=packed_batch, step=None):
    """(state, metrics of each step) after steps first .. first + count - 1, each on its own batch."""
    step, metrics = step or program.compile_step({}), []
    rows = program.config.train.global_batch
    with jax.set_mesh(program.mesh):
        state = program.init() if state is None else state
        for number in range(first, first + count):
            arrays = batch(rows=rows, seed=number)
            on_mesh = to_devices(arrays, tuple(range(rows)), program.batch_sharding, program.slots)
            state, found = step(number, state, on_mesh)
            metrics.append(readings(found))
    return state, metrics


def make(config: RunConfig, spec: MeshSpec = ALL) -> Program:
    return Program.make(config, mesh_of(spec))


_ITEM = {"s8": 1, "u16": 2, "f16": 2, "bf16": 2, "f32": 4, "s32": 4, "pred": 1}
_COLLECTIVE = re.compile(
    r"= (?P<result>.*?) (?P<kind>all-gather|all-reduce|all-to-all|reduce-scatter)(?P<start>-start)?\("
)


def crossing(text: str, per_replica: int) -> list[tuple[str, int]]:
    """(kind, bytes of the result) of the collectives in a compiled program whose groups span replicas of
    `per_replica` devices each, read from the groups' first members."""
    found = []
    for line in text.splitlines():
        match = _COLLECTIVE.search(line)
        if match and _spans(line, per_replica):
            arrays = re.findall(r"\b(s8|u16|f16|bf16|f32|s32|pred)\[([\d,]*)\]", _result(match))
            sizes = [_ITEM[kind] * math.prod(int(d) for d in dims.split(",") if d) for kind, dims in arrays]
            found.append((match["kind"], sum(sizes)))
    return found


def _result(match: re.Match) -> str:
    """What a collective makes: where it only starts it, its type holds what goes in before what comes out."""
    text, depth = match["result"], 0
    if not match["start"] or match["kind"] == "all-reduce":
        return text
    for place, letter in enumerate(text):
        depth += {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}.get(letter, 0)
        if letter == "," and depth == 1:
            return text[place:]
    return text


def sent(collectives: list[tuple[str, int]], replicas: int) -> float:
    """Bytes a device sends in them: a ring all-reduce passes its array twice, the others once."""
    times = {"all-reduce": 2, "all-gather": 1, "all-to-all": 1}
    return sum(times[kind] * size for kind, size in collectives) * (replicas - 1) / replicas


def _spans(line: str, per_replica: int) -> bool:
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    if listed:
        return len({int(device) // per_replica for device in listed[1].split(",")}) > 1
    iota = re.search(r"replica_groups=\[\d+,(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    if iota:
        group = _iota(iota[2], iota[3]).reshape(-1, int(iota[1]))[0]
        return len(set(group // per_replica)) > 1
    mesh = re.search(
        r"replica_groups=mesh\[(.*?)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{(.*?)\}", line
    )
    assert mesh, f"unknown groups: {line}"
    axes = re.findall(r"'(\w+)'=(\d+)", mesh[1])
    sizes = [int(size) for _, size in axes]
    devices = (_iota(mesh[2], mesh[3]) if mesh[2] else np.arange(math.prod(sizes))).reshape(sizes)
    along = [i for i, (name, _) in enumerate(axes) if f"'{name}'" in mesh[4]]
    group = np.moveaxis(devices, along, range(len(along))).reshape(math.prod(sizes[i] for i in along), -1)[:, 0]
    return len(set(group // per_replica)) > 1


def _iota(dims: str, transposed: str | None) -> np.ndarray:
    sizes = [int(d) for d in dims.split(",")]
    devices = np.arange(math.prod(sizes)).reshape(sizes)
    return devices.transpose([int(d) for d in transposed.split(",")]) if transposed else devices
