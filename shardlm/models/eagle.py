"""Heads that draft by the streams of another decoder: EAGLE-3 (https://arxiv.org/abs/2503.01840), as SafeAILab,
SpecForge, Model Optimizer and vllm-project/speculators publish them, with layers like Llama's or Qwen 3's. Their
config.json says it in several ways; `plain` makes one of them, with `model_type` eagle3, which the rest of this module
reads."""

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

from shardlm.errors import ShardlmError
from shardlm.layers.block import BlockConfig
from shardlm.layers.eagle import EagleConfig
from shardlm.models import hf_decoder
from shardlm.models.hf_options import Options
from shardlm.models.naming import Names, Tensor, standard
from shardlm.models.transformer_config import TransformerConfig

LAYERS = "eagle_aux_hidden_state_layer_ids"
# Of its layers' model_type: the norm of queries and keys, and what a speculators' file leaves out.
KINDS = {"llama": "none", "qwen3": "head"}
_USUAL = {"hidden_size": 4096, "num_attention_heads": 32, "rms_norm_eps": 1e-6, "hidden_act": "silu"}
USUAL = {
    "llama": {**_USUAL, "intermediate_size": 11_008, "vocab_size": 32_000},
    "qwen3": {**_USUAL, "intermediate_size": 22_016, "vocab_size": 151_936, "num_key_value_heads": 32, "head_dim": 128},
}
# What eagle_config may say besides, and what it stands for here.
INSIDE = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "parallel_draft_step": 1,
    "eh_proj_before_attn": False,
}
# What NVIDIA's files say inside of it, and others beside it, by its name there and the one here.
EITHER = {
    "norm_before_fc": "norm_before_fc",
    "norm_before_residual": "norm_before_residual",
    "norm_output": "norm_output",
    "fc_norm": "fc_norm",
    "return_hidden_post_norm": "norm_output",
}
MAP = "d2t"  # the tensor that says how far each proposed token's number is from its place


