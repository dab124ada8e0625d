"""`launch.bench gpu`: its flags, and the processes that measure. The measuring is shardlm/bench's."""

import math
import pathlib
import sys
from collections.abc import Sequence

from absl import flags

from launch.compile_cache import use_compile_cache
from shardlm.bench.case import Given, chosen_parts, errors
from shardlm.errors import ShardlmError
from shardlm.files import write_atomically

OUTPUT = "benchmarks/results/gpu.json"

_PARTS = flags.DEFINE_list(
    "parts", [], "gpu: of train, decode, kernels, plan, tests, code, what matters most first; empty: all."
)
_SIZES = flags.DEFINE_string(
    "sizes", "full", "gpu: full, for a GPU of 80 GB or more; tiny, to see that all of it runs."
)
_RESUME = flags.DEFINE_bool("resume", False, "gpu: leave out what --output has already, unless it failed there.")
_LIMIT = flags.DEFINE_float("limit_seconds", math.inf, "gpu: end after so long; --resume goes on.", lower_bound=1)
_TORCH = flags.DEFINE_string(
    "torch_python", sys.executable, "gpu: a Python with torch and transformers to compare with."
)
_CASES = flags.DEFINE_multi_string(
    "case", [], "gpu: measure these cases of one part in this process, with rows to --output."
)
_HAVE = flags.DEFINE_multi_string("have", [], "gpu: with --case, rows (CASE: NAME) that it need not measure again.")


def main(benchmark: str) -> int:
    """1 if anything failed."""
    output = pathlib.Path(flags.FLAGS.output or OUTPUT)
    parts = chosen_parts(_PARTS.value)
    if _CASES.value:
        return _measure(parts, output)
    from shardlm.bench.report import markdown, rows_of
    from shardlm.bench.run import run_all

    found, left = run_all(
        parts,
        _SIZES.value,
        output,
        lambda part, cases, rows, have: _command(part, cases, rows, have, output),
        resume=_RESUME.value,
        seconds=_LIMIT.value,
        say=lambda text: print(text, file=sys.stderr, flush=True),
    )
    plan = found["parts"].get("plan")
    summaries = {}
    if plan:
        from shardlm.bench.planning import summary

        summaries["plan"] = summary(list(rows_of(plan)))
    text = markdown(found, summaries)
    if left:
        text += f"\n{len(left)} cases are left, for the same command with --resume: {'; '.join(left)}\n"
    if output.exists():
        write_atomically(output.with_suffix(".md"), text.encode())
    print(text)
    wrong = [error for part in found["parts"].values() for case in part.values() for error in errors(case)]
    return int(bool(wrong))


def _measure(parts: Sequence[str], output: pathlib.Path) -> int:
    """In a process that measures."""
    from shardlm.bench.run import write_rows

    if len(parts) != 1:
        raise ShardlmError("--case: name the one part that it is of, as --parts=kernels")
    use_compile_cache()
    profile = pathlib.Path(flags.FLAGS.profile or output.with_suffix(".profile.json"))
    given = Given(_SIZES.value, _TORCH.value, profile, tuple(_HAVE.value))
    return write_rows(parts[0], _CASES.value, given, output)


def _command(
    part: str, cases: Sequence[str], rows: pathlib.Path, have: Sequence[str], output: pathlib.Path
) -> list[str]:
    own = [f"--parts={part}", *(f"--case={case}" for case in cases), f"--output={rows}", f"--sizes={_SIZES.value}"]
    given = [f"--profile={output.with_suffix('.profile.json')}", f"--torch_python={_TORCH.value}"]
    given += [f"--have={name}" for name in have]
    given += [f"--compile_cache={flags.FLAGS.compile_cache}"] if flags.FLAGS.compile_cache else []
    return [sys.executable, "-m", "launch.bench", "gpu", *own, *given]
