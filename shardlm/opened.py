"""Opens a model from wherever it is: a Hugging Face folder or name, or a run of shardlm. Each device reads its own
slices."""

import dataclasses
import logging
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from shardlm import peft, peft_folder, tokenizer_files, weights
from shardlm.checkpoint import Checkpoints
from shardlm.config_json import from_json
from shardlm.errors import ShardlmError
from shardlm.execution import execution_of, stored_dtype, weight_format_of
from shardlm.frozen_weights import check_base
from shardlm.gguf_files.ollama import installed
from shardlm.held_weights import held_weights, made_of
from shardlm.hf_files import Folder, home, read_config, read_generation
from shardlm.hub import fetch, is_name
from shardlm.layers.lora import LoraConfig
from shardlm.mesh import MeshSpec
from shardlm.models import registry
from shardlm.models.pretrained import Pretrained
from shardlm.ops.rope import STRETCHED
from shardlm.ops.schemes import SCHEMES
from shardlm.ops.weight_format import AsPublished, layers_differ
from shardlm.optim import ENCODER
from shardlm.precision import COMPUTE_DTYPE
from shardlm.progress_bar import bytes_bar, waiting
from shardlm.rules import Preset, Rules
from shardlm.run_files import CHECKPOINTS, RunFiles, find_run
from shardlm.serving_rules import serving_rules
from shardlm.state import ModelDef, at_rest, joined
from shardlm.tokenizer import Tokenizer

log = logging.getLogger(__name__)
BESIDE = ("mtp", ENCODER)  # parts of what a run trained that are read where they are asked for


@dataclasses.dataclass(frozen=True)
class Opened:
    """A model with its weights.

    model   to be called under `jax.set_mesh(mesh)`
    params  its parameters, at rest on the mesh
    source  the architecture's configuration (models/llama.py, models/pretrained.py, ...)
    folder  tokenizer and the like are here
    """

    model: ModelDef
    params: Any
    mesh: Mesh
    source: Any
    folder: pathlib.Path

    @property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.folder)

    @property
    def options(self) -> Mapping[str, Any]:
        """Its config.json; empty for a model that began as a run."""
        return self.source.options if isinstance(self.source, Pretrained) else {}

    @property
    def generation(self) -> Mapping[str, Any]:
        """What the checkpoint says of generating; empty without its generation_config.json."""
        return read_generation(self.folder)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a text: those that the checkpoint names, else the tokenizer's end of a document."""
        found = self.generation.get("eos_token_id")
        if found is None and isinstance(self.source, Pretrained):
            found = registry.text_config(self.source.options).get("eos_token_id")
        if found is None:
            return (self.tokenizer.end_of_document_id,)
        return tuple(found) if isinstance(found, list) else (found,)


