"""Adapters in the format of Hugging Face PEFT (https://huggingface.co/docs/peft): a folder with adapter_config.json and
adapter_model.safetensors, beside the checkpoint that they stand on. Projections that a checkpoint fuses into one tensor
have one adapter there, of the sum of their ranks; what they are called is the architectures' business."""

import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding

from shardlm import weights
from shardlm.errors import ShardlmError
from shardlm.hf_files import Planned, Stored, header, write_file
from shardlm.layers.lora import MLP, TARGETS, LoraConfig, beside
from shardlm.models import registry
from shardlm.models.naming import Tensor, join, read, write
from shardlm.models.pretrained import Pretrained
from shardlm.state import ModelDef

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Options of PEFT that change the numbers, with the values under which they do not.
PLAIN = {
    "bias": "none",
    "modules_to_save": None,
    "layer_replication": None,
    "target_parameters": None,
    "trainable_token_indices": None,
    "use_dora": False,
    "use_qalora": False,
    "lora_bias": False,
    "alora_invocation_tokens": None,
    "arrow_config": None,
    "use_bdlora": None,
}
ADDED = (True, False, "gaussian", "eva", "orthogonal")  # ways to begin that leave the base as it is


@dataclasses.dataclass(frozen=True)
class Adapter:
    """One projection of ours in a checkpoint's layer: its weight's path, its two tensors, and its outputs' shape."""

    path: tuple
    a: Tensor
    b: Tensor
    out: tuple[int, ...]
    adapted: bool


def is_peft(folder: pathlib.Path) -> bool:
    """Whether a folder holds adapters of PEFT."""
    return (folder / CONFIG).is_file()


def base_of(folder: pathlib.Path) -> str:
    """The checkpoint that the adapters of a folder stand on: a folder or a name on the hub."""
    base = _config(folder).get("base_model_name_or_path")
    if not base:
        raise ShardlmError(
            f"{folder / CONFIG} has no base_model_name_or_path; write the base checkpoint's folder there"
        )
    return base


def lora_of(folder: pathlib.Path, source: Pretrained) -> LoraConfig:
    """The adapters of a folder as this project configures them, on the checkpoint `source`. Raises ShardlmError for a
    kind of adapter that computes something else."""
    config = _config(folder)
    shape = source.transformer()
    names = {k: v for block in shape.blocks() for k, v in registry.names(source.options, shape, block).items()}
    if config.get("peft_type") != "LORA":
        raise ShardlmError(f"{folder / CONFIG} has peft_type={config.get('peft_type')!r}; supported: 'LORA'")
    for option, plain in PLAIN.items():
        if config.get(option) not in (plain, None, []):
            raise ShardlmError(f"{folder / CONFIG} has {option}={config[option]!r}, which is not supported")
    if config.get("init_lora_weights", True) not in ADDED:
        raise ShardlmError(
            f"{folder / CONFIG} has init_lora_weights={config['init_lora_weights']!r}, which changes the base too; "
            "save the adapters with path_initial_model_for_weight_conversion"
        )
    modules = {_module(key)[1] for key in _stored(folder)}
    known = {
        _of_layer(tensor.name): path.rpartition(".")[2] for path, tensor in names.items() if "{layer}" in tensor.name
    }
    targets = {path.rpartition(".")[2] for path, tensor in names.items() if _of_layer(tensor.name) in modules}
    unknown = sorted(modules - set(known))
    if unknown or not targets <= set(TARGETS):
        named = unknown or sorted(module for module in modules if known[module] not in TARGETS)
        raise ShardlmError(f"{folder / WEIGHTS} adapts {', '.join(named)}, which has no adapter in shardlm")
    rank = max([config["r"], *(config.get("rank_pattern") or {}).values()])
    return LoraConfig(rank, float(config["lora_alpha"]), tuple(t for t in TARGETS if t in targets))


