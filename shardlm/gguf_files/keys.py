"""Tensors of a GGUF file by their names in Hugging Face's form, with what llama.cpp's converter
(https://github.com/ggml-org/llama.cpp/tree/master/conversion, gguf-py/gguf/tensor_mapping.py) did to each."""

import dataclasses
import re
from collections.abc import Iterator, Mapping

from shardlm.gguf_files import linear_attention, mamba
from shardlm.gguf_files.config import check_architecture
from shardlm.gguf_files.decoder import heads
from shardlm.gguf_files.forms import Place, halves
from shardlm.gguf_files.header import Block, Gguf
from shardlm.gguf_files.rotation import FREQUENCIES, LONG, SHORT

LAYER = "model.layers."
LAYERS = {"gpt2": "transformer.h.", **dict.fromkeys(mamba.NEMOTRON, "backbone.layers.")}
LESS_ONE = ("gemma", *linear_attention.ARCHITECTURES)
LEFT = (FREQUENCIES, LONG, SHORT)  # the configuration has them
PERMUTED = (
    "llama",
    "arcee",
    "mistral3",
    "granite",
    "granitemoe",
    "smollm3",
    "deepseek",
    *mamba.GRANITE,
    *mamba.NEMOTRON,
)
COMMON = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    **{f"attn_{part}_norm": f"self_attn.{part}_norm" for part in "qk"},
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}
EXPERTS = {"ffn_gate_inp": "mlp.gate"} | {
    f"ffn_{part}_exps": f"mlp.experts.{{expert}}.{part}_proj" for part in ("gate", "up", "down")
}
_BEFORE_AND_AFTER = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
_SHARED = {f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
_NUMBERED = {"ffn_gate_inp": "block_sparse_moe.gate"} | {
    f"ffn_{part}_exps": f"block_sparse_moe.experts.{{expert}}.{theirs}"
    for part, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
}
_GATED_SHARED = {f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")}
_GATED_SHARED |= {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"}
_GRANITE_ROUTER = {"ffn_gate_inp": "block_sparse_moe.router.layer"}
_CONVOLVING = {
    "token_embd_norm": "model.embedding_norm",
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "ffn_norm": "ffn_norm",
    **{f"attn_{part}_norm": f"self_attn.{part}_layernorm" for part in "qk"},
    **{f"ffn_{part}": f"feed_forward.{theirs}" for part, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2"))},
    **{f"shortconv.{part}": f"conv.{part}" for part in ("conv", "in_proj", "out_proj")},
}
_ITS_EXPERTS = {"ffn_gate_inp": "feed_forward.gate"} | {
    f"ffn_{part}_exps": f"feed_forward.experts.{{expert}}.{theirs}"
    for part, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
}
_AFTER = {"post_attention_norm": "post_attention_layernorm"}
OWN: dict[str, dict[str, str]] = {
    "llama": _NUMBERED,
    "minimax-m2": _NUMBERED,
    "qwen2moe": EXPERTS | _GATED_SHARED,
    "qwen3moe": EXPERTS,
    "qwen3next": EXPERTS | _GATED_SHARED | _AFTER,
    "qwen35": _AFTER,
    "qwen35moe": EXPERTS | _GATED_SHARED | _AFTER,
    "olmoe": EXPERTS,
    "granitemoe": _GRANITE_ROUTER,
    "granitehybrid": _GRANITE_ROUTER,
    **dict.fromkeys(mamba.NEMOTRON, mamba.NEMOTRON_NAMES),
    "glm4moe": EXPERTS | _SHARED | _AFTER,
    "dots1": EXPERTS | _SHARED,
    "ernie4_5-moe": EXPERTS | _SHARED,
    "seed_oss": _AFTER,
    "exaone4": {name: _BEFORE_AND_AFTER[name] for name in ("post_attention_norm", "post_ffw_norm")},
    "hunyuan-dense": {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
    "starcoder2": {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    "gemma2": _BEFORE_AND_AFTER,
    "gemma3": _BEFORE_AND_AFTER,
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "gpt2": {
        "token_embd": "transformer.wte",
        "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f",
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    },
    "olmo2": {name: _BEFORE_AND_AFTER[name] for name in ("post_attention_norm", "post_ffw_norm")},
    "glm4": {
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
        "ffn_up": "mlp.gate_up_proj",
    },
    "deepseek": EXPERTS | _SHARED,
    "deepseek2": EXPERTS | _SHARED | _LATENT,
    "gpt-oss": _AFTER | {"ffn_gate_inp": "mlp.router"},
    "lfm2": _CONVOLVING,
    "lfm2moe": _CONVOLVING | _ITS_EXPERTS,
}
WHOLE = {"attn_sinks.weight": "self_attn.sinks"}
BIASES = {  # of routers
    "minimax-m2": "block_sparse_moe.e_score_correction_bias",
    "ernie4_5-moe": "mlp.moe_statics.e_score_correction_bias",
    "lfm2moe": "feed_forward.expert_bias",
    "nemotron_h_moe": "mixer.gate.e_score_correction_bias",
}
# Hugging Face's have one row, and the converter leaves out dimensions of one, in some versions.
ONE_ROW = ("mlp.moe_statics.e_score_correction_bias", "mlp.shared_expert_gate")
ONE_CHANNEL = "conv.conv"  # and of convolutions the dimension of one in the middle


def places(gguf: Gguf) -> dict[str, Place]:
    """All tensors by their names in Hugging Face's form; one that the architecture has no name for keeps its own.
    Raises ShardlmError for another architecture."""
    architecture = check_architecture(gguf.metadata)
    names = COMMON | OWN.get(architecture, {})
    found: dict[str, Place] = {}
    for layer, own in _by_layer(_split(gguf, architecture, names)).items():
        before = "" if layer is None else f"{LAYERS.get(architecture, LAYER)}{layer}."
        if architecture == "gpt-oss":
            found |= {before + name: place for name, place in _fused_experts(own)}
        if architecture in ("granitemoe", *mamba.GRANITE):
            found |= {before + name: place for name, place in _granite_experts(own)}
        if architecture in linear_attention.ARCHITECTURES:
            found |= {before + name: place for name, place in linear_attention.memory(gguf, architecture, own)}
        if architecture in mamba.ARCHITECTURES:
            found |= {before + name: place for name, place in mamba.places(architecture, own)}
        if architecture == "deepseek2" and {"attn_k_b.weight", "attn_v_b.weight"} <= own.keys():
            parts = own.pop("attn_k_b.weight"), own.pop("attn_v_b.weight")
            found[f"{before}self_attn.kv_b_proj.weight"] = Place("kv_b", parts)
        for name, block in own.items():
            first = "" if layer is None else f"blk.{layer}."
            found |= {
                before + theirs if theirs else first + name: place
                for theirs, place in _one(gguf.metadata, architecture, names, name, block)
            }
    return _last_layers(found, gguf)


def _by_layer(tensors: Mapping[str, Block]) -> dict[int | None, dict[str, Block]]:
    """{layer, or None of what is in none: {name in it: tensor}}."""
    found: dict[int | None, dict[str, Block]] = {}
    for name, block in tensors.items():
        match = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
        layer, own = (int(match[1]), match[2]) if match else (None, name)
        sees = name.startswith(("v.", "mm."))  # Ollama has it in the same file
        if name not in LEFT and not sees and own != "attn_rot_embd.weight":
            found.setdefault(layer, {})[own] = block
    return found


def _one(
    metadata: Mapping[str, object], architecture: str, names: Mapping[str, str], name: str, block: Block
) -> Iterator[tuple[str, Place]]:
    """(name, "" where there is none; where it is) of what one tensor holds."""
    if name == "exp_probs_b.bias":
        theirs = BIASES.get(architecture, "mlp.gate.e_score_correction_bias")
        yield theirs, Place("plain", (_as_row(theirs, block),))
        return
    if name in WHOLE:
        yield WHOLE[name], Place("plain", (block,))
        return
    part, _, kind = name.rpartition(".")
    expert = re.fullmatch(r"(ffn_\w+)\.(\d+)", part)  # files of before tensors of all experts
    theirs = names.get(f"{expert[1]}_exps" if expert else part)
    if theirs is None or kind not in ("weight", "bias"):
        yield "", Place("plain", (block,))
    elif expert:
        yield f"{theirs.format(expert=expert[2])}.{kind}", Place("plain", (block,))
    elif "{expert}" in theirs:
        for i in range(block.shape[0]):
            yield f"{theirs.format(expert=i)}.{kind}", Place("plain", (block.item(i),))
    elif architecture in PERMUTED and part in ("attn_q", "attn_k"):
        size, left = divmod(block.shape[0], heads(metadata)[part == "attn_k"])
        yield f"{theirs}.{kind}", Place("plain", (block,), None if left or size % 2 else halves(size))
    elif architecture.startswith(LESS_ONE) and name.endswith("norm.weight"):
        yield f"{theirs}.{kind}", Place("less_one", (block,))
    elif architecture == "gpt2" and kind == "weight" and part in ("attn_qkv", "attn_output", "ffn_up", "ffn_down"):
        yield f"{theirs}.{kind}", Place("turned", (block,))
    else:
        yield f"{theirs}.{kind}", Place("plain", (_as_row(theirs, block),))


def _as_row(theirs: str, block: Block) -> Block:
    if theirs == ONE_CHANNEL:
        return dataclasses.replace(block, shape=(block.shape[0], 1, block.shape[-1]))
    return dataclasses.replace(block, shape=(1, *block.shape[-1:])) if theirs in ONE_ROW else block


def _split(gguf: Gguf, architecture: str, names: Mapping[str, str]) -> dict[str, Block]:
    """With what some converters fuse, and Hugging Face has apart, apart: rows of queries, keys and values, and of
    experts' gates and what they let through."""
    found = {}
    for name, block in gguf.tensors.items():
        match = re.fullmatch(r"(blk\.\d+\.)(attn_qkv|ffn_gate_up_exps)\.(weight|bias)", name)
        linear = match and f"{match[1]}ssm_out.weight" in gguf.tensors
        if not match or match[2] in names or linear:
            found[name] = block
        elif match[2] == "attn_qkv":
            queries, keys, size = heads(gguf.metadata)
            first = 0
            for part, count in (("q", queries), ("k", keys), ("v", keys)):
                whole = block.shape[0] == (queries + 2 * keys) * size
                found[f"{match[1]}attn_{part}.{match[3]}"] = block.rows(first * size, count * size) if whole else block
                first += count
        else:
            experts = [block.item(i) for i in range(block.shape[0])]
            half = experts[0].shape[0] // 2
            for i, expert in enumerate(experts):
                found[f"{match[1]}ffn_gate.{i}.{match[3]}"] = expert.rows(0, half)
                found[f"{match[1]}ffn_up.{i}.{match[3]}"] = expert.rows(half, half)
    return found


def _fused_experts(own: dict[str, Block]) -> Iterator[tuple[str, Place]]:
    """Of GPT-OSS: all experts in one tensor, gates and what they let through in turn. Takes them out."""
    for kind, name in (("weight", ""), ("bias", "_bias")):
        gate, up, down = (f"ffn_{part}_exps.{kind}" for part in ("gate", "up", "down"))
        if {gate, up} <= own.keys():
            yield f"mlp.experts.gate_up_proj{name}", Place("gate_up", (own.pop(gate), own.pop(up)))
        if down in own:
            yield f"mlp.experts.down_proj{name}", Place("turned" if kind == "weight" else "plain", (own.pop(down),))


def _granite_experts(own: dict[str, Block]) -> Iterator[tuple[str, Place]]:
    """All experts in one tensor, [E, gate and what it lets through, D]. Takes them out."""
    if {"ffn_gate_exps.weight", "ffn_up_exps.weight"} <= own.keys():
        both = own.pop("ffn_gate_exps.weight"), own.pop("ffn_up_exps.weight")
        yield "block_sparse_moe.input_linear.weight", Place("stacked", both)
    if "ffn_down_exps.weight" in own:
        yield "block_sparse_moe.output_linear.weight", Place("plain", (own.pop("ffn_down_exps.weight"),))


def _last_layers(found: dict[str, Place], gguf: Gguf) -> dict[str, Place]:
    """Without the layers that predict further tokens, which config.json does not have either."""
    architecture = gguf.metadata["general.architecture"]
    further = gguf.metadata.get(f"{architecture}.nextn_predict_layers", 0)
    if not further:
        return found
    layers = gguf.metadata[f"{architecture}.block_count"]
    first = LAYERS.get(architecture, LAYER)
    left = tuple(f"{first}{layer}." for layer in range(layers - further, layers))
    left += tuple(f"blk.{layer}." for layer in range(layers - further, layers))
    return {name: place for name, place in found.items() if not name.startswith(left)}