@dataclasses.dataclass(frozen=True)
class Found:
    """What a path names, before anything is read of its weights.

    source    the architecture's configuration
    lora      its adapters
    folder    tokenizer and templates are here
    run       its files, where it is a run of shardlm
    adapters  their folder, where it is adapters of PEFT
    beside    tensors of a checkpoint that are no decoder's, and left alone: its classifier's
    """

    source: Any
    lora: LoraConfig
    folder: pathlib.Path
    run: RunFiles | None = None
    adapters: pathlib.Path | None = None
    beside: frozenset[str] = frozenset()

    @property
    def longest(self) -> int:
        """Positions that the model was made for; 0: not said. Of a run, those of its rows or, where it began with a
        checkpoint that has more, of that, unless the rotation was fixed for the rows."""
        rows = self.run.config_json["train"]["seq_len"] if self.run else 0
        if not isinstance(self.source, Pretrained) or (rows and _stretched(self.source)):
            return rows
        return max(rows, registry.longest(self.source.options))

    @property
    def scheme(self) -> str:
        """By which the run rounded its weights in training (ops/schemes.py); "": by none."""
        matmul = self.run.config_json.get("matmul", "") if self.run else ""
        return matmul if matmul in SCHEMES else ""


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A model that is to be opened, and the mesh that it will be called under."""

    found: Found
    model: ModelDef
    mesh: Mesh


def check_stands(found: Found) -> None:
    """Raises ShardlmError where the checkpoint that a run's adapters stand on has other weights than they were trained
    on."""
    if found.run and found.lora.rank:
        check_base(found.run.run_dir, found.source.folder)


def _stretched(source: Pretrained) -> bool:
    return any(a.rope and a.rope.kind in STRETCHED for a in source.transformer().attention_kinds)


def describe(path: str | os.PathLike | Found, length: int = 0, base: Any = None) -> Found:
    """What a path names: a Hugging Face folder or name, adapters of PEFT with the checkpoint that they stand on, or a
    run or one of its checkpoints; or a checkpoint that was found, for another length. `length` as in `load`; `base`: of
    adapters of PEFT, what they stand on where the folder that they name is not here. Raises ShardlmError where it is
    none of them."""
    if isinstance(path, Found):
        return dataclasses.replace(path, source=dataclasses.replace(path.source, length=length))
    folder = find(path)
    if is_hf(folder):
        return Found(Pretrained(str(folder), length).pinned(), LoraConfig(), folder)
    if peft_folder.is_peft(folder):
        source = base
        if not isinstance(base, Pretrained) or peft_folder.base_is_here(folder):
            source = Pretrained(str(find(peft_folder.base_of(folder))), length).pinned()
        beside = folder if tokenizer_files.is_here(folder) else pathlib.Path(source.folder)
        return Found(source, peft.lora_of(folder, source), beside, adapters=folder)
    run = find_run(folder)
    lora = from_json(LoraConfig, run.config_json.get("lora", {}))
    return Found(from_json(Any, run.config_json["model"]), lora, run.run_dir, run=run)


def rank_of(path: str | os.PathLike) -> int:
    """Of the adapters that a path names, 0 where it is a whole model; their checkpoint is not looked at. Raises as
    `describe`."""
    folder = find(path)
    if not is_hf(folder) and peft_folder.is_peft(folder):
        return peft_folder.rank_of(folder)
    return describe(folder).lora.rank


def load(
    path: str | os.PathLike | Found,
    *,
    mesh: MeshSpec | None = None,
    rules: Preset = "zero3",
    dtype: str | None = None,
    length: int = 0,
    step: int | None = None,
    ema: bool = False,
    decoding: bool = False,
    quantization: str | AsPublished | None = None,
    mtp: bool = False,
    check: Callable[[ModelDef], None] = lambda model: None,
    devices: Sequence[jax.Device] | None = None,
) -> Opened:
    """Opens a Hugging Face folder, a name on its hub, adapters of PEFT with the checkpoint that they stand on, or a run
    of shardlm (or one of its checkpoints).

    mesh      over the first of `devices`; one device by default
    dtype     that is computed in, and that a Hugging Face checkpoint's weights are held in; by default the run's, or
              the checkpoint's, for which a CPU takes float32: it multiplies that several times faster
    length    longest row of this use, for models whose rotation depends on it (ops/rope.py)
    step      of a run's checkpoint; the latest by default
    ema       the averaged weights of a run
    decoding  for a few rows of tokens: every device holds all rows, and weights rest where they are used
              (serving_rules.py)
    quantization  how projections are held, and multiplied: EngineConfig's (serve/engine_config.py)
    mtp       with the modules that predict further tokens (layers/mtp.py), where there are any
    check     is given the model before its weights are read, and raises where they need not be
    devices   all by default

    Raises ShardlmError for what is not there, does not fit, or is not supported.
    """
    options = {"rules": rules, "dtype": dtype, "length": length, "decoding": decoding, "quantization": quantization}
    ready = prepare(path, mesh=mesh, mtp=mtp, devices=devices, **options)
    with jax.set_mesh(ready.mesh):
        check(ready.model)
        params = _parameters(ready.found, ready.model, ready.mesh, step, "ema" if ema else "params")
    return Opened(ready.model, params, ready.mesh, ready.found.source, ready.found.folder)


def prepare(
    path: str | os.PathLike | Found,
    *,
    mesh: MeshSpec | None = None,
    rules: Preset = "zero3",
    dtype: str | None = None,
    length: int = 0,
    decoding: bool = False,
    quantization: str | AsPublished | None = None,
    mtp: bool = False,
    devices: Sequence[jax.Device] | None = None,
) -> Prepared:
    """What `load` opens, before its weights are read. Raises as it does for what can be told then."""
    found = describe(path, length)
    check_stands(found)
    if quantization not in (None, "dtype") and found.lora.rank:
        raise ShardlmError(
            f"quantization={quantization} and adapters, {path}: they stand on weights in lora.base={found.lora.base}; "
            "write both as one folder (launch.convert --merge)"
        )
    spec, devices = mesh or MeshSpec(), jax.devices() if devices is None else devices
    if -1 in spec.sizes().values():
        spec = spec.resolve(len(devices))
    needed = spec.size(*spec.sizes())
    if needed > len(devices):
        raise ShardlmError(f"the mesh {spec} needs {needed} devices and there are {len(devices)}; choose fewer")
    built = spec.build(devices[:needed])
    with jax.set_mesh(built):
        shape = found.source.transformer()
        shape = shape if mtp else shape.without_mtp()
        weight_format = weight_format_of(
            found.source, found.lora, found.run is not None, quantization, shape, spec, built if decoding else None
        )
        shape = shape.apart() if layers_differ(weight_format) else shape
        plain = Rules.make(rules, spec).fitting(shape.widths())
        table = serving_rules(shape, spec, weight_format, rules) if decoding else plain
        name = dtype or usual_dtype(found, built.devices.flat[0])
        execution = execution_of(shape, table, name, built.devices.flat[0], weight_format, found.lora)
        if found.scheme and weight_format == "dtype":
            if decoding:
                log.warning("%s was trained as what --quantization=%s of launch.convert writes", path, found.scheme)
            else:  # what was trained is what is looked at
                execution = dataclasses.replace(execution, matmul=found.scheme)
        model = ModelDef.make(shape, execution)
    return Prepared(found, model, built)


def _parameters(found: Found, model: ModelDef, mesh: Mesh, step: int | None, name: str) -> Any:
    """All of a model's, at rest; arguments as for `trained`."""
    held = model.held_at_rest(mesh)
    if found.run and model.execution.weights != "dtype" and not found.lora.rank:
        return _in_few_bits(found, model, held, mesh, step, name)
    as_they_are = jax.tree.map(lambda s: at_rest(s, mesh), model.shapes)
    params = trained(found, model, as_they_are if found.run or found.adapters else held, mesh, step, name)
    return joined(params, _from_folder(found, model, held)) if found.lora.rank else params