def load(model: ModelDef, folder: pathlib.Path, source: Pretrained, mesh: Mesh) -> Any:
    """The adapters of a folder as a tree like model.shapes, at rest on the mesh. A projection without one in the folder
    has zeros. Raises ShardlmError for tensors that are left over or of another shape."""
    stored, config, lora = _stored(folder), _config(folder), model.execution.lora
    shapes, made, used = flatten_dict(model.shapes), {}, set()
    for path, shape in shapes.items():
        made[path] = np.zeros(shape.shape, shape.dtype)
    for place, module, group in _groups(model, source):
        keys = [f"{module}.lora_A.weight", f"{module}.lora_B.weight"]
        if not set(keys) <= stored.keys():
            continue
        used.update(keys)
        own = stored[keys[0]].shape[0]
        factor = _alpha(config, module, own) / (lora.alpha / lora.rank)
        for one in group:
            at = slice(None) if place is None else place
            a, b = (made[path][at] for path in beside(one.path))
            for ours, tensor, key, rank_axis in ((a, one.a, keys[0], -1), (b, one.b, keys[1], 0)):
                shape = tuple(own if i == rank_axis % ours.ndim else n for i, n in enumerate(ours.shape))
                whole = tuple(slice(None) for _ in shape)
                _check_shape(folder, key, stored[key], tensor, shape, group)
                found = read(tensor, shape, whole, stored[key].read).astype(np.float32)
                rows = (..., slice(own)) if rank_axis else slice(own)
                ours[rows] = found * (factor if key is keys[1] else 1)
    if left := sorted(stored.keys() - used):
        raise ShardlmError(f"{folder / WEIGHTS} has tensors that do not fit the model: {', '.join(left[:4])}")
    at_rest = {p: NamedSharding(mesh, shape.sharding.spec) for p, shape in shapes.items()}
    return unflatten_dict({path: jax.device_put(a, at_rest[path]) for path, a in made.items()})


def save(output: str | os.PathLike, model: ModelDef, adapters: Any, source: Pretrained) -> None:
    """Writes adapters (a tree like model.shapes) on the checkpoint `source` as a new folder that PEFT opens. Raises
    ShardlmError where `output` exists."""
    output, lora = pathlib.Path(output), model.execution.lora
    experts = any(block.mlp.num_experts for block in model.config.blocks())
    if experts and set(lora.of_model(experts).targets) & set(MLP):
        # peft 0.21 (convert_peft_config_for_transformers) maps the names to the experts' fused tensors.
        raise ShardlmError(
            f"lora.targets={lora.targets} in a model with experts: PEFT takes adapters of gate, up and down there for "
            "those of the experts; write the merged checkpoint instead (--merge)"
        )
    if output.exists():
        raise ShardlmError(f"{output} exists; choose another output folder or remove it")
    flat = {path: np.asarray(a, np.float32) for path, a in flatten_dict(adapters).items()}
    tensors, ranks = {}, {}
    for place, module, group in _groups(model, source):
        a, b = [], []
        for one in (g for g in group if g.adapted):
            at = slice(None) if place is None else place
            of_a, own = (flat[path][at] for path in beside(one.path))
            a.append(write(one.a, of_a))
            others = [(g.b, own if g is one else np.zeros((lora.rank, *g.out), np.float32)) for g in group]
            b.append(join(others))
        tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"] = np.concatenate(a), np.hstack(b)
        ranks[_module(f"{module}.")[1]] = lora.rank * len(a)
    fused = {module: rank for module, rank in ranks.items() if rank != lora.rank}
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(pathlib.Path(source.folder).absolute()),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "rank_pattern": fused,
        "alpha_pattern": {module: lora.alpha * rank / lora.rank for module, rank in fused.items()},
        "target_modules": sorted(ranks),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": any("c_attn" in module or "c_fc" in module or "c_proj" in module for module in ranks),
        "inference_mode": True,
    }
    unfinished = output.with_name(output.name + ".unfinished")
    unfinished.mkdir(parents=True, exist_ok=True)
    planned = [Planned(name, a.dtype, a.shape, lambda a=a: a) for name, a in sorted(tensors.items())]
    for _ in write_file(unfinished / WEIGHTS, planned):
        pass
    (unfinished / CONFIG).write_text(json.dumps(described, indent=2) + "\n")
    unfinished.rename(output)


