"""Compiles the real step of a plan for its GPUs, on a machine without them, and reads from the program what it holds
and sends. What is read is compiled, not measured: nothing ran."""

import dataclasses
import time
from collections.abc import Sequence

from shardlm.plan.apart import Failed, each_apart
from shardlm.plan.bill import CompiledStep, compiled_step
from shardlm.plan.cluster import Cluster
from shardlm.plan.plan import Plan
from shardlm.plan.program_layers import buffers_filled
from shardlm.plan.sketch import Sketch
from shardlm.plan.workspace import WORKSPACE
from shardlm.topology import topology
from shardlm.train.config import RunConfig
from shardlm.train.program import Program


@dataclasses.dataclass(frozen=True)
class Verified:
    """The compiled step of one device.

    argument_bytes   what rests, and the batch
    temporary_bytes  besides, at the fullest moment
    step             its kernels and collectives as they are scheduled, with times; None where there is no program
    failure          why there is no program; "" if there is, and then all else is 0
    workspace_bytes  that a compiler without a GPU cannot know of, by formulas (workspace.py)
    """

    argument_bytes: int = 0
    temporary_bytes: int = 0
    step: CompiledStep | None = None
    compile_seconds: float = 0.0
    failure: str = ""
    workspace_bytes: int = 0

    @property
    def hbm_bytes(self) -> int:
        return self.argument_bytes + self.temporary_bytes + self.workspace_bytes


def verify(plans: Sequence[Plan]) -> list[Verified]:
    """Each plan's step compiled, in processes of their own. What reads images is no part of it, and rests beside it;
    nor is cuDNN's workspace."""
    found = each_apart(compile_step, [(plan.config, plan.cluster) for plan in plans])
    return [
        Verified(failure=one.why) if isinstance(one, Failed) else _with_others(one, plan)
        for one, plan in zip(found, plans, strict=True)
    ]


def _with_others(one: Verified, plan: Plan) -> Verified:
    rests, workspace = one.argument_bytes + plan.state.images, plan.memory.kinds.get(WORKSPACE, 0.0)
    return dataclasses.replace(one, argument_bytes=rests, workspace_bytes=int(workspace))


def compile_step(config: RunConfig, cluster: Cluster) -> Verified:
    """In this process. Raises ShardlmError where there is no such program."""
    started = time.perf_counter()
    devices = topology(cluster.gpu, cluster.num_gpus // cluster.gpus_per_host, cluster.gpus_per_host)
    program = Program.make(config, config.mesh.build(devices))
    step = program.compile("step", dict(program.xla_options().options))
    memory = step.memory_analysis()
    filled = buffers_filled(Sketch.of(config, cluster.gpu))
    timed = compiled_step(step.as_text(), cluster, config.mesh, filled)
    seconds = time.perf_counter() - started
    return Verified(memory.argument_size_in_bytes, memory.temp_size_in_bytes, timed, seconds)
