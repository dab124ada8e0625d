"""The tables of `launch.bench gpu`, in Markdown: a table for each part, what failed under each. Imports no jax."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from shardlm.bench.case import errors

GIB = 2**30
Row = Mapping[str, Any]
Column = tuple[str, Callable[[Row], Any]]  # head, cell


def number(value: float | None, form: str = ".3g", scale: float = 1) -> str:
    return "" if value is None else format(value / scale if scale != 1 else value, form)


def percent(value: float | None) -> str:
    return number(value, ".0%")


TRAIN: tuple[Column, ...] = (
    ("model", lambda r: r["name"]),
    ("side", lambda r: r["side"]),
    ("batch", lambda r: f"{_of(r, 'global_batch', 'batch')} x {_of(r, 'seq_len', 'seq')}"),
    ("tokens/s", lambda r: number(r["tokens_per_second"], ",.0f")),
    ("s/step", lambda r: number(r["step_seconds"]["p50"])),
    ("MFU", lambda r: percent(r.get("mfu"))),
    ("of the bound", lambda r: percent(r.get("of_bound"))),
    ("GiB", lambda r: number((r.get("peak_memory_bytes") or {}).get("measured_on_device"), ".1f", GIB)),
    ("GiB, compiled", lambda r: number((r.get("peak_memory_bytes") or {}).get("compiled"), ".1f", GIB)),
    ("compile s", lambda r: number(r.get("compile_seconds"), ".0f")),
)
DECODE: tuple[Column, ...] = (
    ("engine", lambda r: r["case"]),
    ("what", lambda r: r["name"]),
    ("tokens/s", lambda r: number(r.get("tokens_per_second"), ",.0f")),
    ("ms", lambda r: number(r.get("seconds"), ".2f", 1e-3)),
    ("ms/step", lambda r: number(r.get("seconds_per_step"), ".2f", 1e-3)),
    ("predicted ms", lambda r: number(r.get("predicted_seconds"), ".2f", 1e-3)),
    ("busy ms/step", lambda r: number(r.get("busy_seconds"), ".2f", 1e-3)),
    ("kernels/step", lambda r: number(r.get("kernels"), ".0f")),
    ("of the 12 longest", lambda r: percent(r.get("of_longest"))),
    ("of the bound", lambda r: percent(r.get("of_bound"))),
    ("target", lambda r: percent(r.get("target"))),
)
KERNELS: tuple[Column, ...] = (
    ("family", lambda r: r["case"]),
    ("shape", lambda r: r["name"]),
    ("what", lambda r: r["what"]),
    ("largest error", lambda r: number(r["largest_error"], ".2g")),
    ("allowed", lambda r: number(r["allowed_error"], ".2g")),
    ("us", lambda r: number(r["seconds"], ",.1f", 1e-6)),
    ("reference us", lambda r: number(r["reference_seconds"], ",.1f", 1e-6)),
    ("TFLOP/s", lambda r: number(r["flops_per_second"], ".1f", 1e12)),
    ("GB/s", lambda r: number(r["bytes_per_second"], ",.0f", 1e9)),
    ("of the roofline", lambda r: percent(r["of_roofline"])),
)
CODE: tuple[Column, ...] = (
    ("shape", lambda r: r["name"]),
    ("kernel", lambda r: r["kernel"]),
    ("grid", lambda r: " x ".join(map(str, r["grid"]))),
    ("blocks for each core", lambda r: number(r["blocks_each"], ".1f")),
    ("that fit", lambda r: number(r["blocks_fit"], "d")),
    ("threads", lambda r: number(r["threads"], "d")),
    ("registers", lambda r: number(r["registers"], "d")),
    ("bytes spilled", lambda r: number(r["spilled_bytes"], "d")),
    ("KiB shared", lambda r: number(r["shared_bytes"], ".0f", 2**10)),
    ("instructions of the loop", lambda r: f"{r['loop'].get('all', '')} {r['source']}"),
    ("of tensor cores", lambda r: number(r["loop"].get("tensor cores"), "d")),
)
PLAN: tuple[Column, ...] = (
    ("step", lambda r: r["name"]),
    ("predicted s", lambda r: number(r.get("predicted_seconds"))),
    ("measured s", lambda r: number(r["measured_seconds"])),
    ("ratio", lambda r: number(_ratio(r, "predicted_seconds", "measured_seconds"), ".2f")),
    ("predicted GiB", lambda r: number(r.get("predicted_bytes"), ".2f", GIB)),
    ("compiled GiB", lambda r: number(r["compiled_bytes"], ".2f", GIB)),
    ("measured GiB", lambda r: number(r["measured_bytes"], ".2f", GIB)),
    ("ratio", lambda r: number(_ratio(r, "predicted_bytes", "measured_bytes"), ".2f")),
)
TESTS: tuple[Column, ...] = (
    ("test", lambda r: r["name"]),
    ("outcome", lambda r: r["outcome"]),
    ("s", lambda r: number(r["seconds"], ".1f")),
    ("why", lambda r: (r.get("reason") or "").splitlines()[0] if r.get("reason") else ""),
)
COLUMNS = {"train": TRAIN, "decode": DECODE, "kernels": KERNELS, "code": CODE, "plan": PLAN, "tests": TESTS}
NEEDED = {  # what a row has one of that belongs into its part's table
    "train": {"tokens_per_second"},
    "decode": {"tokens_per_second", "busy_seconds", "bundle_bytes"},
    "kernels": {"largest_error"},
    "code": {"kernel"},
    "plan": {"measured_seconds"},
    "tests": {"outcome"},
}


def _of(row: Row, own: str, peers: str) -> Any:
    """A field of ours, or what a peer calls it."""
    return row[own] if own in row else row["shape"][peers]


def _ratio(row: Row, a: str, b: str) -> float | None:
    return row[a] / row[b] if row.get(a) and row.get(b) else None


def rows_of(cases: Mapping[str, Row]) -> Iterator[dict[str, Any]]:
    """All rows of a part, each with its case."""
    for case, found in cases.items():
        yield from ({"case": case, **row} for row in found["rows"])


def markdown(results: Mapping[str, Any], summaries: Mapping[str, Mapping[str, Any]]) -> str:
    """The whole: the setting, then the parts. `summaries` are sentences' numbers by part."""
    lines = [f"# GPU benchmark, sizes {results['sizes']}", "", _setting(results["machine"]), ""]
    for part, cases in results["parts"].items():
        rows = [row for row in rows_of(cases) if NEEDED[part] & row.keys()]
        lines += [f"## {part}", "", *(_table(COLUMNS[part], rows) if rows else ["nothing was measured"]), ""]
        said = [f"{name} {value:.3g}" for name, value in summaries.get(part, {}).items()]
        lines += [f"{', '.join(said)}.", ""] if said else []
        notes = [f"- not compared: {row['not_compared']}" for row in rows_of(cases) if "not_compared" in row]
        for case, found in cases.items():
            notes += [f"- {case}: {_line(error)}" for error in errors(found)]
        lines += [*notes, ""] if notes else []
    return "\n".join(lines)


def _setting(machine: Mapping[str, Any]) -> str:
    kinds = ", ".join(sorted({device["kind"] for device in machine["devices"]}))
    driver = machine["nvidia_smi"]
    told = driver if isinstance(driver, str) else f"driver {driver[0].get('driver_version')}"
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return f"{machine['date']}, {len(machine['devices'])} x {kinds}, {machine['host_cpus']} cores; {told}; {versions}."


def _table(columns: Sequence[Column], rows: Sequence[Row]) -> list[str]:
    cells = [[str(cell(row)).replace("|", "/") for _, cell in columns] for row in rows]
    ruler = ["---" if i < 2 else "---:" for i in range(len(columns))]
    return [f"| {' | '.join(line)} |" for line in ([head for head, _ in columns], ruler, *cells)]


def _line(error: str) -> str:
    """An error's last lines in one."""
    return " / ".join(line.strip() for line in error.splitlines() if line.strip())[-600:]
