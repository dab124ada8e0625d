"""Which mesh axis each named dimension is split over. Every parallelism is a table here; models only name their
dimensions, and XLA inserts the collectives that the tables imply.

A weight has four places: where it rests between steps, how it is used in a layer, and where its gradient and its
optimizer state rest. ZeRO stages 1 to 3 (https://arxiv.org/abs/1910.02054) differ only in these places.
"""

import dataclasses
import difflib
import functools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, get_args

import jax
from jax.sharding import PartitionSpec

from shardlm.errors import ShardlmError
from shardlm.mesh import MeshSpec

Preset = Literal["replicated", "zero1", "zero2", "zero3", "hybrid"]
"""How weights, gradients and optimizer state are spread over the batch axes:

replicated  plain data parallel: everything on every device
zero1       optimizer state split over data and fsdp
zero2       ... and gradients
zero3       ... and weights, gathered layer by layer (FSDP)
hybrid      weights, gradients and optimizer state split over fsdp, replicated over data (HSDP)

Where they say fsdp, the axes expert and context count too, as each of their devices sees other tokens; an expert's own
weights are split over the expert axis by expert instead.

Each combines with tensor > 1, which splits heads, MLP width and vocabulary (Megatron,
https://arxiv.org/abs/1909.08053) and, between blocks, the sequence (https://arxiv.org/abs/2205.05198); and with
pipeline > 1, over which weights rest split by their embedding dimension, in any number of layers: once a step an
all-to-all brings each stage its layers. An embedding that does not divide over pipeline rests whole there (`fitting`).
"""

BATCH_AXES = ("data", "fsdp", "expert")  # over which the rows of a batch are split, whatever the preset

_SPLIT = dict.fromkeys(("heads", "kv_heads", "mlp", "expert_mlp", "vocab"), "tensor") | {"experts": "expert"}
_WHOLE = (
    "layers",
    "rounds",
    "head_dim",
    "norm",
    "kv_heads_whole",
    "index_heads",
    "latent_whole",
    "router",
    "rank",
    "groups",
)
_ACTIVATIONS = {
    "batch": ("data", "pipeline", "fsdp", "expert"),  # inside a pipeline stage, `inside` takes "pipeline" away
    "microbatches": "pipeline",  # outside the stages, each holds its share of them
    "seq": ("context", "tensor"),  # residual stream between blocks: sequence parallel
    "whole_seq": "context",  # inside attention and MLP
    "embed": (),
    "heads": "tensor",
    "kv_heads": "tensor",
    "kv_heads_whole": (),
    "head_dim": (),
    "mlp": "tensor",
    "vocab": "tensor",
    "experts": (),
    "latent": (),
    "pages": (),
    "slots": (),  # positions of a page (ops/split_pages.py)
}


Entries = tuple[tuple[str, tuple[str, ...]], ...]


