"""GGUF files of models with layers of Mamba 2: Granite 4 and Nemotron-H and 3. What their converters
(https://github.com/ggml-org/llama.cpp/blob/master/conversion/granite.py, nemotron.py, mamba.py) made of config.json and
of the layers' tensors, undone."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from shardlm.gguf_files.decoder import decoder, of_some_layers, rows
from shardlm.gguf_files.forms import Place
from shardlm.gguf_files.header import Block, Gguf
from shardlm.gguf_files.mixtures import granite_factors
from shardlm.gguf_files.told import Told

GRANITE, NEMOTRON = ("granitehybrid",), ("nemotron_h", "nemotron_h_moe")
ARCHITECTURES = GRANITE + NEMOTRON
NEMOTRON_NAMES = {
    "token_embd": "backbone.embeddings",
    "output_norm": "backbone.norm_f",
    "attn_norm": "norm",
    "attn_output": "mixer.o_proj",
    **{f"attn_{part}": f"mixer.{part}_proj" for part in "qkv"},
    **{f"ffn_{part}": f"mixer.{part}_proj" for part in ("up", "down")},
    **{f"ffn_{part}_exps": f"mixer.experts.{{expert}}.{part}_proj" for part in ("up", "down")},
    **{f"ffn_{part}_shexp": f"mixer.shared_experts.{part}_proj" for part in ("up", "down")},
    "ffn_gate_inp": "mixer.gate",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}


def granite_hybrid(told: Told, gguf: Gguf) -> tuple[str, dict[str, Any]]:
    """Layers that attend have a rotation where the file says that it was trained with one."""
    memory, experts = _memory(told, gguf), told.count("expert_count", 0)
    told.only("expert_gating_func", 1)
    told.only("expert_weights_norm", True)
    told.only("expert_weights_scale", 1.0, 0.0)
    found = decoder(told, gguf, "granitemoehybrid") | granite_factors(told)
    rotated = told("rope.scaling.finetuned", False)
    return "GraniteMoeHybridForCausalLM", found | {
        **{f"mamba_{name}": value for name, value in memory.items()},
        "mamba_expand": memory["n_heads"] * memory["d_head"] / found["hidden_size"],
        "position_embedding_type": "rope" if rotated else "nope",
        "layer_types": ["linear_attention" if _remembers(gguf, n) else "full_attention" for n in _layers(found)],
        "shared_intermediate_size": told.count("expert_shared_feed_forward_length"),
        "num_local_experts": experts,
        "num_experts_per_tok": told.count("expert_used_count", 0),
    }


def nemotron(told: Told, gguf: Gguf) -> tuple[str, dict[str, Any]]:
    """No layer has a rotation. Feed-forward layers are layers of their own; those that predict further tokens are left
    out."""
    memory = _memory(told, gguf)
    of_some_layers(told, "feed_forward_length")
    found = decoder(told, gguf, "nemotron_h")
    kinds = [_kind(gguf, layer) for layer in _layers(found)]
    if "mlp" in kinds:
        found["intermediate_size"] = rows(gguf, f"blk.{kinds.index('mlp')}.ffn_up.weight")
    for name in ("rope_theta", "rope_scaling", "partial_rotary_factor", "hidden_act"):
        found.pop(name, None)
    eps = found.pop("rms_norm_eps")
    return "NemotronHForCausalLM", found | (_routed(told) if told.count("expert_count", 0) else {}) | {
        "layer_norm_epsilon": eps,
        "mlp_hidden_act": "relu2",
        "layers_block_type": kinds,
        "mamba_num_heads": memory["n_heads"],
        "mamba_head_dim": memory["d_head"],
        "n_groups": memory["n_groups"],
        "ssm_state_size": memory["d_state"],
        "conv_kernel": memory["d_conv"],
        "use_conv_bias": memory["conv_bias"],
    }


def _layers(found: dict[str, Any]) -> range:
    return range(found["num_hidden_layers"])


def _remembers(gguf: Gguf, layer: int) -> bool:
    return f"blk.{layer}.ssm_in.weight" in gguf.tensors


def _kind(gguf: Gguf, layer: int) -> str:
    """Of a layer of Nemotron's, by its tensors."""
    if _remembers(gguf, layer):
        return "linear_attention"
    if f"blk.{layer}.attn_q.weight" in gguf.tensors:
        return "full_attention"
    return "moe" if f"blk.{layer}.ffn_gate_inp.weight" in gguf.tensors else "mlp"


