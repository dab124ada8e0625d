"""Reads what ran on the devices out of a profiler's trace (.xplane.pb): kernels of GPUs, operations of XLA:CPU. What
they mean is for labels (hlo/labels.py); what they add up to, for device_time.py."""

import dataclasses
import pathlib
import re
from collections.abc import Iterator

from jax.profiler import ProfileData

from shardlm.errors import ShardlmError

_GPU = re.compile(r"^/device:GPU:(\d+)$")
_STREAM = re.compile(r"^Stream #\d+")
_HOST = "/host:CPU"
_END = "end: "


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """Something that ran on a device.

    device   its number in this process
    name     of the kernel, or of the copy ("MemcpyD2H"); on a CPU, of the instruction
    op       the instruction it belongs to; "" if to none
    module   the program's name, as jax gives it ("jit_step"); "" if it belongs to none
    program  the program's number in this process; -1 if it belongs to none
    start, end  nanoseconds of one clock for all devices of a process
    kernel   whether it is a kernel or a copy of a GPU: these contain no others, as a loop on a CPU does
    """

    device: int
    name: str
    op: str
    module: str
    program: int
    start: int
    end: int
    kernel: bool


def find(folder: pathlib.Path) -> pathlib.Path:
    """The newest .xplane.pb below a folder that jax.profiler has written. Raises ShardlmError if there is none."""
    found = sorted(folder.glob("plugins/profile/*/*.xplane.pb"), key=lambda path: path.stat().st_mtime_ns)
    if not found:
        raise ShardlmError(f"the profiler wrote no trace into {folder}; is its disk full?")
    return found[-1]


def read(data: ProfileData) -> list[Event]:
    """All that ran on this process's devices, in order of start.

    GPUs: a plane a GPU, a line a stream, an event a kernel or a copy, as openxla's xla/backends/profiler/gpu/
    cupti_collector.cc writes them. To what they run for they have the stats hlo_module, program_id and hlo_op, which
    come from xla/backends/gpu/runtime/annotation.cc: of a collective that is issued in two halves, the first. CPUs: all
    devices share the plane of the host, and their operations carry device_ordinal.
    """
    events: list[Event] = []
    for plane in data.planes:
        gpu = _GPU.match(plane.name)
        if gpu:
            events += (e for line in plane.lines if _STREAM.match(line.name) for e in _kernels(int(gpu[1]), line))
        elif plane.name == _HOST:
            events += _cpu_operations(plane)
    return sorted(events, key=lambda event: (event.start, event.end))


def _kernels(device: int, line) -> Iterator[Event]:
    for event in line.events:
        stats = dict(event.stats)
        where = str(stats.get("hlo_op", "")), str(stats.get("hlo_module", "")), int(stats.get("program_id", -1))
        yield Event(device, event.name, *where, round(event.start_ns), round(event.end_ns), kernel=True)


def _cpu_operations(plane) -> Iterator[Event]:
    """XLA:CPU hands larger operations to a pool of threads: the event ends when that is done, and another one, "end: "
    with the number of the first, tells when they are ready (xla/backends/cpu/runtime/thunk_executor.cc)."""
    begun, ends = {}, {}
    for line in plane.lines:
        for event in line.events:
            if event.name.startswith(_END):
                ends[dict(event.stats).get("_c")] = round(event.end_ns)
                continue
            stats = dict(event.stats)
            if "hlo_op" in stats and "device_ordinal" in stats:
                number = stats.get("_p", ("unnumbered", len(begun)))
                begun[number] = (event.name, stats, round(event.start_ns), round(event.end_ns))
    for number, (name, stats, start, end) in begun.items():
        program = int(stats.get("program_id", -1))
        where = str(stats["hlo_op"]), str(stats.get("hlo_module", "")), program
        yield Event(int(stats["device_ordinal"]), name, *where, start, max(end, ends.get(number, end)), kernel=False)
