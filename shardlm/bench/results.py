"""The file that `launch.bench gpu` writes: what the machine is, and of each case its rows, or why it has none. Written
anew after every case, so that what ended stays."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from shardlm.bench.case import CONTINUED, errors
from shardlm.errors import ShardlmError
from shardlm.files import write_atomically

FORMAT = 1
Results = dict[str, Any]


def fresh(sizes: str, machine: Mapping[str, Any]) -> Results:
    return {"benchmark": "gpu", "format": FORMAT, "sizes": sizes, "machine": dict(machine), "parts": {}}


def read(path: pathlib.Path, sizes: str, machine: Mapping[str, Any]) -> Results:
    """What was measured before. Raises ShardlmError for a file of something else, of other sizes or other devices."""
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise ShardlmError(f"--resume: {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ShardlmError(f"--resume: {path} is not JSON: {error}; leave --resume out to begin anew") from error
    if not isinstance(found, dict) or (found.get("benchmark"), found.get("format")) != ("gpu", FORMAT):
        raise ShardlmError(f"--resume: {path} is not of this benchmark; leave --resume out to replace it")
    kinds = [[device["kind"] for device in of["devices"]] for of in (found["machine"], machine)]
    if (found["sizes"], kinds[0]) != (sizes, kinds[1]):
        raise ShardlmError(
            f"--resume: {path} has --sizes={found['sizes']} on {', '.join(kinds[0])}, and this is --sizes={sizes} on "
            f"{', '.join(kinds[1])}; name another --output, or leave --resume out to replace it"
        )
    return found


def done(results: Results, part: str, case: str) -> bool:
    """Whether a case was measured to its end and nothing in it failed."""
    found = results["parts"].get(part, {}).get(case)
    return found is not None and not found.get("unfinished") and not errors(found)


def failed(results: Results, part: str, case: str) -> bool:
    """Whether a case did not end, and not for want of time."""
    return bool(results["parts"].get(part, {}).get(case, {}).get("error"))


def kept(results: Results, part: str, case: str) -> list[dict[str, Any]]:
    """The rows of a case that need not be measured again."""
    found = results["parts"].get(part, {}).get(case, {"rows": []})
    return [row for row in found["rows"] if not row.get("error")] if part in CONTINUED else []


def put(results: Results, part: str, case: str, found: Mapping[str, Any], path: pathlib.Path) -> None:
    """Keeps a case, on the disk too."""
    results["parts"].setdefault(part, {})[case] = dict(found)
    write_atomically(path, json.dumps(results, indent=1).encode() + b"\n")
