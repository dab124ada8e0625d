"""The images of a batch, read by a checkpoint's encoder: one image on each device at a time, whose vectors go to the
tokens that stand for them. Who reads what is looks.py's, how an encoder is trained learned_encoder.py's."""

import dataclasses
import functools
import logging
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardlm.errors import ShardlmError
from shardlm.hf_files import Folder, holds_weights
from shardlm.layers.seen import BEFORE, SEEN, TURNS, UNTIL, VECTORS
from shardlm.mesh import shard_map
from shardlm.models.pretrained import Pretrained
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.cudnn_heads import traced_for
from shardlm.optim import ENCODER
from shardlm.progress_bar import bytes_bar
from shardlm.rules import Rules
from shardlm.train.config import RunConfig
from shardlm.train.learned_encoder import Compared, Learned, in_use, learn, no_sums, parts_of, sums_of
from shardlm.train.looks import Look, Readers
from shardlm.vision.encoder import Encoder
from shardlm.vision.parts import EncoderPart
from shardlm.vision.registry import TEXT_ALONE, sees, sight_of, takes
from shardlm.vision.sight import Sight

log = logging.getLogger(__name__)
_UNREAD = "images are not read, and data with some are refused: %s"


@dataclasses.dataclass(frozen=True, eq=False)  # compared by identity, so that jit can take it as static
class Seeing:
    """How a run sees.

    encoder  on the run's mesh, whole on each device
    rows     of every array of a batch, [B, T, ...]
    shape    (B, T) of the arrays on the devices
    width    numbers of a vector
    learned  what is trained of the encoder, None: nothing
    compares whether what is trained is compared with what it was (train/preference.py)
    """

    sight: Sight
    encoder: Encoder
    rows: NamedSharding
    shape: tuple[int, int]
    width: int
    learned: Learned | None = None
    compares: bool = False

    @classmethod
    def make(
        cls,
        sight: Sight,
        rows: NamedSharding,
        shape: tuple[int, int],
        width: int,
        dtype,
        part: EncoderPart = "frozen",
        rules: Rules | None = None,
        compares: bool = False,
    ) -> "Seeing":
        """Of a model whose stream has this width, computed with in `dtype`; `rules` say where the `part` of it rests
        that is trained, and `compares` whether that is compared with what it was. Raises ShardlmError where it has
        none."""
        encoder = Encoder.make(sight.encoder, dtype, rows.mesh, learns=part == "all")
        learned = Learned.make(encoder, part, rules, rows.mesh) if part != "frozen" else None
        return cls(sight, encoder, rows, shape, (1 + sight.deep) * width, learned, bool(learned) and compares)

    @property
    def mesh(self) -> Mesh:
        return self.rows.mesh

    @property
    def by_rows(self) -> tuple[str, ...]:
        """The axes that rows are split over, whose devices read the images of their own."""
        return _axes(self.rows.spec[0])

    @property
    def beside(self) -> tuple[str, ...]:
        """The others: devices that share rows share their images."""
        return tuple(axis for axis in self.mesh.axis_names if axis not in self.by_rows)

    @property
    def by_device(self) -> NamedSharding:
        """Of what every device has one of, [devices, ...], those that share rows side by side."""
        return NamedSharding(self.mesh, PartitionSpec((*self.by_rows, *self.beside)))

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """What a batch holds besides tokens."""
        arrays = {SEEN: ((), jnp.int32), VECTORS: ((self.width,), self.encoder.execution.dtype)}
        if self.compares:
            arrays[BEFORE] = arrays[VECTORS]
        if self.sight.axes:
            arrays[TURNS] = (3,), jnp.int32
        if self.sight.whole:
            arrays[UNTIL] = (), jnp.int32
        return {
            name: jax.ShapeDtypeStruct((*self.shape, *own), dtype, sharding=self.rows)
            for name, (own, dtype) in arrays.items()
        }

    def readers(self, slots: tuple[int, ...]) -> Readers:
        """Who reads what in this process."""
        sizes = dict(zip(self.mesh.axis_names, self.mesh.devices.shape, strict=True))
        groups, each = (int(np.prod([sizes[axis] for axis in axes])) for axes in (self.by_rows, self.beside))
        own = self.by_device.addressable_devices_indices_map((groups * each,)).values()
        here = frozenset(index[0].start or 0 for index in own)
        return Readers(self.sight, groups, each, slots, here)

    def load(self, folder: str) -> Any:
        """The weights of the encoder that no step changes, of a checkpoint's folder; Compared, where there is to be."""
        shapes = self.encoder.shapes
        still = self._load(folder, parts_of(self.learned, shapes)[1] if self.learned else shapes)
        return Compared(still, self._load(folder, shapes)) if self.compares else still

    def load_trained(self, folder: str) -> Any:
        """Those that are trained, as they begin: float32, where they rest."""
        return self._load(folder, self.learned.shapes)

    def _load(self, folder: str, shapes: Any) -> Any:
        if not shapes:
            return {}
        with bytes_bar("reading the encoder of images", jax.process_index() == 0) as progress:
            return self.encoder.load(Folder.open(pathlib.Path(folder)), progress, shapes)

    def eyes(self, params: Any, still: Any) -> Any:
        """The weights that read, of trained parameters (a state's) and of what `load` gives."""
        if not self.learned:
            return still
        if self.compares:
            return Compared(in_use(self.encoder, params[ENCODER], still.now), still.before)
        return in_use(self.encoder, params[ENCODER], still)

    def __call__(self, eyes: Any, looks: Sequence[Look]) -> dict[str, jax.Array]:
        """A batch's "seen", "vectors" and, where the tokens of an image see all of it, "until", under the run's
        mesh; and what was seen before, where there is a comparison."""
        now, before = eyes if isinstance(eyes, Compared) else (eyes, None)
        taken = [one for look in looks for one in look.taken]
        found = {VECTORS: self._vectors(now, looks), SEEN: self._by_row(taken, lambda one: 1, 0)}
        if self.compares:
            found[BEFORE] = self._vectors(before, looks)
        if self.sight.whole:
            found[UNTIL] = self._by_row(taken, lambda one: one.takes[-1], np.arange(self.shape[1]))
        return found

    def _vectors(self, params: Any, looks: Sequence[Look]) -> jax.Array:
        vectors = _nothing(self)
        for look in looks:
            vectors = _read(self, params, vectors, *self._arguments(look))
        return vectors

    def gradients(self, eyes: Any, looks: Sequence[Look], wanted: jax.Array) -> Any:
        """Sums of the gradients of what is trained of the encoder on each device (learned_encoder.sums_of), of the
        images that `__call__` read with the same weights, from those of the vectors."""
        now = eyes.now if self.compares else eyes
        sums, params = no_sums(self.learned, self.by_device), parts_of(self.learned, now)
        for look in looks:
            sums = learn(self, params, sums, *self._arguments(look), wanted)
        return sums

    def _arguments(self, look: Look) -> tuple:
        return self._inputs(look), self._on_devices(look.counts), self._taken(look)

    def lower(self, size: int) -> jax.stages.Lowered:
        """The program that reads an image of at most so many patches on each device, `vectors` donated."""
        with jax.set_mesh(self.mesh), traced_for(self.mesh.devices.flat[0]):
            return _read.lower(self, self.encoder.shapes, self.shapes()[VECTORS], *self._shown(size))

    def lower_gradients(self, size: int) -> jax.stages.Lowered:
        """The program on the way back from them, sums donated."""
        params, sums = parts_of(self.learned, self.encoder.shapes), sums_of(self.learned, self.by_device)
        with jax.set_mesh(self.mesh), traced_for(self.mesh.devices.flat[0]):
            return learn.lower(self, params, sums, *self._shown(size), self.shapes()[VECTORS])

    def _shown(self, size: int) -> tuple:
        """The shapes of `_arguments`."""
        devices = (self.mesh.size,)
        inputs = {
            name: jax.ShapeDtypeStruct((*devices, *a.shape), a.dtype, sharding=self.by_device)
            for name, a in self.encoder.inputs(size).items()
        }
        counts = jax.ShapeDtypeStruct(devices, jnp.int32, sharding=self.by_device)
        return inputs, counts, jax.ShapeDtypeStruct(self.shape, jnp.int32, sharding=self.rows)

    def _inputs(self, look: Look) -> dict[str, jax.Array]:
        found = {}
        for name, (own, dtype) in self.encoder.config.inputs.items():
            shape = (len(look.counts), look.size, *own)

            def of(index, name=name, shape=shape, dtype=dtype):
                device = index[0].start or 0
                if device in look.inputs:
                    return np.asarray(look.inputs[device][name], dtype)[None]
                return np.zeros((1, *shape[1:]), dtype)

            found[name] = jax.make_array_from_callback(shape, self.by_device, of)
        return found

    def _on_devices(self, counts: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(counts.shape, self.by_device, lambda index: counts[index])

    def _taken(self, look: Look) -> jax.Array:
        """int32 [B, T]: which of a group's vectors a token takes, -1: none."""
        return self._by_row(look.taken, lambda one: one.first + np.arange(len(one.takes)), -1)

    def _by_row(self, taken, value: Callable, rest: int | np.ndarray) -> jax.Array:
        """int32 [B, T]: of tokens that take a vector what `value` has of their image, of others `rest`."""

        def part(index):
            rows = range(*index[0].indices(self.shape[0]))
            found = np.broadcast_to(np.asarray(rest, np.int32), (len(rows), self.shape[1])).copy()
            for one in taken:
                if one.slot in rows:
                    found[one.slot - rows.start, one.takes] = value(one)
            return found[:, index[1]]

        return jax.make_array_from_callback(self.shape, self.rows, part)


@functools.partial(jax.jit, static_argnums=0)
def _nothing(seeing: Seeing) -> jax.Array:
    vectors = seeing.shapes()[VECTORS]
    return jnp.zeros(vectors.shape, vectors.dtype, out_sharding=vectors.sharding)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _read(seeing: Seeing, params, vectors: jax.Array, inputs: Mapping[str, jax.Array], counts, index) -> jax.Array:
    """vectors [B, T, W] with those of one image on each device: inputs [devices, P, ...], counts int32 [devices], index
    int32 [B, T] as `Seeing._taken` has it."""

    def local(params, vectors, inputs, counts, index):
        made = seeing.encoder(params, {name: a[0] for name, a in inputs.items()}, counts[0]).astype(vectors.dtype)
        if seeing.beside:
            made = jax.lax.all_gather(made, seeing.beside, axis=0, tiled=True)
        return jnp.where(index[..., None] >= 0, made[jnp.maximum(index, 0)], vectors)

    rows, each = seeing.rows.spec, seeing.by_device.spec
    specs = (PartitionSpec(), rows, each, each, rows)
    return shard_map(local, in_specs=specs, out_specs=rows)(params, vectors, inputs, counts, index)


def sight_of_run(config: RunConfig) -> Sight | None:
    """How the checkpoint that a run begins with sees; None where it doesn't, or is not there any more. None too, which
    is logged, where its encoder is not known here: the data may have no images. Raises ShardlmError for data.max_pixels
    that it does not take."""
    if not isinstance(config.model, Pretrained):
        return None
    folder, most, options = pathlib.Path(config.model.folder), config.data.max_pixels, config.model.options
    if not holds_weights(folder):
        if sees(options):
            log.warning(_UNREAD, f"{folder} has no weights now")
        return None
    if most and sees(options) and "max_pixels" not in takes(options):
        raise ShardlmError(
            f"data.max_pixels={most}: images of a {options['model_type']} are prepared as {folder}'s "
            "preprocessor_config.json says; set data.max_pixels to 0"
        )
    try:
        return sight_of(folder, options, prepared_as(config))
    except ShardlmError as error:
        why = str(error).removesuffix(f". {TEXT_ALONE}")
        if most:
            raise ShardlmError(f"data.max_pixels={most}: {why}") from error
        log.warning(_UNREAD, why)
        return None


def sight_of_chats(config: RunConfig) -> Sight | None:
    """The same for data of DataConfig, of which conversations alone have images: with texts nothing is asked of what a
    folder says of them."""
    return sight_of_run(config) if config.data.chat_template else None


def prepared_as(config: RunConfig) -> dict[str, int]:
    """How images are prepared otherwise than the checkpoint's preprocessor_config.json says, by its names."""
    return {"max_pixels": config.data.max_pixels} if config.data.max_pixels else {}


def check_images(config: RunConfig, model: TransformerConfig, sight: Sight, context: str) -> None:
    """Refuses what does not go with images in the data, before anything compiles. `context`: how rows that are split
    are attended to."""
    if sight.untrained:
        raise ShardlmError(f"the data have images, and {sight.untrained}; train on texts")
    if config.distill.teacher:
        raise ShardlmError(
            f"distill.teacher={config.distill.teacher} with images in the data: a teacher reads words alone; leave the "
            "images out, or the teacher"
        )
    if config.preference.beta and config.preference.loss == "orpo":
        raise ShardlmError(
            "preference.loss=orpo with images in the data: its loss of next tokens is over the prompt too, and tokens "
            "of images are not predicted; set preference.loss to sigmoid, ipo, hinge or simpo"
        )
    if sight.whole and config.mesh.context > 1 and context == "ring":
        raise ShardlmError(
            f"context_attention={config.context_attention}: the tokens of an image see those after them in this model, "
            "and a ring's devices see those before alone; set context_attention to ulysses, or mesh.context to 1"
        )
    if model.mtp and config.train.mtp_loss:
        raise ShardlmError(
            f"train.mtp_loss={config.train.mtp_loss} with images in the data: modules that predict further tokens read "
            "the words alone; set train.mtp_loss to 0 and model.mtp to False"
        )


def _axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
