"""How a serving plan is started: the commands, by hosts."""

import dataclasses
import json
import shlex
from collections.abc import Mapping
from typing import Any

from shardlm.mesh import MeshSpec
from shardlm.plan.report.laid_out import wrapped
from shardlm.plan.serving.search import ServingPlan
from shardlm.serve.engine_config import EngineConfig

ROUTER = "python -m launch.router --replica=URL ... --port=8080"
AXES = ("data", "pipeline", "expert", "tensor")


def start(plan: ServingPlan) -> list[dict[str, str]]:
    """{where: command} in the order in which they are started."""
    said = _start(plan)
    return [{"where": where, "command": command} for where, command in zip(said[::2], said[1::2], strict=True)]


def shown(one: dict[str, str], width: int) -> str:
    """A command as a shell takes it, in lines of so many characters as far as its words are shorter."""
    lines = [""]
    for word in map(shlex.quote, shlex.split(one["command"])):
        if lines[-1] and len(lines[-1]) + len(word) + 5 > width:
            lines[-1] += " \\"
            lines.append("   ")
        lines[-1] += f" {word}"
    return "\n ".join([wrapped(f"  {one['where']}"), *lines])


def _start(plan: ServingPlan) -> list[str]:
    per_host, own = plan.case.cluster.gpus_per_host, plan.gpus_per_replica
    mesh = dataclasses.replace(plan.mesh, data=1)
    hosts = -(-own // per_host)
    if hosts > 1:
        many = f"each of the {hosts} hosts of a replica" if plan.replicas > 1 else f"each of the {hosts} hosts"
        found = [
            f"On {many}, under srun, mpirun or a LeaderWorkerSet (else with --coordinator_address, --num_processes "
            "and --process_id):",
            f"{command(plan, mesh)} --distributed",
        ]
        return found + ["Before the first processes of all replicas:", ROUTER] * (plan.replicas > 1)
    together = min(plan.replicas, per_host // own)
    full, left = divmod(plan.replicas, together)
    found = []
    for count, replicas in ((full, together), (1, left)):
        if replicas:
            where = "On a host:" if count == 1 else f"On each of {count} hosts:"
            found += [where, command(plan, dataclasses.replace(mesh, data=replicas))]
    return found + ["Before them:", ROUTER] * (full + bool(left) > 1)


def command(plan: ServingPlan, mesh: MeshSpec) -> str:
    """Of one process, with what was asked for that is not usual."""
    name = plan.case.model.name
    words = [f"--model={'FOLDER' if name.endswith('.py') else name}"]
    words += [f"--{axis}={mesh.size(axis)}" for axis in AXES if mesh.size(axis) > 1]
    for field in dataclasses.fields(EngineConfig):
        value = getattr(plan.case.engine, field.name)
        usual = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if field.name not in ("mesh", "lora_modules") and value != usual:
            words.append(_flag(field.name, value))
    return shlex.join(["python", "-m", "launch.serve", *words])


def _flag(name: str, value: Any) -> str:
    if name == "kv_cache_bytes":
        return f"--kv_cache_gib={value / 2**30:g}"
    if dataclasses.is_dataclass(value):
        usual = {field.name: field.default for field in dataclasses.fields(value)}
        value = {key: own for key, own in dataclasses.asdict(value).items() if own != usual[key]}
    if isinstance(value, Mapping):
        return f"--{name}={json.dumps(value, separators=(',', ':'))}"
    return f"--{name}" if value is True else f"--no{name}" if value is False else f"--{name}={value}"