@dataclasses.dataclass(frozen=True)
class Table:
    """Logical dimension name -> mesh axes, for one role. Axes of size 1 are left out of every spec."""

    role: str
    entries: Entries
    mesh: MeshSpec

    def axes(self, name: str) -> tuple[str, ...]:
        """Mesh axes larger than 1 that dimension `name` is split over. Raises ShardlmError for an unknown name."""
        known = self._used
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
            raise ShardlmError(f"unknown dimension {name!r} in the {self.role} rules; {hint}")
        return known[name]

    @functools.cached_property
    def _used(self) -> dict[str, tuple[str, ...]]:
        """Name -> mesh axes larger than 1: asked for at every parameter of every mesh that a planner looks at."""
        return _larger(self.entries, tuple([axis for axis, size in self.mesh.sizes().items() if size > 1]))

    def split(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Mesh axes larger than 1 that an array with dimensions of these names is split over."""
        found = self._split.get(names)
        if found is None:
            found = self._split[names] = tuple(axis for name in names for axis in self.axes(name))
        return found

    def ways(self, names: tuple[str, ...]) -> int:
        """How many parts it is in."""
        found = self._ways.get(names)
        if found is None:
            found = self._ways[names] = self.mesh.size(*self.split(names))
        return found

    @functools.cached_property
    def _split(self) -> dict[tuple[str, ...], tuple[str, ...]]:
        """What was asked before: a planner asks the same few of every parameter, for each way to run on a mesh."""
        return {}

    @functools.cached_property
    def _ways(self) -> dict[tuple[str, ...], int]:
        return {}

    def spec(self, *names: str | None, shape: tuple[int, ...] | None = None) -> PartitionSpec:
        """PartitionSpec of an array whose dimensions have these names (None: never split).

        Raises ShardlmError for an unknown name, for a mesh axis that would be used twice, and, when `shape` is
        given, for a size that does not divide.
        """
        used: dict[str, str] = {}
        parts = []
        for position, name in enumerate(names):
            axes = self.axes(name) if name else ()
            for axis in axes:
                if axis in used:
                    raise ShardlmError(
                        f"{self.role} rules split both {used[axis]!r} and {name!r} of {names} over mesh axis {axis!r}; "
                        "an array can use a mesh axis once"
                    )
                used[axis] = name
            if shape is not None and axes:
                self.check(name, shape[position], axes)
            parts.append(axes[0] if len(axes) == 1 else axes or None)
        return PartitionSpec(*parts)

    def check(self, name: str, size: int, axes: tuple[str, ...] | None = None) -> None:
        """Raises ShardlmError, with the choices that work, unless `size` divides over the axes of `name`."""
        axes = self.axes(name) if axes is None else axes
        if size % self.mesh.size(*axes) == 0:
            return
        what = " x ".join(f"{axis}={self.mesh.size(axis)}" for axis in axes)
        small = [d for d in range(1, math.isqrt(size) + 1) if size % d == 0]
        divisors = ", ".join(map(str, sorted({*small, *(size // d for d in small)})))
        choose = f"{axes[0]} from {divisors}" if len(axes) == 1 else f"{' x '.join(axes)} with product in {divisors}"
        raise ShardlmError(f"{name}={size} cannot be split over {what}; choose {choose}")


@functools.lru_cache(maxsize=4096)
def _larger(entries: Entries, there: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """The same of all meshes whose axes larger than 1 are `there`."""
    return {name: tuple([axis for axis in axes if axis in there]) for name, axes in entries}


TABLES = ("rest", "use", "grads", "optimizer", "act")


@dataclasses.dataclass(frozen=True)
class Rules:
    """The tables of one run: where weights, gradients, optimizer state and activations are split."""

    preset: str
    mesh: MeshSpec
    rest: Table
    use: Table
    grads: Table
    optimizer: Table
    act: Table

    @classmethod
    @functools.lru_cache(maxsize=1024)
    def make(cls, preset: Preset, mesh: MeshSpec) -> "Rules":
        """The tables of a preset on a mesh whose sizes are all known. Raises ShardlmError for an unknown preset."""
        if preset not in get_args(Preset):
            raise ShardlmError(f"unknown rules {preset!r}; choose from {', '.join(get_args(Preset))}")
        return cls(preset, mesh, **{role: Table(words, entries, mesh) for role, words, entries in _tables(preset)})

    def for_decoding(self) -> "Rules":
        """The same weights, with every device holding all rows and the whole sequence: for a few rows of tokens."""
        return dataclasses.replace(self, act=_without(self.act, "batch", "microbatches", "seq", "whole_seq"))

    def fitting(self, sizes: Mapping[str, Iterable[int]]) -> "Rules":
        """The rules for weights whose dimensions have these sizes, by name: what does not divide over pipeline and the
        axes beside it rests whole over pipeline, if it divides over those. No preset promises that split: it saves
        memory, and without it a stage takes its layers from its own copy of all. A split that the preset promises
        (over fsdp, say) is never left out: the weights of a model that needs it would not fit."""

        def misfits(name: str, of: Iterable[int]) -> bool:
            axes = self.optimizer.axes(name)
            ways, beside = (self.mesh.size(*found) for found in (axes, set(axes) - {"pipeline"}))
            return any(n % ways for n in of) and not any(n % beside for n in of)

        names = [name for name, of in sizes.items() if misfits(name, tuple(of))]
        if not names:
            return self
        roles = ("rest", "grads", "optimizer")
        return dataclasses.replace(self, **{role: _outside(getattr(self, role), "pipeline", names) for role in roles})

    def for_serving(self, spread: Collection[str] = ()) -> "Rules":
        """For decoding from weights that rest where they are used, as far as the expert axis goes: a step then gathers
        none of them over it. The dimensions in `spread`, of weights beside the routed experts, are split over that axis
        and tensor together; the others are whole on each of its devices."""
        wide = dict.fromkeys(spread, ("expert", "tensor"))

        def resting(table: Table) -> Table:
            own = {
                name: axes if name == "experts" else tuple(a for a in axes if a != "expert")
                for name, axes in table.entries
            }
            return dataclasses.replace(table, entries=tuple((own | wide).items()))

        tables = {role: resting(getattr(self, role)) for role in ("rest", "use", "act")}
        return dataclasses.replace(self, **tables).for_decoding()

    def with_split_pages(self, axes: tuple[str, ...]) -> "Rules":
        """For decoding from pages whose positions are split over these axes."""
        entries = tuple((dict(self.act.entries) | {"slots": axes}).items())
        return dataclasses.replace(self, act=dataclasses.replace(self.act, entries=entries))

    def replicas(self) -> tuple[str, ...]:
        """Of data and fsdp, the axes whose devices hold the same weights: gradients need to cross them once a step."""
        return tuple(
            axis for axis in ("data", "fsdp") if axis not in self.rest.axes("embed") and self.mesh.size(axis) > 1
        )

    def inside(self, *axes: str) -> "Rules":
        """The rules of one pipeline stage, or of one replica: as seen inside a shard_map that is manual over `axes`."""
        one = dataclasses.replace(self.mesh, **dict.fromkeys(axes, 1))
        tables = {role: dataclasses.replace(getattr(self, role), mesh=one) for role in TABLES}
        return dataclasses.replace(self, mesh=one, **tables)

    def gather(self, w: jax.Array, *names: str | None) -> jax.Array:
        """A resting weight as a layer uses it. Over fsdp this is the all-gather, and the backward pass's
        reduce-scatter; where rest and use agree it is free."""
        return jax.reshard(w, self.use.spec(*names))

    def bytes_per_device(self, shape: tuple[int, ...], itemsize: int, *names: str | None) -> int:
        """Resting bytes of one array on one device."""
        shards = math.prod(self.mesh.size(*self.rest.axes(name)) for name in names if name)
        return math.prod(shape) * itemsize // shards


@functools.cache
def _tables(preset: Preset) -> tuple[tuple[str, str, Entries], ...]:
    """(field of Rules, role in words, entries) of a preset's tables, which all meshes have."""
    split = ("fsdp", "expert", "context") if preset == "hybrid" else ("data", "fsdp", "expert", "context")
    stage = {"replicated": 0, "zero1": 1, "zero2": 2, "zero3": 3, "hybrid": 3}[preset]

    def weights(sharded: bool) -> Entries:
        embed = ("pipeline", *(split if sharded else ()))
        of_expert = tuple(axis for axis in embed if axis != "expert")
        # A latent is narrow: it is split as the embedding is, less the axes that are split further already.
        latent = tuple(axis for axis in of_expert if axis != "context")
        names = {"embed": embed, "expert_embed": of_expert, "latent": latent}
        return _entries(dict.fromkeys(_WHOLE, ()) | _SPLIT | names)

    return (
        ("rest", "resting weight", weights(stage >= 3)),
        ("use", "weight in use", _whole(weights(False), "embed", "expert_embed", "latent")),
        ("grads", "gradient", weights(stage >= 2)),
        ("optimizer", "optimizer", weights(stage >= 1)),
        ("act", "activation", _entries(_ACTIVATIONS)),
    )


def _without(table: Table, *names: str) -> Table:
    """The table with these dimensions whole."""
    return dataclasses.replace(table, entries=_whole(table.entries, *names))


@functools.cache
def _whole(entries: Entries, *names: str) -> Entries:
    return tuple((name, () if name in names else axes) for name, axes in entries)


def _outside(table: Table, axis: str, names: Sequence[str]) -> Table:
    """The table with these dimensions not split over a mesh axis."""
    return dataclasses.replace(table, entries=_less(table.entries, axis, tuple(names)))


@functools.cache
def _less(entries: Entries, axis: str, names: tuple[str, ...]) -> Entries:
    return tuple((n, tuple(a for a in axes if n not in names or a != axis)) for n, axes in entries)


def _entries(axes: Mapping[str, str | tuple[str, ...]]) -> Entries:
    return tuple((n, (a,) if isinstance(a, str) else a) for n, a in axes.items())
