"""Weights that published checkpoints hold in few bits, with scales beside them, read as the numbers they stand for:
`dequantised`. Knows numbers and names, no architectures. What a checkpoint says of activations and of caches is left
aside: those are computed as in any model."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from shardlm.errors import ShardlmError
from shardlm.hf_files import Stored
from shardlm.hf_quantised import bitsandbytes, compressed, eight_bits, gguf, gptq, mxfp4
from shardlm.hf_quantised.declared import declared
from shardlm.hf_quantised.kept import Kept

# Where config.json says so; the second is what early versions of compressed-tensors wrote.
OPTIONS = ("quantization_config", "compression_config")


class Method(NamedTuple):
    """check  refuses options of config.json that are not supported
    read   gives the weights by the names that they have in 16 bits, from all tensors
    """

    check: Callable[[Mapping[str, Any]], None]
    read: Callable[[Mapping[str, Stored], Mapping[str, Any]], dict[str, Any]]


METHODS = {
    "auto-round": Method(gptq.check_auto_round, gptq.read_auto_round),
    "awq": Method(gptq.check_awq, gptq.read_awq),
    "bitsandbytes": Method(bitsandbytes.check, bitsandbytes.read),
    "compressed-tensors": Method(compressed.check, compressed.read),
    "fbgemm_fp8": Method(eight_bits.check, eight_bits.read),
    "fp8": Method(eight_bits.check, eight_bits.read),
    "gguf": Method(gguf.check, gguf.read),
    "gptq": Method(gptq.check, gptq.read),
    "modelopt": Method(eight_bits.check_modelopt, eight_bits.read),
    "mxfp4": Method(mxfp4.check, mxfp4.read),
}


def supported(config: Mapping[str, Any]) -> str:
    """How the checkpoint is quantised, "" if it is not. Raises ShardlmError for what is not supported."""
    options = _options(config)
    if options is None:
        return ""
    method = _method(options)
    if method not in METHODS:
        raise ShardlmError(
            f"config.json has a quantization_config with quant_method={method!r}; supported are {', '.join(METHODS)}. "
            "Open another quantisation of the model, or one in 16 bits"
        )
    METHODS[method].check({**options, "quant_method": method})
    return method


def dequantised(tensors: Mapping[str, Stored], config: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors by the names that they have in 16 bits. Raises ShardlmError for numbers and scales that are without
    each other or do not fit."""
    method = supported(config)
    return METHODS[method].read(tensors, _options(config)) if method else dict(tensors)


def kept_as(config: Mapping[str, Any]) -> Callable[[str], Kept | None]:
    """How weights are held by their names in 16 bits, by what config.json says alone; None: in 16 bits."""
    method = supported(config)
    return declared(method, _options(config)) if method else lambda name: None


def _options(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    found = next((config[name] for name in OPTIONS if config.get(name)), None)
    if found is not None and not isinstance(found, Mapping):
        raise ShardlmError(f"config.json has quantization_config={found!r}; an object is needed. Download it again")
    if found is not None and config.get("expert_dtype"):  # which DeepSeek V4 says beside it
        found = {"expert_dtype": config["expert_dtype"], **found}
    return found


def _method(options: Mapping[str, Any]) -> str:
    """By its name; older files have none, and ModelOpt's one for each of its kinds."""
    method = options.get("quant_method")
    if method is None:
        of_bitsandbytes = any(options.get(f"load_in_{n}bit") or options.get(f"_load_in_{n}bit") for n in (4, 8))
        return "bitsandbytes" if of_bitsandbytes else "compressed-tensors" if "config_groups" in options else "none"
    return "modelopt" if str(method).startswith("modelopt") else str(method)