def _memory(told: Told, gguf: Gguf) -> dict[str, Any]:
    """By the names of Bamba's options."""
    heads = told.count("ssm.time_step_rank")
    width, left = divmod(told.count("ssm.inner_size"), heads)
    if left:
        raise told.refused("ssm.inner_size", f"ssm.time_step_rank={heads} heads do not divide it")
    return {
        "n_heads": heads,
        "d_head": width,
        "n_groups": told.count("ssm.group_count"),
        "d_state": told.count("ssm.state_size"),
        "d_conv": told.count("ssm.conv_kernel"),
        "conv_bias": any(name.endswith("ssm_conv1d.bias") for name in gguf.tensors),
    }


def _routed(told: Told) -> dict[str, Any]:
    """Experts chosen as DeepSeek V3's, which may read a latent."""
    told.only("expert_gating_func", 2)
    told.only("expert_shared_count", 1)
    return {
        "n_routed_experts": told.count("expert_count"),
        "num_experts_per_tok": told.count("expert_used_count"),
        "moe_intermediate_size": told.count("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": told.count("expert_shared_feed_forward_length"),
        "moe_latent_size": told.count("moe_latent_size", 0) or None,
        "n_group": told.count("expert_group_count", 0) or 1,
        "topk_group": told.count("expert_group_used_count", 0) or 1,
        "norm_topk_prob": bool(told("expert_weights_norm", True)),
        "routed_scaling_factor": told.number("expert_weights_scale", 1.0) or 1.0,
    }


def places(architecture: str, own: dict[str, Block]) -> Iterator[tuple[str, Place]]:
    """(name, where it is) of a layer's tensors that are not as others have them, which are taken out of `own`."""
    if architecture in GRANITE:
        yield from _shared(own)
    inside = "mamba." if architecture in GRANITE else "mixer."
    for name, theirs in {"in.weight": "in_proj.weight", "conv1d.bias": "conv1d.bias", "dt.bias": "dt_bias"}.items():
        if (block := own.pop(f"ssm_{name}", None)) is not None:
            yield inside + theirs, Place("plain", (block,))
    if (block := own.pop("ssm_out.weight", None)) is not None:
        yield f"{inside}out_proj.weight", Place("plain", (block,))
    if (taps := own.pop("ssm_conv1d.weight", None)) is not None:
        shape = (taps.shape[0], 1, taps.shape[-1])
        yield f"{inside}conv1d.weight", Place("plain", (dataclasses.replace(taps, shape=shape),))
    for name, theirs in {"a": "A_log", "d": "D", "norm.weight": "norm.weight"}.items():
        if (block := own.pop(f"ssm_{name}", None)) is not None:  # which the converter gave a dimension more
            flat = dataclasses.replace(block, shape=(math.prod(block.shape),))
            yield inside + theirs, Place("rate" if name == "a" else "plain", (flat,))


def _shared(own: dict[str, Block]) -> Iterator[tuple[str, Place]]:
    """Of Granite's, the layer that all tokens go through: gate and what it lets through in one, in that order."""
    for kind in ("", "_shexp"):
        gate, up, down = (f"ffn_{part}{kind}.weight" for part in ("gate", "up", "down"))
        if {gate, up} <= own.keys():
            both = own.pop(gate), own.pop(up)
            parts = 1, both[0].shape[0], both[1].shape[0]
            yield "shared_mlp.input_linear.weight", Place("by_groups", both, groups=parts)
        if down in own:
            yield "shared_mlp.output_linear.weight", Place("plain", (own.pop(down),))
