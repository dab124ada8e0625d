"""A folder of adapters in the format of Hugging Face PEFT (https://huggingface.co/docs/peft): its two files, what they
say of themselves, and how they spell the modules of a model."""

import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from shardlm import peft_modules, safetensors_files, torch_files
from shardlm.errors import ShardlmError
from shardlm.stored import Stored

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
OLDER = "adapter_model.bin"  # as PyTorch saves it, which is read where there is no other
PREFIX = "base_model.model."  # of the names in PEFT's files


def is_peft(folder: pathlib.Path) -> bool:
    """Whether a folder holds adapters of PEFT."""
    return (folder / CONFIG).is_file()


def base_of(folder: pathlib.Path) -> str:
    """The checkpoint that the adapters of a folder stand on: a folder or a name on the hub."""
    base = config_of(folder).get("base_model_name_or_path")
    if not base:
        raise ShardlmError(
            f"{folder / CONFIG} has no base_model_name_or_path; write the base checkpoint's folder there"
        )
    return base


def base_is_here(folder: pathlib.Path) -> bool:
    """Whether the adapters of a folder stand on a folder that exists."""
    base = config_of(folder).get("base_model_name_or_path")
    return bool(base) and pathlib.Path(base).is_dir()


def rank_of(folder: pathlib.Path) -> int:
    """The largest of a folder's adapters."""
    config = config_of(folder)
    return max([config["r"], *(config.get("rank_pattern") or {}).values()])


def config_of(folder: pathlib.Path) -> Mapping[str, Any]:
    """A folder's adapter_config.json. Raises ShardlmError where it cannot be read, or its numbers are none."""
    try:
        config = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise ShardlmError(f"{folder / CONFIG} cannot be read ({error}); it describes adapters of PEFT") from None
    if not isinstance(config, dict):
        raise ShardlmError(f"{folder / CONFIG} holds a JSON {type(config).__name__}; it describes adapters of PEFT")
    if config.get("peft_type") == "LORA":
        _check_numbers(folder, config)
        peft_modules.check(config, str(folder / CONFIG))
    return config


def _check_numbers(folder: pathlib.Path, config: Mapping[str, Any]) -> None:
    given = {name: config.get(name) for name in ("r", "lora_alpha")}
    for pattern in ("rank_pattern", "alpha_pattern"):
        named = config.get(pattern) or {}
        try:
            given |= {f"{pattern}.{re.compile(module).pattern}": n for module, n in named.items()}
        except (AttributeError, re.error):
            message = f"{folder / CONFIG} has {pattern}={named!r}; it is an object of expressions for modules"
            raise ShardlmError(message) from None
    for name, n in given.items():
        kind = int if name.startswith("r") else int | float
        if not isinstance(n, kind) or isinstance(n, bool) or n <= 0:
            raise ShardlmError(f"{folder / CONFIG} has {name}={n!r}; ranks are whole numbers, and both are above 0")


def weights_of(folder: pathlib.Path) -> pathlib.Path:
    """The file of a folder's tensors."""
    older = not (folder / WEIGHTS).is_file() and (folder / OLDER).is_file()
    return folder / (OLDER if older else WEIGHTS)


def stored_in(folder: pathlib.Path) -> dict[str, Stored]:
    """Its tensors, of which only headers are read, as of a text model. Raises ShardlmError where there are none."""
    return {in_text(name): stored for name, stored in _header(folder).items()}


def spelled_in(folder: pathlib.Path) -> dict[str, str]:
    """{name of a tensor: the module that it is of, as the file and the configuration spell it}."""
    names = _header(folder)
    return {in_text(name): name.removeprefix(PREFIX).partition(".lora_")[0] for name in names}


def _header(folder: pathlib.Path) -> dict[str, Stored]:
    file = weights_of(folder)
    if not file.is_file():
        raise ShardlmError(f"{folder} has {CONFIG} and neither {WEIGHTS} nor {OLDER}; download one of them too")
    return torch_files.header(file) if file.name == OLDER else safetensors_files.header(file)


def in_text(name: str) -> str:
    """Of the text part of what sees too, as of a text model."""
    return re.sub(r"\.language_model\.(?=model\.|layers\.)", ".", name)


def module_of(key: str) -> tuple[str, str]:
    """(layer or "", module within it) of a tensor of PEFT's, such as self_attn.q_proj."""
    name = re.sub(r"(\.lora_[AB]\.weight|\.)$", "", key.removeprefix(PREFIX))
    found = re.match(r".*?\.(\d+)\.(.+)", name)
    return (found[1], found[2]) if found else ("", name)


def of_layer(name: str) -> str:
    """The module of a tensor's name with {layer}, within its layer."""
    return name.partition("{layer}.")[2].removesuffix(".weight")
