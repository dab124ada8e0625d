"""Adapters in the format of Hugging Face PEFT, read from a folder (peft_folder.py) as weights of a model and written to
one. They stand on a checkpoint; projections that it fuses into one tensor have one adapter there, of the sum of their
ranks. What they are called is the architectures' business."""

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

from shardlm import peft_modules, weights
from shardlm.errors import ShardlmError
from shardlm.hf_files import Planned, Stored, write_file
from shardlm.layers.lora import MLP, TARGETS, LoraConfig, beside
from shardlm.models import registry
from shardlm.models.naming import Tensor, join, read, write
from shardlm.models.pretrained import Pretrained
from shardlm.models.text_parts import SEEING
from shardlm.peft_folder import (
    CONFIG,
    PREFIX,
    WEIGHTS,
    config_of,
    in_text,
    module_of,
    of_layer,
    rank_of,
    spelled_in,
    stored_in,
    weights_of,
)
from shardlm.state import ModelDef

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
    "kasa_config": None,
    "monteclora_config": None,
}
MERGE = "merge the adapters into their checkpoint with PEFT (merge_and_unload), and serve that"
NO_OUT_PROJ = ("falcon_h1", "nemotron_h")  # families of whose out_proj PEFT opens no adapters
EXPERTS = f"projections of routed experts, which have no adapters here: {MERGE}"
ANEW = "save the adapters anew"
ADDED = (True, False, "gaussian", "eva", "orthogonal")  # ways to begin that leave the base as it is


@dataclasses.dataclass(frozen=True)
class Adapter:
    """One projection of ours in a checkpoint's layer: its weight's path, its two tensors, and its outputs' shape."""

    path: tuple
    a: Tensor
    b: Tensor
    out: tuple[int, ...]
    adapted: bool


@dataclasses.dataclass(frozen=True)
class Part:
    """A or B of one projection in a checkpoint's layer, of the rank that a folder has it with.

    path    of ours
    place   of the layer in our stack; None: it is not stacked
    tensor  what of theirs it is
    shape   of ours, of one layer
    factor  that ours is theirs times
    """

    path: tuple
    place: int | None
    tensor: Tensor
    shape: tuple[int, ...]
    stored: Stored
    factor: float


def lora_of(folder: pathlib.Path, source: Pretrained) -> LoraConfig:
    """The adapters of a folder as this project configures them, on the checkpoint `source`. Raises ShardlmError for a
    kind of adapter that computes something else."""
    config = config_of(folder)
    shape = source.transformer()
    kinds = dict.fromkeys(shape.blocks())  # whose MLPs have other names each
    names = [pair for block in kinds for pair in registry.names(source.options, shape, block).items()]
    if config.get("peft_type") != "LORA":
        raise ShardlmError(f"{folder / CONFIG} has peft_type={config.get('peft_type')!r}; supported: 'LORA'")
    for option, plain in PLAIN.items():
        if config.get(option) not in (plain, None, []):
            if option == "target_parameters":
                raise ShardlmError(f"{folder / CONFIG} has {option}={config[option]!r}, {EXPERTS}")
            raise ShardlmError(f"{folder / CONFIG} has {option}={config[option]!r}, which is not supported; {MERGE}")
    if config.get("init_lora_weights", True) not in ADDED:
        raise ShardlmError(
            f"{folder / CONFIG} has init_lora_weights={config['init_lora_weights']!r}, which changes the base too; "
            "save the adapters with path_initial_model_for_weight_conversion"
        )
    modules = {module_of(key)[1] for key in stored_in(folder)}
    if of_experts := sorted(filter(_of_experts, modules)):
        raise ShardlmError(f"{weights_of(folder)} adapts {of_experts[0]}, {EXPERTS}")
    called = registry.module_name(source.options)
    each = [(path.rpartition(".")[2], of_layer(called(one.name))) for path, one in names if "{layer}" in one.name]
    known = {module: ours for ours, module in each}
    targets = {ours for ours, module in each if module in modules}
    unknown = sorted(modules - set(known))
    if unknown or not targets <= set(TARGETS):
        named = unknown or sorted(module for module in modules if known[module] not in TARGETS)
        raise ShardlmError(f"{weights_of(folder)} adapts {', '.join(named)}, which has no adapter in shardlm; {MERGE}")
    return LoraConfig(rank_of(folder), float(config["lora_alpha"]), tuple(t for t in TARGETS if t in targets))


def load(model: ModelDef, folder: pathlib.Path, source: Pretrained, mesh: Mesh) -> Any:
    """`arrays` as a tree like model.shapes, at rest on the mesh. Raises as it does."""
    at_rest = {p: NamedSharding(mesh, shape.sharding.spec) for p, shape in flatten_dict(model.shapes).items()}
    made = arrays(model, folder, source)
    return unflatten_dict({path: jax.device_put(a, at_rest[path]) for path, a in made.items()})