def trained(
    found: Found, model: ModelDef, shapes: Any, mesh: Mesh, step: int | None = None, name: str = "params"
) -> Any:
    """The weights that a run trained, adapters, or all weights of a Hugging Face folder, in the dtypes and at rest
    where `shapes` says. Of a run it is the checkpoint that was named, else the latest; `name` is "params" or "ema"."""
    if found.adapters:
        return peft.load(model, found.adapters, found.source, mesh)
    if not found.run:
        return _from_folder(found, model, shapes)
    checkpoints = Checkpoints(found.run.checkpoints_dir)
    with waiting("reading the checkpoint", jax.process_index() == 0), checkpoints as reader:
        # Of modules that predict further tokens as many are read as `shapes` has.
        return reader.restore_params(shapes, found.run.step if step is None else step, name, optional=BESIDE)


def _in_few_bits(found: Found, model: ModelDef, shapes: Any, mesh: Mesh, step: int | None, name: str) -> Any:
    """The weights of a run, held as `shapes` says; one parameter at a time is on the devices as it was trained."""
    plain = ModelDef.make(model.config, dataclasses.replace(model.execution, weights="dtype"))
    flat, made = flatten_dict(shapes), {}
    whole = flatten_dict(jax.tree.map(lambda s: at_rest(s, mesh), plain.shapes))
    checkpoints = Checkpoints(found.run.checkpoints_dir)
    with waiting("reading the checkpoint", jax.process_index() == 0), checkpoints as reader:
        asked = found.run.step if step is None else step
        there = reader.check_params(unflatten_dict(whole), asked, name, optional=BESIDE)
        for path, one in held_weights(shapes, model.execution.weights, model.groups).items():
            tree = reader.restore_some(unflatten_dict({path: whole[path]}), there, name)
            w = on_host(flatten_dict(tree)[path])
            del tree  # from the devices, before what is made of it comes there
            made |= made_of(path, one, w, flat)
    return unflatten_dict(made)