@dataclasses.dataclass(frozen=True)
class Streams:
    """Behind how many of the other decoder's layers a head reads its stream; (): as heads do that do not say so."""

    said: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        return len(self.said) or 3

    def of(self, num_layers: int) -> tuple[int, ...]:
        """Of a decoder of so many, in order. Raises ShardlmError for layers that it has not."""
        found = sorted(self.said or (2, num_layers // 2, num_layers - 3))
        if len(set(found)) < len(found) or not 0 <= found[0] <= found[-1] <= num_layers:
            told = f"{LAYERS} of its config.json" if self.said else f"without {LAYERS} in its config.json"
            raise ShardlmError(
                f"it reads the streams behind {', '.join(map(str, found))} layers ({told}), and the model has "
                f"{num_layers}: it is for another model"
            )
        return tuple(found)


def is_head(config: Mapping[str, Any], tensors: Mapping[str, Any]) -> bool:
    """Whether it is such a head: published ones call themselves a Llama, so that their tensors tell."""
    names = {published_name(name) for name in tensors}
    return config.get("speculators_model_type") == "eagle3" or {"fc.weight", f"{_FIRST}hidden_norm.weight"} <= names


_FIRST = "model.layers.0."


def published_name(name: str) -> str:
    """Of any of the files, as Llama's has it."""
    name = name.removeprefix("model.").replace("midlayer.", "layers.0.")
    return f"model.{name}" if name.startswith(("layers.", "norm.", "embed_tokens.")) else name


def unused(options: Mapping[str, Any]) -> re.Pattern:
    """What was there for training, and what is no weight."""
    return re.compile(rf"t2d$|{MAP}$|verifier_(norm|lm_head)\.")


def plain(config: Mapping[str, Any]) -> tuple[dict[str, Any], Streams]:
    """(config.json as `from_hf` reads it, the streams that the head reads). Raises ShardlmError for what is not
    supported."""
    own, kind = dict(config), config.get("speculators_model_type")
    if kind:
        own = _of_speculators(config)
    inside = own.pop("eagle_config", None) or {}
    own |= {known: inside[name] for name, known in EITHER.items() if inside.get(name) is not None}
    wrong = {name: inside[name] for name, known in INSIDE.items() if inside.get(name, known) != known}
    if kind not in (None, "eagle3") or wrong:
        told = ", ".join(f"{name}={value!r}" for name, value in (wrong or {"speculators_model_type": kind}).items())
        raise ShardlmError(f"config.json has {told}, which is no head of EAGLE-3 that shardlm knows")
    layers = own.get("model_type", "llama")
    if layers not in KINDS:
        raise ShardlmError(
            f"config.json has layers of model_type={json.dumps(layers)}; in a head that drafts are supported: "
            f"{', '.join(KINDS)}"
        )
    # In eagle_config, as SGLang counts (`set_eagle3_layers_to_capture`), it is the number of the layer before.
    said = own.pop(LAYERS, None) or [number + 1 for number in inside.get(LAYERS) or ()]
    own["draft_vocab_size"] = own.get("draft_vocab_size") or own.get("vocab_size")
    found = Streams(tuple(said))
    return {**own, "model_type": "eagle3", "layers_like": layers, "streams": found.count}, found


def _of_speculators(config: Mapping[str, Any]) -> dict[str, Any]:
    """Its config.json has that of the layers inside, without what those usually have."""
    inside = config.get("transformer_layer_config") or {}
    own = {**USUAL.get(inside.get("model_type", "llama"), {}), **inside, "tie_word_embeddings": False}
    beside = (
        "draft_vocab_size",
        "target_hidden_size",
        LAYERS,
        "norm_before_fc",
        "norm_output",
        "fc_norm",
        "quantization_config",
    )
    own |= {name: config[name] for name in beside if config.get(name) is not None}
    return own | {"norm_before_residual": config.get("norm_before_residual", True)}


def from_hf(options: Options, length: int) -> TransformerConfig:
    """What `plain` made."""
    options.aside("use_sliding_window", "num_lookahead_tokens", "has_no_defaults_at_init")
    norm, known, proposed = hf_decoder.rms(options), options("vocab_size"), options("draft_vocab_size")
    if not 0 < proposed <= known:
        raise ShardlmError(f"config.json has draft_vocab_size={proposed} and vocab_size={known}; it is at most that")
    attention = hf_decoder.attention(options, length, qk_norm=KINDS[options("layers_like")], norm=norm)
    windows = hf_decoder.sliding(options, lambda layer: False)
    first = "normed" if options("norm_before_residual", False) else "stream"
    reads = options("streams") * options("target_hidden_size", options("hidden_size"))
    goes_on = "normed" if options("norm_output", False) else "stream"
    whole, apart = bool(options("norm_before_fc", False)), bool(options("fc_norm", False))
    if whole and apart:
        raise ShardlmError(
            "config.json has norm_before_fc and fc_norm; a head has one norm of what it reads or the other"
        )
    eagle = EagleConfig(reads, proposed, options("streams") if apart else int(whole), goes_on)

    def block(layer: int) -> BlockConfig:
        beside = "none" if layer else first
        own = dataclasses.replace(attention, window=windows[layer], beside=beside)
        return BlockConfig(own, hf_decoder.mlp(options))

    return hf_decoder.decoder(options, block, norm, eagle=eagle)


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    norms = {} if block.beside == "none" else {"attention_norm": "hidden_norm", "beside_norm": "input_layernorm"}
    own = {"eagle.fc": Tensor("fc.weight", "D R -> R D"), "eagle.fc_norm.scale": Tensor("input_norm.weight")}
    if config.eagle.normed > 1:
        pieces = ("fc_norm.{piece}.weight", config.eagle.normed)
        own["eagle.fc_norms.scale"] = Tensor("fc_norm.weight", "(N R) -> N R", pieces=pieces)
    return standard(**norms) | own