def arrays(model: ModelDef, folder: pathlib.Path, source: Pretrained) -> dict[tuple, np.ndarray]:
    """The adapters of a folder on the host, by path, as model.shapes has them. A projection without one in the folder
    has zeros. Raises ShardlmError as `parts`."""
    made = {path: np.zeros(shape.shape, shape.dtype) for path, shape in flatten_dict(model.shapes).items()}
    for part in parts(model, folder, source):
        ours = made[part.path] if part.place is None else made[part.path][part.place]
        found = read(part.tensor, part.shape, (slice(None),) * len(part.shape), part.stored.read).astype(np.float32)
        ours[tuple(map(slice, part.shape))] = found * part.factor
    return made


def parts(model: ModelDef, folder: pathlib.Path, source: Pretrained) -> list[Part]:
    """Where the adapters of a model are in a folder, of which only headers are read. Raises ShardlmError for tensors
    that are missing, left over or of another shape."""
    stored, config, lora = stored_in(folder), config_of(folder), model.execution.lora
    shapes, found, used, missing = flatten_dict(model.shapes), [], set(), []
    spelled = spelled_in(folder)
    expected = _expected(config, model, source, spelled)
    for place, module, group in _groups(model, source):
        keys = [f"{module}.lora_A.weight", f"{module}.lora_B.weight"]
        if lost := [key for key in keys if key not in stored]:
            if len(lost) == 1 or module in expected:
                missing += lost
            continue
        used.update(keys)
        rank = stored[keys[0]].shape[0] if stored[keys[0]].shape else 0
        theirs = spelled[keys[0]]
        if rank != (said := peft_modules.own(config, "rank_pattern", theirs, config["r"])):
            raise ShardlmError(f"{weights_of(folder)}: {keys[0]} has rank {rank} and {CONFIG} says {said}; {ANEW}")
        factor = _alpha(config, theirs, rank) / (lora.alpha / lora.rank)
        for one in group:
            a, b = (shapes[path].shape[place is not None :] for path in beside(one.path))
            both = ((one.a, (*a[:-1], rank), keys[0], 1.0), (one.b, (rank, *b[1:]), keys[1], factor))
            for path, (tensor, shape, key, scale) in zip(beside(one.path), both, strict=True):
                _check_shape(folder, key, stored[key], tensor, shape, group)
                found.append(Part(path, place, tensor, shape, stored[key], scale))
    _check_named(folder, config, model, source, spelled)
    if missing:
        raise ShardlmError(f"{weights_of(folder)} lacks {_some(missing)}; {ANEW}")
    if left := sorted(stored.keys() - used):
        raise ShardlmError(f"{weights_of(folder)} has tensors that do not fit the model: {_some(left)}")
    return found


def _expected(config, model: ModelDef, source: Pretrained, spelled: Mapping[str, str]) -> set[str]:
    """The model's modules that the configuration names; none where an expression is for names that the file spells
    otherwise."""
    as_here = all(in_text(name) == name for name in (f"{PREFIX}{module}." for module in spelled.values()))
    if isinstance(config.get("target_modules"), str) and not as_here:
        return set()
    named = peft_modules.names_of(config)
    return {module for _, module, _ in _groups(model, source) if named(module.removeprefix(PREFIX))}


def _check_named(folder: pathlib.Path, config, model: ModelDef, source: Pretrained, spelled: Mapping[str, str]) -> None:
    """Raises ShardlmError where a configuration names other modules than the file has."""
    modules = {module_of(key)[1] for key in spelled}
    called, each = registry.module_name(source.options), _tensors(model, source).items()
    here = {of_layer(called(name)) for (*_, name), group in each if _of_projection(group[0])}
    ends, has = peft_modules.by_ends(config), peft_modules.ends_with
    if lost := [end for end in ends if has(end, here) and not has(end, modules)]:
        raise ShardlmError(f"{weights_of(folder)} has none of {_some(lost)}, target_modules of {CONFIG}; {ANEW}")
    named = peft_modules.names_of(config)
    if more := sorted({module for module in spelled.values() if not named(module)}):
        said = ", ".join(f"{o}={config[o]!r:.200}" for o in peft_modules.OPTIONS if config.get(o))
        raise ShardlmError(
            f"{weights_of(folder)} adapts {_some(more)}, which {CONFIG} with {said} does not name, so that PEFT leaves "
            f"it out; {ANEW}"
        )