def on_host(a: jax.Array) -> np.ndarray:
    """All of an array; of several processes all must call it."""
    whole = a.is_fully_addressable or a.is_fully_replicated
    return np.asarray(a if whole else multihost_utils.process_allgather(a, tiled=True))


def check_trained(found: Found, model: ModelDef) -> None:
    """Whether `trained` will find the adapters of `model`, from what files say of themselves. Raises ShardlmError for
    what is missing, left over, of another shape or damaged."""
    if found.adapters:
        peft.parts(model, found.adapters, found.source)
        return
    with Checkpoints(found.run.checkpoints_dir) as reader:
        reader.check_params(model.shapes, found.run.step, optional=BESIDE)


def find(path: str | os.PathLike) -> pathlib.Path:
    """A folder as it is, that which stands for a GGUF file (gguf_files/place.py), also for one that Ollama has pulled
    under this name, or the local copy of `owner/name` on the Hugging Face hub, fetched where needed.

    Raises ShardlmError where there is none of them.
    """
    folder = pathlib.Path(path)
    if (there := home(folder)).is_dir():
        return there
    if folder.parent.name == CHECKPOINTS:
        find_run(folder)  # says which checkpoints the run has
    if folder.suffix == ".gguf" and ":" not in str(path):
        raise ShardlmError(f"there is no file {path}; give the path of a file of llama.cpp, or OWNER/NAME:Q4_K_M")
    if not is_name(str(path)):
        if pulled := installed(str(path)):
            return home(pulled)
        raise ShardlmError(
            f"there is no folder {path}; give a Hugging Face folder, OWNER/NAME on its hub, a file of llama.cpp "
            "(*.gguf), a model that Ollama has pulled (NAME:TAG), or a run"
        )
    return home(fetch(str(path), [peft_folder.CONFIG], [peft_folder.OLDER]))


def is_hf(folder: pathlib.Path) -> bool:
    """Whether a folder is a Hugging Face checkpoint, and not a run."""
    file = folder / "config.json"
    return file.is_file() and "model_type" in read_config(folder)


def is_run(folder: pathlib.Path) -> bool:
    """Whether a folder is a run, or a checkpoint in one; also where nothing says what it is."""
    return not is_hf(folder) and not peft_folder.is_peft(folder)


def _from_folder(found: Found, model: ModelDef, shapes: Any) -> Any:
    with bytes_bar("reading weights", jax.process_index() == 0) as progress:
        folder = Folder.open(found.source.folder)
        own = {name: stored for name, stored in folder.tensors.items() if name not in found.beside}
        return weights.load(model, dataclasses.replace(folder, tensors=own), shapes, progress)


def usual_dtype(found: Found, device: jax.Device) -> str:
    """That a run computed in, or that of a checkpoint; float32 on a CPU, which is slow in others."""
    if found.run:
        return jnp.dtype(COMPUTE_DTYPE[found.run.config_json["precision"]]).name
    slow = device.platform == "cpu"
    return "float32" if slow else stored_dtype(found.source)
