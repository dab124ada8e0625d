"""The whole of a measurement: which collectives over which axes of a mesh, what they show against the links, and all of
it as one profile or one JSON."""

import dataclasses
import datetime
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import psutil
from jax.sharding import Mesh

from shardlm import hardware
from shardlm.config_tree import suggest
from shardlm.errors import ShardlmError
from shardlm.network import machine
from shardlm.network.collectives import DTYPE, KINDS, bus_bytes, measure
from shardlm.network.fit import fit
from shardlm.network.layout import Layout
from shardlm.network.links import Links
from shardlm.network.peaks import peak
from shardlm.network.profile import FORMAT, CollectiveRate, Profile
from shardlm.network.report import Row


def chosen_kinds(words: Sequence[str]) -> tuple[str, ...]:
    """Raises: ShardlmError for what is no collective."""
    for word in words:
        if word not in KINDS:
            raise ShardlmError(
                f"--collectives: there is no {word!r}{suggest(word, KINDS)} (there are: {', '.join(KINDS)})"
            )
    return tuple(words) or KINDS


def survey(
    mesh: Mesh,
    layout: Layout,
    links: Links | None,
    *,
    over: Sequence[tuple[str, ...]],
    kinds: Sequence[str],
    sizes: Sequence[int],
) -> Iterator[Row]:
    """Each point as it is measured, beside what its links allow."""
    gpu = hardware.lookup(layout.places[0].kind)
    told = {"nvlink": links.nvlink_bytes_per_second, "domain": links.nvlink_domain} if links else {}
    for axes in over:
        for point in measure(mesh, axes, kinds, sizes):
            limit = peak(point.kind, layout.span(axes), gpu, **told)
            yield Row(
                **dataclasses.asdict(point),
                algorithm_bandwidth=point.algorithm_bandwidth,
                bus_bandwidth=point.bus_bandwidth,
                link=limit.link if limit else None,
                link_bandwidth=limit.bytes_per_second if limit else None,
            )


def rates(rows: Sequence[Row], layout: Layout) -> tuple[tuple[CollectiveRate, ...], tuple[str, ...]]:
    """The line through the points of each kind and axes, and a sentence for each that has none."""
    found, missing = [], []
    for kind, axes in dict.fromkeys((row.kind, row.axes) for row in rows):
        points = [row for row in rows if (row.kind, row.axes) == (kind, axes)]
        span = layout.span(axes)
        sent = [bus_bytes(kind, row.bytes, span.devices) for row in points]
        try:
            line = fit(sent, [row.seconds for row in points])
        except ShardlmError as error:
            missing.append(f"{kind} over {'+'.join(axes)}: {error}")
            continue
        found.append(
            CollectiveRate(
                kind=kind,
                axes=axes,
                group_size=span.devices,
                hosts=span.hosts,
                domains=span.domains,
                dtype=DTYPE.dtype.name,
                **{field.name: getattr(line, field.name) for field in dataclasses.fields(line)},
                points=tuple((row.bytes, row.seconds) for row in points),
            )
        )
    return tuple(found), tuple(missing)


def machine_profile(
    mesh: Mesh,
    layout: Layout,
    links: Links | None,
    collectives: Sequence[CollectiveRate],
    say: Callable[[object], Any] = lambda rate: None,
    shapes: Sequence[tuple[int, int, int]] | None = None,
    nbytes: int | None = None,
) -> Profile:
    """The profile of the machine: measures this process's first device, or its CPU devices at once, telling `say` each
    rate as it comes, and adds what was measured between devices. `shapes` of products and `nbytes` of arrays: by
    default such as show what the device can."""
    mine = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    device, together = mine[0], mine if mine[0].platform == "cpu" else mine[:1]
    measured: dict[str, list] = {"matmuls": [], "memory": [], "host": []}
    products, memory = machine.measure_matmuls(together, shapes), machine.measure_memory(together, nbytes)
    measuring = (products, memory, machine.measure_host(device, nbytes))
    for group, rates_of in zip(measured, measuring, strict=True):
        for rate in rates_of:
            measured[group].append(rate)
            say(rate)
    return Profile(
        format=FORMAT,
        device_kind=device.device_kind,
        devices=mesh.size,
        hosts=len(layout.hosts),
        nvlink_domain=nvlink_domain(layout, links),
        nvlink_bytes_per_second=links.nvlink_bytes_per_second if links else None,
        memory_bytes=layout.places[0].memory_bytes or _share_of_host(mine),
        jax=jax.__version__,
        date=datetime.date.today().isoformat(),
        mesh=tuple((axis, layout.sizes[axis]) for axis in layout.axes),
        **{group: tuple(found) for group, found in measured.items()},
        collectives=tuple(collectives),
    )


def _share_of_host(devices: Sequence[jax.Device]) -> int | None:
    """What CPU devices have of their host's memory, each; None of others."""
    return psutil.virtual_memory().total // len(devices) if devices[0].platform == "cpu" else None


def nvlink_domain(layout: Layout, links: Links | None) -> int:
    """Devices that reach each other over NVLink: those that the runtime puts into one domain on several hosts, else
    what the driver tells of this host, else what the table of GPUs says of so many as there are on a host."""
    sharing = [place for place in layout.places if place.domain == layout.places[0].domain]
    if len({place.host for place in sharing}) > 1:
        return len(sharing)
    if links:
        return links.nvlink_domain
    gpu = hardware.lookup(layout.places[0].kind)
    return min(len(sharing), gpu.nvlink_domain) if gpu else 1


def as_json(layout: Layout, rows: Sequence[Row], collectives: Sequence[CollectiveRate]) -> dict[str, Any]:
    """The setting, every point and every line."""
    return {
        "device_kind": layout.places[0].kind,
        "devices": len(layout.places),
        "hosts": list(layout.hosts),
        "mesh": {axis: layout.sizes[axis] for axis in layout.axes},
        "jax": jax.__version__,
        "date": datetime.date.today().isoformat(),
        "measurements": [dataclasses.asdict(row) for row in rows],
        "rates": [{k: v for k, v in dataclasses.asdict(rate).items() if k != "points"} for rate in collectives],
    }
