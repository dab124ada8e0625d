"""Which axes of the mesh a collective crosses: reads replica groups in each way that XLA writes them."""

import math
import re
from collections.abc import Mapping

import numpy as np

from shardlm.errors import ShardlmError
from shardlm.hlo.text import Instruction

_LIST = re.compile(r"\breplica_groups=\{((?:\{[\d,]*\},?\s*)*)\}")
_IOTA = re.compile(r"\breplica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"\breplica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}")
_PAIRS = re.compile(r"\bsource_target_pairs=\{((?:\{\d+,\d+\},?\s*)*)\}")


def spanned_axes(instruction: Instruction, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The axes, in the mesh's order, along which devices of one group differ; empty for groups of one device.

    mesh is axis -> size, outermost first: device i of the program lies at place i of the mesh in row-major order.
    Raises ShardlmError for groups that cannot be read or that name devices outside the mesh.
    """
    groups = device_groups(instruction, math.prod(mesh.values()))
    if groups.size and groups.max() >= math.prod(mesh.values()):
        raise ShardlmError(f"{instruction.name} names device {groups.max()}; the mesh {dict(mesh)} has fewer")
    places = np.unravel_index(groups, tuple(mesh.values()))
    return tuple(
        axis for axis, place in zip(mesh, places, strict=True) if groups.size and (place != place[:, :1]).any()
    )


def device_groups(instruction: Instruction, devices: int) -> np.ndarray:
    """int [groups, devices of one]; of a permutation the pairs (from, to). All devices where the list is empty."""
    text = instruction.attributes
    if pairs := _PAIRS.search(text):
        return np.array([int(n) for n in re.findall(r"\d+", pairs[1])]).reshape(-1, 2)
    if iota := _IOTA.search(text):
        return _iota(iota[2], iota[3]).reshape(_ints(iota[1]))
    if mesh := _MESH.search(text):
        return _of_mesh(mesh[1], mesh[2], mesh[3])
    if listed := _LIST.search(text):
        groups = [_ints(group) for group in re.findall(r"\{([\d,]*)\}", listed[1])]
        return np.array(groups or [list(range(devices))])
    raise ShardlmError(f"cannot read the replica groups of {instruction.name}: {text[:200]}")


def _of_mesh(axes: str, devices: str | None, grouped: str) -> np.ndarray:
    """mesh['a'=2,'b'=4] {'b'} groups along b; 'b':(2)2 is the part of b of size 2 after a part of size 2."""
    sizes = {name: int(size) for name, size in re.findall(r"'?([\w.\-]+)'?=(\d+)", axes)}
    order = range(math.prod(sizes.values()))
    if devices:
        iota = re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", devices)
        order = _iota(iota[1], iota[2]).ravel() if iota else _ints(devices)
    parts = [(name, int(pre or 1), int(size or 0)) for name, pre, size in _PART.findall(grouped)]
    shape, chosen = [], []
    for name, size in sizes.items():
        mine = sorted((pre, part or size) for other, pre, part in parts if other == name)
        done = 1
        for pre, part in mine:
            shape += [pre // done, part]
            chosen.append(len(shape) - 1)
            done = pre * part
        shape.append(size // done)
    rest = [i for i in range(len(shape)) if i not in chosen]
    width = math.prod(shape[i] for i in chosen)
    return np.array(order).reshape(shape).transpose(rest + chosen).reshape(-1, width)


_PART = re.compile(r"'?([\w.\-]+)'?(?::\((\d+)\)(\d+))?")


def _iota(dims: str, transposed: str | None) -> np.ndarray:
    ids = np.arange(math.prod(_ints(dims))).reshape(_ints(dims))
    return ids.transpose(_ints(transposed)) if transposed else ids


def _ints(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n.strip()]
