"""Parts and cases of `launch.bench gpu`. A case yields rows; a part is a module of this folder with
`measure(name, given)`, of the cases that cases.py names, and with `programs(cases, given)` where those of the cases of
one process are compiled ahead of them all (ahead.py). Imports no jax."""

import dataclasses
import pathlib
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from shardlm.bench.ahead import Made
from shardlm.errors import ShardlmError

PARTS = {
    "train": "training steps of dense models against the roofline, and against PyTorch",
    "decode": "the serving engine, decoding and prefill, against the bandwidth and FLOP bounds, and transformers",
    "kernels": "each kernel against its reference: largest error, times, share of the roofline",
    "plan": "predicted against measured seconds and memory of training steps",
    "tests": "pytest -m gpu",
    "code": "registers, spills and instructions of the kernels written here, as compiled: known without a GPU too",
}
CONTINUED = ("decode", "kernels", "code")  # row by row
T = TypeVar("T")
LAST_LINES = 12  # of what a process that failed has said


@dataclasses.dataclass(frozen=True)
class Given:
    """What a case is measured with.

    sizes         "full" or "tiny" (sizes.py)
    torch_python  a Python that may have torch and transformers
    profile       file of the machine's profile, which a case of `plan` writes
    have          rows that were measured before, of those parts that need not measure them again (CONTINUED)
    ahead         what became of the programs that the part's module has named, by its keys
    """

    sizes: str
    torch_python: str
    profile: pathlib.Path
    have: tuple[str, ...] = ()
    ahead: Mapping[Any, Made] = dataclasses.field(default_factory=dict)

    def left(self, case: str, shapes: Mapping[str, T]) -> Iterator[tuple[str, T]]:
        """Those of a case that are still to be measured."""
        return ((name, shape) for name, shape in shapes.items() if of_case(case, name) not in self.have)


def of_case(case: str, name: str) -> str:
    """How `have` calls a row."""
    return f"{case}: {name}"


def chosen_parts(words: Sequence[str]) -> tuple[str, ...]:
    """Each once, as they are named; all for none. Raises ShardlmError for an unknown one."""
    if unknown := [word for word in words if word not in PARTS]:
        raise ShardlmError(f"--parts: there is no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    return tuple(dict.fromkeys(words or PARTS))


def said(text: str) -> str:
    """The last lines of what a process wrote."""
    return "\n".join(text.strip().splitlines()[-LAST_LINES:]) or "no message"


def missing(python: str, packages: Sequence[str], cuda: bool) -> str:
    """Why a Python cannot run a peer; "" if it can: it has the packages and, with `cuda`, torch sees a GPU."""
    code = f"import {', '.join(packages)}; import sys, torch; sys.exit(0 if torch.cuda.is_available() else 3)"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{python}: {error}"
    if done.returncode == 3:
        return f"torch of {python} sees no GPU" if cuda else ""
    return f"no {' and '.join(packages)} in {python}: {said(done.stderr).splitlines()[-1]}" if done.returncode else ""


def of_roofline(seconds: float, flops: float, nbytes: float, peak: float | None, bandwidth: float | None):
    """The least time by FLOPs or by bytes over the time that was measured; None where no peak is known."""
    if not peak or not bandwidth:
        return None
    return max(flops / peak, nbytes / bandwidth) / seconds


def errors(case: Mapping[str, Any]) -> list[str]:
    """What went wrong in a case and in its rows; that time ended is no fault of a case."""
    rows = [f"{row.get('name', '')}: {row['error']}" for row in case["rows"] if row.get("error")]
    return [*([case["error"]] if case["error"] else []), *rows]