def _groups(model: ModelDef, source: Pretrained) -> Iterator[tuple[int | None, str, list[Adapter]]]:
    """For each of a checkpoint's tensors that has an adapter: (place in our stack, its name in PEFT's files without
    the ending, the projections of ours in it)."""
    whole = weights.unpacked(model)
    trained, flat, groups = flatten_dict(model.shapes), flatten_dict(whole), {}
    named = weights.leaves(model.config, whole, lambda block: registry.names(source.options, model.config, block))
    for leaf in named:
        groups.setdefault((leaf.path[:4], leaf.tensor.name), []).append(leaf)
    for (_, name), group in groups.items():
        adapted = [beside(leaf.path)[0] in trained for leaf in group]
        if not any(adapted):
            continue
        first = next(leaf for leaf, yes in zip(group, adapted, strict=True) if yes)
        into = len(trained[beside(first.path)[0]].shape) - 1 - bool(first.layers)
        made = []
        for leaf, yes in zip(group, adapted, strict=True):
            shape = flat[leaf.path].shape[bool(leaf.layers) :]
            made.append(Adapter(leaf.path, *_factors(leaf.tensor, shape, into), shape[into:], yes))
        for place, layer in enumerate(first.layers or (0,)):
            module = "base_model.model." + name.format(layer=layer).removesuffix(".weight")
            yield (place if first.layers else None), module, made


def _factors(tensor: Tensor, shape: tuple[int, ...], into: int) -> tuple[Tensor, Tensor]:
    """Where A and B are, of a weight whose first `into` dimensions are inputs: theirs are [rank, inputs] and [outputs,
    rank]."""
    letters, groups = tensor.letters(shape), tensor.theirs(shape)
    inputs, outputs = letters[:into], letters[into:]
    text = {group[0]: f"({' '.join(group)})" if len(group) > 1 else group[0] for group in groups}

    def own(letters, option):
        return option if option and option[0] in letters else None

    a = f"Z {next(text[n] for n in text if n in inputs)} -> {' '.join(inputs)} Z"
    b = f"{next(text[n] for n in text if n in outputs)} Z -> Z {' '.join(outputs)}"
    part = (0, *tensor.part[1:]) if tensor.part else None
    return (
        Tensor("A", a, None, own(inputs, tensor.inner), own(inputs, tensor.pairs)),
        Tensor("B", b, part, own(outputs, tensor.inner), own(outputs, tensor.pairs)),
    )


def _check_shape(folder, key: str, stored: Stored, tensor: Tensor, shape, group: list[Adapter]) -> None:
    rank = shape[-1] if tensor.name == "A" else shape[0]
    if tensor.name == "A":
        needed = write(tensor, np.empty(shape, np.bool_)).shape
    else:
        needed = join([(one.b, np.empty((rank, *one.out), np.bool_)) for one in group]).shape
    if stored.shape != needed:
        raise ShardlmError(f"{folder / WEIGHTS}: {key} is {list(stored.shape)} and the model needs {list(needed)}")


def _alpha(config: Mapping[str, Any], module: str, rank: int) -> float:
    """What PEFT multiplies x A B by."""
    patterns = config.get("alpha_pattern") or {}
    own = next((a for name, a in patterns.items() if re.search(rf"(^|\.){name}$", module)), config["lora_alpha"])
    return own / rank**0.5 if config.get("use_rslora") else own / rank


def _config(folder: pathlib.Path) -> Mapping[str, Any]:
    try:
        return json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise ShardlmError(f"{folder / CONFIG} cannot be read ({error}); it describes adapters of PEFT") from None


def _stored(folder: pathlib.Path) -> dict[str, Stored]:
    if not (folder / WEIGHTS).is_file():
        raise ShardlmError(f"{folder} has {CONFIG} and no {WEIGHTS}; save the adapters with safe_serialization")
    return {re.sub(r"\.language_model\.(?=model\.|layers\.)", ".", n): s for n, s in header(folder / WEIGHTS).items()}


def _module(key: str) -> tuple[str, str]:
    """(layer or "", module within it) of a tensor of PEFT's, such as self_attn.q_proj."""
    name = re.sub(r"(\.lora_[AB]\.weight|\.)$", "", key.removeprefix("base_model.model."))
    found = re.match(r".*?\.(\d+)\.(.+)", name)
    return (found[1], found[2]) if found else ("", name)


def _of_layer(name: str) -> str:
    return name.partition("{layer}.")[2].removesuffix(".weight")
