"""What muon adds to a step (shardlm/muon.py): the products of Newton-Schulz steps, and the exchanges that bring each
matrix to one device and back."""

import math
from collections.abc import Iterator

from shardlm.muon import STEPS, moving, sharing
from shardlm.optim import is_muons, muon_rows
from shardlm.plan.sketch import Sketch, Weight
from shardlm.plan.state import MASTER
from shardlm.plan.traffic import Sent, share


def of_muon(weight: Weight) -> bool:
    """Whether it is orthogonalised: a matrix of a layer. The rest is adamw's."""
    return weight.trained and is_muons(weight.names[int(weight.stacked) :])


def newton_schulz(sketch: Sketch) -> Iterator[tuple]:
    """(weight, how often a device multiplies, and (rows, columns, summed) of its three products)"""
    for weight in _orthogonalised(sketch):
        first, rows = _dimensions(weight)
        sizes = math.prod(weight.shape[first : first + rows]), math.prod(weight.shape[first + rows :])
        small, large = min(sizes), max(sizes)
        yield weight, STEPS * _held(weight, sketch)[1], (small, small, large), (small,) * 3, (small, large, small)


def _orthogonalised(sketch: Sketch) -> list[Weight]:
    return [weight for weight in sketch.weights if of_muon(weight)] if sketch.config.optim.name == "muon" else []


def muon_traffic(sketch: Sketch) -> Iterator[Sent]:
    """An exchange before and one after for each axis that splits matrices."""
    for weight in _orthogonalised(sketch):
        axes, many = _held(weight, sketch)
        held = MASTER * many * math.prod(weight.shape[_dimensions(weight)[0] :])  # empty ones too
        for axis in axes:
            moved = 2 * held * share(sketch.mesh.size(axis))
            yield Sent((axis,), f"{weight.path}: to be orthogonalised and back", moved, "all-to-all", 2, update=True)


def _held(weight: Weight, sketch: Sketch) -> tuple[list[str], int]:
    """(axes that move, matrices of a device then)"""
    table, mesh, (first, _) = sketch.rules.optimizer, sketch.mesh, _dimensions(weight)
    own = [n // mesh.size(*table.axes(name)) for n, name in zip(weight.shape[:first], weight.names, strict=False)]
    axes = moving([table.axes(name) for name in weight.names[first:]])
    for axis, dim in sharing(own, axes, mesh.sizes()):
        own[dim] = -(-own[dim] // mesh.size(axis))
    return axes, math.prod(own)


def _dimensions(weight: Weight) -> tuple[int, int]:
    """The first of its matrices' dimensions, and how many of them are rows."""
    names = weight.names[weight.stacked :]
    own = names[0] == "experts"
    return weight.stacked + own, muon_rows(names[own:])
