"""Ways to train one small model on eight devices, for `launch.bench strategies`: what each changes in the
configuration, and the table that compares them. Running them is the launcher's. Imports no jax."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from shardlm.errors import ShardlmError

MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to train.

    changes  overrides of the configuration as on the command line, between spaces: "mesh.data=8 rules=zero1"
    config   a configuration file of its own, where the model is another; "" for the one that is compared
    """

    name: str
    changes: str
    config: str = ""

    def flags(self) -> list[str]:
        return [f"--config.{change}" for change in self.changes.split()]


EXPERTS = "configs/bench_experts.py"
STAGED = "rules=zero1 train.accumulation=8"
VARIANTS = (
    Variant("one device", "rules=replicated cpu_devices=1"),
    Variant("data parallel", "rules=replicated mesh.data=8"),
    Variant("ZeRO-1", "rules=zero1 mesh.data=8"),
    Variant("ZeRO-2", "rules=zero2 mesh.data=8"),
    Variant("ZeRO-3 (FSDP)", "rules=zero3 mesh.fsdp=8"),
    Variant("hybrid (HSDP)", "rules=hybrid mesh.data=2 mesh.fsdp=4"),
    Variant("tensor", "rules=replicated mesh.tensor=8"),
    Variant("FSDP x tensor", "rules=zero3 mesh.fsdp=4 mesh.tensor=2"),
    Variant("data x FSDP x tensor", "rules=zero3 mesh.data=2 mesh.fsdp=2 mesh.tensor=2"),
    Variant("pipeline (GPipe)", "rules=zero1 mesh.data=2 mesh.pipeline=4 train.accumulation=8 pipeline.schedule=gpipe"),
    Variant("pipeline (circular)", "rules=zero1 mesh.data=2 mesh.pipeline=4 train.accumulation=8"),
    Variant("pipeline (1F1B)", "rules=zero1 mesh.data=2 mesh.pipeline=4 train.accumulation=8 pipeline.schedule=1f1b"),
    Variant("context (ring)", "rules=zero3 mesh.context=8 context_attention=ring"),
    Variant("context (Ulysses)", "rules=zero3 mesh.context=8 context_attention=ulysses"),
    Variant("hybrid (int8 over data)", "rules=hybrid mesh.data=2 mesh.fsdp=4 slow_link.compression=int8"),
    Variant("hybrid (PowerSGD over data)", "rules=hybrid mesh.data=2 mesh.fsdp=4 slow_link.compression=powersgd"),
    Variant("experts: FSDP", "rules=zero3 mesh.fsdp=8", EXPERTS),
    Variant("experts: over 2 (gathered)", "rules=zero3 mesh.fsdp=4 mesh.expert=2", EXPERTS),
    Variant("experts: over 8 (sent)", "rules=zero3 mesh.expert=8", EXPERTS),
    Variant("experts: over 2, tensor, pipeline", f"{STAGED} mesh.expert=2 mesh.tensor=2 mesh.pipeline=2", EXPERTS),
)


def chosen(names: Sequence[str], variants: Sequence[Variant] = VARIANTS) -> tuple[Variant, ...]:
    """The variants of these names, in the table's order; all for none. Raises ShardlmError for an unknown name."""
    known = [variant.name for variant in variants]
    if unknown := [name for name in names if name not in known]:
        raise ShardlmError(f"there is no strategy {unknown[0]!r}; there are {', '.join(known)}")
    return tuple(variant for variant in variants if not names or variant.name in names)


def row(variant: Variant, result: Mapping[str, Any]) -> dict[str, Any]:
    """What the table keeps of a result of `bench_training`."""
    return {
        "strategy": variant.name,
        "mesh": {axis: size for axis, size in result["mesh"].items() if size > 1},
        "rules": result["rules"],
        "step_seconds": result["step_seconds"]["p50"],
        "argument_bytes": result["compiled_argument_bytes"],
        "temporary_bytes": result["compiled_temporary_bytes"],
        "sent_bytes": result["communication"]["sent_bytes"],
        "loss_last": result["loss_last"],
    }


SETTING = ("date", "device_kind", "host_cpus", "versions", "steps", "warmup", "precision", "optimizer")


def report(rows: Sequence[Mapping[str, Any]], results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The rows with what is the same in all results."""
    setting = {name: results[-1][name] for name in SETTING} if results else {}
    return {"benchmark": "strategies", **setting, "rows": list(rows)}


def failed(variant: Variant, message: str) -> dict[str, Any]:
    """The row of a variant that did not run."""
    return {"strategy": variant.name, "error": message}


def markdown(table: Mapping[str, Any]) -> str:
    """The comparison: a line a strategy, a column for each set of axes that anything is sent over. Bytes are of one
    device; those sent count each kind of collective by the ring algorithm (hlo/collectives.py)."""
    rows = table["rows"]
    ran = [row for row in rows if "error" not in row]
    axes = sorted({axis for row in ran for axis in row["sent_bytes"]}, key=lambda axis: (axis.count("+"), axis))
    head = ["strategy", "mesh", "rules", "s/step", "state MiB", "temporaries MiB", "sent MiB/step"]
    lines = [head + [f"over {axis}" for axis in axes]]
    for row in rows:
        if "error" in row:
            lines.append([row["strategy"], row["error"].replace("|", "/"), *[""] * (len(lines[0]) - 2)])
            continue
        sent = {axis: sum(kinds.values()) for axis, kinds in row["sent_bytes"].items()}
        mesh = " x ".join(f"{axis}={size}" for axis, size in row["mesh"].items()) or "1"
        sizes = [row["argument_bytes"], row["temporary_bytes"], sum(sent.values())]
        cells = [row["strategy"], mesh, row["rules"], f"{row['step_seconds']:.3f}", *map(_mib, sizes)]
        lines.append(cells + [_mib(sent[axis]) if axis in sent else "" for axis in axes])
    ruler = ["---"] * 3 + ["---:"] * (len(lines[0]) - 3)
    lines = [f"| {' | '.join(cells)} |" for cells in (lines[0], ruler, *lines[1:])]
    return "\n".join([*lines, "", _caption(table)] if ran else lines) + "\n"


def _caption(table: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {table['versions'][name]}" for name in ("jax", "jaxlib"))
    return (
        f"Bytes are of one device. Seconds: median of {table['steps']} steps, measured on {table['date']} "
        f"({table['host_cpus']} cores, {table['device_kind']} devices, {versions}, {table['precision']}, "
        f"{table['optimizer']}); memory and sent bytes: compiled. XLA:CPU makes an all-reduce of what is a "
        "reduce-scatter on a GPU, and so sends more."
    )


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:,.2f}"
