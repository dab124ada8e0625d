"""A mesh laid over hosts: which device stands where, and which groups of an axis cross hosts and NVLink domains. The
picture of it is text. Imports no jax but where it asks devices."""

import dataclasses
import itertools
import math
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardlm import hardware
from shardlm.config_tree import suggest
from shardlm.errors import ShardlmError
from shardlm.files import format_bytes

HOSTS_SHOWN = 16


@dataclasses.dataclass(frozen=True)
class Place:
    """A device and where it is.

    host          number of its host
    domain        number of its NVLink domain: devices of different ones talk over the network
    memory_bytes  None where neither the device nor the table of GPUs says
    coordinates   where the runtime has such
    """

    id: int
    kind: str
    host: int
    domain: int
    memory_bytes: int | None = None
    coordinates: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Span:
    """What the groups of one or more axes span, the worst of them: a group's devices, hosts and domains, and how many
    of its devices are in the host or domain that has the fewest."""

    devices: int
    hosts: int
    domains: int
    in_host: int
    in_domain: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """sizes is axis -> size, outermost first; places has the devices in that order; hosts are named by number."""

    sizes: Mapping[str, int]
    places: tuple[Place, ...]
    hosts: tuple[str, ...]

    @property
    def axes(self) -> tuple[str, ...]:
        """Those larger than 1."""
        return tuple(axis for axis, size in self.sizes.items() if size > 1)

    def groups(self, axes: Sequence[str]) -> list[list[Place]]:
        """The sets of devices that a collective over `axes` joins."""
        order, shape = list(self.sizes), tuple(self.sizes.values())
        grid = np.arange(len(self.places)).reshape(shape)
        inside = [order.index(axis) for axis in order if axis in axes]
        outside = [i for i in range(len(order)) if i not in inside]
        rows = grid.transpose(outside + inside).reshape(-1, math.prod(shape[i] for i in inside))
        return [[self.places[i] for i in row] for row in rows]

    def span(self, axes: Sequence[str]) -> Span:
        groups = self.groups(axes)
        hosts = [_counts(place.host for place in group) for group in groups]
        domains = [_counts(place.domain for place in group) for group in groups]
        return Span(
            devices=len(groups[0]),
            hosts=max(map(len, hosts)),
            domains=max(map(len, domains)),
            in_host=min(map(min, hosts)),
            in_domain=min(map(min, domains)),
        )


def _counts(numbers: Any) -> list[int]:
    return [len(list(same)) for _, same in itertools.groupby(sorted(numbers))]


def layout_of(mesh: Any) -> Layout:
    """The layout of a jax Mesh. Processes on one host count as one host, so all of them must call this together."""
    devices = list(mesh.devices.flat)
    names = _host_names()
    hosts = list(dict.fromkeys(names[device.process_index] for device in devices))
    places = [_place(device, hosts.index(names[device.process_index])) for device in devices]
    return Layout(dict(mesh.shape), tuple(places), tuple(hosts))


def _host_names() -> list[str]:
    """Of each process, by its index."""
    import jax
    from jax.experimental import multihost_utils

    name = socket.gethostname().encode()[:64]
    if jax.process_count() == 1:
        return [name.decode()]
    padded = np.frombuffer(name.ljust(64, b"\0"), np.uint8)
    rows = multihost_utils.process_allgather(padded).reshape(jax.process_count(), 64)
    return [bytes(row).rstrip(b"\0").decode() for row in rows]


def _place(device: Any, host: int) -> Place:
    gpu = hardware.lookup(device.device_kind)
    local = device.process_index == device.client.process_index()
    stats = device.memory_stats() if local else None  # no process may ask another's devices
    memory = (stats or {}).get("bytes_limit") or (gpu and gpu.hbm_bytes)
    domain = getattr(device, "slice_index", None)
    coordinates = getattr(device, "coords", None)
    return Place(
        id=device.id,
        kind=device.device_kind,
        host=host,
        domain=host if domain is None else domain,
        memory_bytes=memory,
        coordinates=coordinates and tuple(coordinates),
    )


