"""A small configuration tree with every kind of field that shipped ones use."""

import dataclasses
import sys
import types
from typing import Any, Literal

from shardlm.errors import ShardlmError

# Classes saved by name must belong to the package: `_pretend` makes those here do.
EXAMPLE = "shardlm.example_of_test_config"


class Model:
    """A base that is no dataclass, as a field may declare."""


@dataclasses.dataclass(frozen=True)
class Dense(Model):
    width: int = 64
    heads: int = 4

    def __post_init__(self):
        if self.width % self.heads:
            raise ValueError(f"width={self.width} does not divide over heads={self.heads}")


@dataclasses.dataclass(frozen=True)
class Mixture(Model):
    width: int = 64
    experts: int = 8


@dataclasses.dataclass(frozen=True)
class Segment:
    kind: str = "full"
    repeats: int = 1


@dataclasses.dataclass(frozen=True)
class Mesh:
    fsdp: int = 1
    tensor: int = 1

    def __post_init__(self):
        if self.tensor < 1:
            raise ShardlmError(f"mesh.tensor={self.tensor}: an axis size is positive")


@dataclasses.dataclass(frozen=True)
class Train:
    steps: int = 100
    rate: float = 3e-4
    name: str = "run"
    packed: bool = True
    optimizer: Literal["adamw", "lion"] = "adamw"
    window: int | None = None
    files: tuple[str, ...] = ()
    betas: tuple[float, float] = (0.9, 0.95)
    size: int | Literal["auto"] = "auto"
    note: str | None = None


@dataclasses.dataclass(frozen=True)
class Example:
    model: Model
    train: Train = Train()
    mesh: Mesh = dataclasses.field(default_factory=lambda: Mesh(fsdp=2))
    segments: tuple[Segment, ...] = (Segment(),)
    evaluation: Mesh | None = None
    seed: Any = 0


CLASSES = (Dense, Mixture, Segment, Mesh, Train, Example)


def _pretend() -> None:
    module = types.ModuleType(EXAMPLE)
    for cls in CLASSES:
        cls.__module__ = EXAMPLE
        setattr(module, cls.__name__, cls)
    # Annotations above are objects, not strings, so moving the classes does not change what they mean.
    sys.modules[EXAMPLE] = module


_pretend()