def save(output: str | os.PathLike, model: ModelDef, adapters: Any, source: Pretrained) -> None:
    """Writes adapters (a tree like model.shapes) on the checkpoint `source` as a new folder that PEFT opens. Raises
    ShardlmError where `output` exists."""
    output, lora = pathlib.Path(output), model.execution.lora
    seeing = source.options.get("model_type") in SEEING  # where PEFT finds modules of these names elsewhere too
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
        if (kind := source.options.get("model_type")) in NO_OUT_PROJ and module.endswith(".out_proj"):
            # peft 0.21 (_check_lora_target_modules_mamba); attention's o_proj, which is our wo too, it takes.
            if any(map(np.any, b)):
                raise ShardlmError(
                    f"{module} has an adapter: PEFT opens none of out_proj in a {kind!r} model; train without wo "
                    "in lora.targets, or write the merged checkpoint instead (--merge)"
                )
            continue
        where = module.replace("model.layers.", "model.language_model.layers.") if seeing else module
        tensors[f"{where}.lora_A.weight"], tensors[f"{where}.lora_B.weight"] = np.concatenate(a), np.hstack(b)
        ranks[module_of(f"{module}.")[1]] = lora.rank * len(a)
    fused = {module: rank for module, rank in ranks.items() if rank != lora.rank}
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(pathlib.Path(source.folder).absolute()),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "rank_pattern": fused,
        "alpha_pattern": {module: lora.alpha * rank / lora.rank for module, rank in fused.items()},
        "target_modules": rf".*\blanguage_model\..*\.({'|'.join(sorted(ranks))})" if seeing else sorted(ranks),
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
    trained, flat = flatten_dict(model.shapes), flatten_dict(weights.unpacked(model))
    in_transformers = registry.module_name(source.options)
    for (*_, name), group in _tensors(model, source).items():
        adapted = [beside(leaf.path)[0] in trained for leaf in group]
        if not any(adapted):
            continue
        first = next(leaf for leaf, yes in zip(group, adapted, strict=True) if yes)
        into = len(trained[beside(first.path)[0]].shape) - 1 - bool(first.layers)
        made = []
        for leaf, yes in zip(group, adapted, strict=True):
            shape = flat[leaf.path].shape[bool(leaf.layers) :]
            made.append(Adapter(leaf.path, *_factors(leaf.tensor, shape, into), shape[into:], yes))
        for place, layer in enumerate(first.numbers or (0,)):
            module = PREFIX + in_transformers(name.format(layer=layer)).removesuffix(".weight")
            yield (place if first.layers else None), module, made


def _tensors(model: ModelDef, source: Pretrained) -> dict[tuple, list[weights.Leaf]]:
    """{(whose block of ours, its first layer in names, a checkpoint's tensor or one in each of its layers): the weights
    of ours in it}."""
    groups: dict[tuple, list[weights.Leaf]] = {}
    whole = weights.unpacked(model)
    for leaf in weights.leaves(model.config, whole, lambda block: registry.names(source.options, model.config, block)):
        groups.setdefault((leaf.path[:4], leaf.numbers[:1], leaf.tensor.name), []).append(leaf)
    return groups


def _of_projection(leaf: weights.Leaf) -> bool:
    """Whether a weight may have an adapter."""
    return leaf.path[-1] in TARGETS and not _of_experts(leaf.tensor.name)


def _of_experts(module: str) -> bool:
    return re.search(r"(^|\.)experts(\.|$)", module) is not None


def _factors(tensor: Tensor, shape: tuple[int, ...], into: int) -> tuple[Tensor, Tensor]:
    """Where A and B are, of a weight whose first `into` dimensions are inputs: theirs are [rank, inputs] and [outputs,
    rank]."""
    letters, groups = tensor.letters(tensor.viewed(shape)), tensor.theirs(tensor.viewed(shape))
    inputs, outputs = letters[:into], letters[into:]
    text = {group[0]: f"({' '.join(group)})" if len(group) > 1 else group[0] for group in groups}

    def own(letters, option):
        return option if option and option[0] in letters else None

    a = f"Z {next(text[n] for n in text if n in inputs)} -> {' '.join(inputs)} Z"
    b = f"{next(text[n] for n in text if n in outputs)} Z -> Z {' '.join(outputs)}"
    part = (0, *tensor.part[1:]) if tensor.part else None
    return (
        Tensor("A", a, None, own(inputs, tensor.inner), own(inputs, tensor.pairs)),
        Tensor("B", b, part, own(outputs, tensor.inner), own(outputs, tensor.pairs), tensor.group),
    )


def _check_shape(folder, key: str, stored: Stored, tensor: Tensor, shape, group: list[Adapter]) -> None:
    rank = shape[-1] if tensor.name == "A" else shape[0]
    if tensor.name == "A":
        needed = write(tensor, np.empty(shape, np.bool_)).shape
    else:
        needed = join([(one.b, np.empty((rank, *one.out), np.bool_)) for one in group]).shape
    if stored.shape != needed:
        raise ShardlmError(f"{weights_of(folder)}: {key} is {list(stored.shape)} and the model needs {list(needed)}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _alpha(config: Mapping[str, Any], module: str, rank: int) -> float:
    """What PEFT multiplies x A B by."""
    own = peft_modules.own(config, "alpha_pattern", module, config["lora_alpha"])
    return own / rank**0.5 if config.get("use_rslora") else own / rank