def chosen_axes(words: Sequence[str], layout: Layout) -> list[tuple[str, ...]]:
    """What --axes names, as "fsdp" or "fsdp+tensor"; of no words each axis larger than 1.

    Raises: ShardlmError for an axis that there is not, that has one device, or that is named twice in a word.
    """
    if not words:
        return [(axis,) for axis in layout.axes]
    found = []
    for word in words:
        axes = tuple(part.strip() for part in word.split("+"))
        for axis in axes:
            if axis not in layout.sizes:
                known = ", ".join(layout.sizes)
                raise ShardlmError(
                    f"--axes={word}: there is no axis {axis!r}{suggest(axis, layout.sizes)} (axes: {known})"
                )
            if layout.sizes[axis] == 1:
                larger = ", ".join(layout.axes) or "none is; give --mesh"
                raise ShardlmError(
                    f"--axes={word}: {axis} has one device, so nothing is sent (larger than 1: {larger})"
                )
        if len(set(axes)) < len(axes):
            raise ShardlmError(f"--axes={word} names an axis twice")
        found.append(tuple(axis for axis in layout.sizes if axis in axes))
    return found


def format_devices(layout: Layout) -> str:
    """A line for each host: its devices by kind, with memory, coordinates and domain where they are known."""
    lines = []
    for number, name in enumerate(layout.hosts[:HOSTS_SHOWN]):
        here = [place for place in layout.places if place.host == number]
        kinds = ", ".join(f"{n} x {_describe(like)}" for like, n in _alike(here))
        ids = [place.id for place in here]
        lines.append(f"host {number} ({name}): {kinds}, ids {_ranges(ids)}")
    return "\n".join([*lines, *_rest(len(layout.hosts))])


def _alike(places: Sequence[Place]) -> list[tuple[Place, int]]:
    counts: dict[tuple, list[Place]] = {}
    for place in places:
        counts.setdefault((place.kind, place.memory_bytes, place.domain, place.coordinates), []).append(place)
    return [(same[0], len(same)) for same in counts.values()]


def _describe(place: Place) -> str:
    memory = f" of {format_bytes(place.memory_bytes)}" if place.memory_bytes else ""
    at = f" at {place.coordinates}" if place.coordinates else ""
    return (
        f"{place.kind}{memory}{at}, NVLink domain {place.domain}"
        if "NVIDIA" in place.kind
        else place.kind + memory + at
    )


def _ranges(ids: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5"."""
    runs: list[list[int]] = []
    for i in sorted(ids):
        if runs and i == runs[-1][-1] + 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def format_mesh(layout: Layout) -> str:
    """The mesh as rows of hosts, each device with its place along the axes larger than 1, and what axes cross."""
    axes = layout.axes
    if not axes:
        return "mesh: one device"
    lines = ["mesh " + " x ".join(f"{axis}={layout.sizes[axis]}" for axis in axes)]
    lines.append(f"a device is shown as ID:{'.'.join(axes)}")
    places = np.stack(np.unravel_index(np.arange(len(layout.places)), tuple(layout.sizes.values())), axis=1)
    kept = [i for i, axis in enumerate(layout.sizes) if axis in axes]
    cells = [f"{p.id}:{'.'.join(map(str, at[kept]))}" for p, at in zip(layout.places, places, strict=True)]
    width = max(map(len, cells))
    for number in range(min(len(layout.hosts), HOSTS_SHOWN)):
        here = [cell.ljust(width) for cell, place in zip(cells, layout.places, strict=True) if place.host == number]
        lines.append(f"  host {number} | {'  '.join(here).rstrip()}")
    lines += _rest(len(layout.hosts))
    return "\n".join([*lines, *(f"  {axis}: {_crossing(layout.span([axis]))}" for axis in axes)])


def _crossing(span: Span) -> str:
    if span.hosts == 1:
        return f"groups of {span.devices}, each within a host"
    where = "one NVLink domain" if span.domains == 1 else f"{span.domains} NVLink domains, joined by the network"
    return f"groups of {span.devices} cross {span.hosts} hosts ({where})"


def _rest(hosts: int) -> list[str]:
    return [f"... and {hosts - HOSTS_SHOWN} more hosts"] if hosts > HOSTS_SHOWN else []
