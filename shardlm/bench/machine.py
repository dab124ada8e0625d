"""What is said of the machine beside what is measured on it: versions, the driver, clocks. Starts no backend."""

import datetime
import os
import subprocess
import sys
from typing import Any

from shardlm.versions import versions

PACKAGES = ("shardlm", "jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "flax", "optax", "tokamax", "numpy")
FACTS = ("name", "driver_version", "vbios_version", "memory.total", "power.limit", "clocks.max.sm", "clocks.max.mem")
NOW = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw", "memory.used", "pstate")
DEVICES = """
import json, jax
print(json.dumps([{"platform": d.platform, "kind": d.device_kind,
    "bytes_limit": (d.memory_stats() or {}).get("bytes_limit")} for d in jax.devices()]))
"""


def now() -> str:
    """The clock's date and time."""
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


def smi(fields: tuple[str, ...]) -> list[dict[str, str]] | str:
    """What nvidia-smi says of each GPU, or why it says nothing."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi: {error}"
    if done.returncode:
        return f"nvidia-smi: {(done.stdout + done.stderr).strip()}"
    lines = [[cell.strip() for cell in line.split(",")] for line in done.stdout.strip().splitlines()]
    return [dict(zip(fields, cells, strict=False)) for cells in lines]


def facts() -> dict[str, Any]:
    """Of the host, and of its GPUs as the driver tells them."""
    return {
        "date": now(),
        "host_cpus": os.cpu_count(),
        "versions": versions(PACKAGES),
        "nvidia_smi": smi(FACTS),
        "state_at_start": smi(NOW),
    }


def devices_command() -> list[str]:
    """A process that prints jax's devices as JSON: this one must not take a GPU's memory."""
    return [sys.executable, "-c", DEVICES]
