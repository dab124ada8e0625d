"""What the projections and experts of a model are held in, as one choice for all of them or as a checkpoint has each:
`groups_of` says it of one."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Literal

from shardlm.ops.grouped_weights import OWN, GroupedFormat, Groups

PUBLISHED = "checkpoint"  # asks for weights as the checkpoint's file has them
DYNAMIC: dict[str, GroupedFormat] = {"int8_dynamic": "int8", "fp8_dynamic": "fp8"}
"""Projections multiply numbers of 8 bits (ops/dynamic_matmul.py), and experts and what is multiplied by each head are
held in groups of such."""
QUANTIZATIONS = (*OWN, *DYNAMIC)


@dataclasses.dataclass(frozen=True)
class AsPublished:
    """As a checkpoint in few bits has them, number for number.

    kinds  by `weight_key` of each its groups; all others are in the compute dtype
    left   of these others, those that the checkpoint has in few bits
    but    by key the layers in which a weight is in the compute dtype all the same: where there are any, layers have to
           be apart (models/transformer.py)
    """

    kinds: tuple[tuple[str, Groups], ...]
    left: tuple[str, ...] = ()
    but: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @property
    def by_key(self) -> Mapping[str, Groups]:
        return dict(self.kinds)

    @property
    def text(self) -> str:
        return f"{', '.join(sorted({groups.numbers for _, groups in self.kinds}))} as published"

    def __str__(self) -> str:
        return PUBLISHED

    def behind(self, layers: int) -> "AsPublished":
        """Of a model that begins behind so many layers."""
        but = tuple((own, tuple(layer - layers for layer in some)) for own, some in self.but)
        return dataclasses.replace(self, but=but)


WeightFormat = Literal["dtype", "int8", "int4", "fp8", "int8_dynamic", "fp8_dynamic"] | AsPublished


def grouped(how: str) -> GroupedFormat:
    """What is held in groups is held in, of a format by its name."""
    return DYNAMIC.get(how, how)


def groups_of(how: WeightFormat, key: str, layers: Iterable[int] = ()) -> Groups | None:
    """How the projection or expert with this `weight_key` is held in these layers, None: in the compute dtype."""
    if not isinstance(how, AsPublished):
        return OWN.get(grouped(how))
    return how.by_key.get(key) if set(layers).isdisjoint(dict(how.but).get(key, ())) else None


def layers_differ(how: WeightFormat) -> bool:
    """Whether a weight is held otherwise in some layers than in others."""
    return isinstance(how, AsPublished) and bool(how.but)


def weight_key(name: str, first: str, place: str = "") -> str:
    """What a weight is known by beside its kind: its own name, `first` of its dimensions, and where its module is that
    the model has more than one of: "mtp.", "shared." and "indexer."."""
    return f"{place}experts.{name}" if first == "experts" else f"{place}{name}"
