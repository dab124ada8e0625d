"""GGUF files for tests, written with llama.cpp's own package from Hugging Face folders as its converter does
(https://github.com/ggml-org/llama.cpp/tree/master/conversion)."""

import math
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import gguf
import numpy as np
from gguf_parameters import ARCHITECTURES, LINEAR, MAMBA, PERMUTED, parameters

from shardlm.gguf_files.config import READERS
from shardlm.hf_files import Folder, Planned, write_folder
from shardlm.hf_quantised import dequantised

Kinds = Callable[[str, tuple[int, ...]], str]


def convert(folder: pathlib.Path, file: pathlib.Path, kinds: Kinds | str = "F32", **changes: Any) -> pathlib.Path:
    """Writes the model of a Hugging Face folder; `kinds` says of a tensor, by its name and shape, what it is held in
    (one-dimensional ones are F32, as ever), `changes` replace metadata."""
    opened = Folder.open(folder)
    config = dict(opened.config)
    architecture = ARCHITECTURES.get(config["model_type"], config["model_type"])
    if architecture == "nemotron_h_moe" and "moe" not in config["layers_block_type"]:
        architecture = "nemotron_h"
    tensors = {
        name: stored.read(...).astype(np.float32) for name, stored in dequantised(opened.tensors, config).items()
    }
    writer = gguf.GGUFWriter(file, architecture)
    metadata = {**parameters(config, architecture), **vocabulary(config), **changes}
    for key, value in metadata.items():
        add(writer, key, value)
    for name, a in converted(tensors, config, architecture):
        write_tensor(writer, name, a, kinds if isinstance(kinds, str) else kinds(name, a.shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    kinds[type(value)](key, value) if type(value) in kinds else writer.add_array(key, value)


def write_tensor(writer: gguf.GGUFWriter, name: str, a: np.ndarray, kind: str) -> None:
    plain = a.ndim == 1 or name.endswith("_norm.weight") or "ffn_gate_inp" in name or not name.endswith(".weight")
    kind = gguf.GGMLQuantizationType["F32" if plain or name.startswith("position_embd") else kind]
    if kind.name in ("Q4_K", "Q5_K", "Q6_K", "Q2_K", "Q3_K"):
        data = k_blocks(a, kind)
    else:
        data = gguf.quants.quantize(a, kind)
    writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=kind)


def k_blocks(a: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Any blocks of such a kind: the package reads them and does not make them. The numbers that they stand for are of
    the size of `a`."""
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(abs(hash(a.shape)) % 1000)
    blocks = rng.integers(0, 256, (*a.shape[:-1], a.shape[-1] // numbers, size), dtype=np.uint8)
    largest = {"Q4_K": 63 * 15, "Q5_K": 63 * 31, "Q6_K": 127 * 31, "Q2_K": 15 * 3, "Q3_K": 31 * 4}[kind.name]
    for first in {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q2_K": (80, 82), "Q3_K": (108,)}[kind.name]:
        half = rng.uniform(0.5, 1, blocks.shape[:-1]) * np.abs(a).max() / largest
        blocks[..., first : first + 2] = half.astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(*a.shape[:-1], -1)


def vocabulary(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of as many tokens as the model has: three marks, a merge, and bytes as GPT-2's vocabulary writes them."""
    size = config["vocab_size"]
    bytes_ = [chr(n) for n in (266, 288, *range(33, 127), *range(161, 173), *range(174, 256))]
    tokens = ["<pad>", "<s>", "</s>", "!!", *bytes_, *(f"<{n}>" for n in range(size))][:size]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (size - 3),
        "tokenizer.ggml.merges": ["! !"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
    }


def converted(
    tensors: Mapping[str, np.ndarray], config: Mapping[str, Any], arch: str
) -> Iterator[tuple[str, np.ndarray]]:
    """modify_tensors of the architectures."""
    layers = config.get("num_hidden_layers") or config.get("n_layer") or len(config["layers_block_type"])
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(kind, layers)
    heads, keys = config.get("num_attention_heads"), config.get("num_key_value_heads")
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, a in {**tensors, **_extra(config)}.items():
        of_expert = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name)
        if of_expert:
            experts.setdefault(f"{of_expert[1]}.{of_expert[3]}", {})[int(of_expert[2])] = a
            continue
        if arch in PERMUTED and (part := re.search(r"\.([qk])_proj\.(weight|bias)$", name)):
            a = permuted(a, heads if part[1] == "q" else keys)
        if "conv.conv" in name:  # LFM2's
            a = a.squeeze(1)
        if arch in MAMBA:
            name, a = _of_mamba(name, a, config)
        if arch in LINEAR:
            name, a = _of_memory(name, a, config, tiled=arch != "qwen3next")
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            a = a + 1
        if arch == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
            a = a.T
        for own, part in _split(name, a, config):
            yield _mapped(names, own), np.ascontiguousarray(part)
    for name, of_all in experts.items():
        stacked = np.stack([of_all[i] for i in range(len(of_all))])
        where = name
        if arch == "llama":
            where = re.sub(r"model\.layers\.(\d+)\.block_sparse_moe", r"layers.\1.feed_forward", name)
        if arch == "lfm2moe":
            where = name.removeprefix("model.")
        if arch == "nemotron_h_moe":
            where = re.sub(r"backbone\.layers\.(\d+)\.mixer", r"model.layers.\1.mlp", name)
        yield _mapped(names, f"{where}.weight"), stacked


def _of_memory(name: str, a: np.ndarray, config: Mapping[str, Any], tiled: bool) -> tuple[str, np.ndarray]:
    """Of Qwen3NextModel and _LinearAttentionVReorderBase of conversion/qwen.py."""
    K, V, size = (config[f"linear_{part}"] for part in ("num_key_heads", "num_value_heads", "value_head_dim"))
    first = 2 * K * config["linear_key_head_dim"]

    def tile(a: np.ndarray, size: int) -> np.ndarray:
        return a.reshape(K, V // K, size, -1).swapaxes(0, 1).reshape(a.shape)

    if tiled and ".linear_attn." in name:
        if ".in_proj_qkv." in name or ".conv1d" in name:
            a = np.concatenate([a[:first], tile(a[first:], size)])
        elif ".in_proj_z." in name:
            a = tile(a, size)
        elif ".out_proj." in name:
            a = tile(a.T.copy(), size).T
        elif not name.endswith("norm.weight"):
            a = tile(a, 1)
    if name.endswith(".A_log"):
        a = -np.exp(a)
    elif name.endswith(".dt_bias"):
        name = name.replace(".dt_bias", ".dt_proj.bias")
    elif "conv1d" in name:
        a = a.squeeze()
    elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        a = a + 1
    return name, a


def _of_mamba(name: str, a: np.ndarray, config: Mapping[str, Any]) -> tuple[str, np.ndarray]:
    """Mamba2Model's."""
    groups = config.get("mamba_n_groups") or config.get("n_groups")
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        a = a.reshape(groups, -1)
    elif name.endswith(".conv1d.weight"):
        a = a.squeeze(1)
    elif name.endswith(".D"):
        a = a[:, None]
    elif name.endswith(".A_log"):
        a = -np.exp(a)[:, None]
    elif name.endswith(".dt_bias"):
        name = name.replace(".dt_bias", ".dt_proj.bias")
    return name, a


def permuted(a: np.ndarray, heads: int) -> np.ndarray:
    """LlamaModel.permute of conversion/llama.py."""
    return a.reshape(heads, 2, a.shape[0] // heads // 2, *a.shape[1:]).swapaxes(1, 2).reshape(a.shape)


def _mapped(names: Any, name: str) -> str:
    if name.startswith(("rope_", "blk.")):
        return name
    if name.endswith(".expert_bias"):
        name += ".bias"
    found = names.get_name(name.replace("e_score_correction_bias", "e_score_correction.bias"), (".weight", ".bias"))
    assert found, name
    return found


def _split(name: str, a: np.ndarray, config: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """DeepseekV2Model's and GptOssModel's."""
    if name.endswith("kv_b_proj.weight"):
        nope = config["qk_nope_head_dim"]
        heads = a.reshape(config["num_attention_heads"], nope + config["v_head_dim"], -1)
        yield name.replace("kv_b_proj", "k_b_proj"), heads[:, :nope].swapaxes(1, 2)
        yield name.replace("kv_b_proj", "v_b_proj"), heads[:, nope:]
    elif name.endswith("in_proj_qkvz.weight"):
        K, size = config["linear_num_key_heads"], config["linear_key_head_dim"]
        of_values = config["linear_num_value_heads"] // K * config["linear_value_head_dim"]
        parts = np.split(a.reshape(K, -1, a.shape[1]), np.cumsum([size, size, of_values]), axis=1)
        q, k, v, z = (part.reshape(-1, a.shape[1]) for part in parts)
        layer = name.split(".")[2]
        yield f"blk.{layer}.attn_qkv.weight", np.concatenate([q, k, v])
        yield f"blk.{layer}.attn_gate.weight", z
    elif name.endswith("block_sparse_moe.input_linear.weight"):
        layer = name.split(".")[2]
        for part, half in zip(("gate", "up"), np.split(a, 2, axis=1), strict=True):
            yield f"blk.{layer}.ffn_{part}_exps.weight", half
    elif "shared_mlp." in name:
        layer, kind = name.split(".")[2], "_shexp" if config["num_local_experts"] else ""
        parts = {"gate": a[: len(a) // 2], "up": a[len(a) // 2 :]} if "input_linear" in name else {"down": a}
        for part, own in parts.items():
            yield f"blk.{layer}.ffn_{part}{kind}.weight", own
    elif name.endswith("sinks"):
        yield f"{name}.weight", a
    elif ".experts.gate_up_proj" in name:
        kind = "bias" if name.endswith("_bias") else "weight"
        a = a.swapaxes(-1, -2) if kind == "weight" else a
        for first, part in enumerate(("gate", "up")):
            own = re.sub(r"gate_up_proj(_bias)?", f"{part}_proj.{kind}", name)
            yield own, a[:, first::2]
    elif re.search(r"\.experts\.down_proj(_bias)?$", name):
        bias = name.endswith("_bias")
        yield (
            name.replace("down_proj_bias", "down_proj.bias") if bias else f"{name}.weight",
            (a if bias else a.swapaxes(-1, -2)),
        )
    else:
        yield name, a


def _extra(config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """generate_extra_tensors: what a stretched rotation divides frequencies by."""
    rope = config.get("rope_parameters") or {}
    if rope.get("long_factor"):
        factors = {"long": rope["long_factor"], "short": rope["short_factor"]}
        return {f"rope_factors_{name}.weight": np.array(value, np.float32) for name, value in factors.items()}
    if rope.get("rope_type") != "llama3":
        return {}
    dim, base, found = config["head_dim"], rope["rope_theta"], []
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    length = rope["original_max_position_embeddings"]
    for i in range(0, dim, 2):
        wave = 2 * math.pi * base ** (i / dim)
        smooth = (length / wave - low) / (high - low)
        middle = 1 / ((1 - smooth) / factor + smooth)
        found.append(1.0 if wave < length / high else factor if wave > length / low else middle)
    return {"rope_freqs.weight": np.array(found, np.float32)}


# Of the references, what their files in GGUF cannot say, and what llama.cpp has instead.
AS_TOLD: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False, "layer_types": None},
    "smollm3": {"no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1]},
    "gemma2": {"query_pre_attn_scalar": 12},
    "gemma3": {"query_pre_attn_scalar": 12, "sliding_window_pattern": 6, "layer_types": ["sliding_attention"] * 3},
    "qwen3_moe": {"mlp_only_layers": [], "num_hidden_layers": 2},
    "qwen2_moe": {"mlp_only_layers": [], "use_sliding_window": False},
    "qwen3_next": {"mlp_only_layers": []},
    "cohere2": {"layer_types": ["sliding_attention"] * 3},
    "starcoder2": {"sliding_window": None},
    "dots1": {"sliding_window": None, "layer_types": None},
    "lfm2_moe": {"routed_scaling_factor": 1.0},
    "granitemoehybrid_moe": {"time_step_limit": [0.0, {"__float__": "Infinity"}]},
}
DENSE = {"qwen2_moe": (0, 1), "qwen3_next": (1, 0)}
REFERENCES = pathlib.Path(__file__).parent / "hf" / "references"


def known() -> list[str]:
    """The references whose architecture is read of such files too."""
    kinds = {path.name: Folder.open(path).config["model_type"] for path in sorted(REFERENCES.iterdir())}
    return [name for name, kind in kinds.items() if ARCHITECTURES.get(kind, kind) in READERS]


def as_told(name: str, path: pathlib.Path) -> pathlib.Path:
    """A reference's folder with a configuration that a file in GGUF can say, and its weights in float32."""
    folder = Folder.open(REFERENCES / name)
    config = {**folder.config, **AS_TOLD.get(name, {})}
    if name == "ministral3":
        config["rope_parameters"] = {**config["rope_parameters"], "mscale": 1.0, "mscale_all_dim": 1.0}
    if name == "deepseek_v3":
        config["rope_parameters"] = {**config["rope_parameters"], "mscale": 1.0}
    arrays = {own: stored.read(...).astype(np.float32) for own, stored in folder.tensors.items()}
    if name == "qwen3_moe":  # the dense layer, which llama.cpp does not have, left out
        arrays = {own.replace("layers.2.", "layers.1."): a for own, a in arrays.items() if ".layers.1." not in own}
    if name in DENSE:  # a dense layer, which llama.cpp does not have, with the experts of another
        dense, other = DENSE[name]
        arrays = {own: a for own, a in arrays.items() if f".layers.{dense}.mlp." not in own}
        beside = {own: a for own, a in arrays.items() if f".layers.{other}.mlp." in own}
        arrays |= {own.replace(f".{other}.mlp.", f".{dense}.mlp."): a for own, a in beside.items()}
    write_folder(path, [Planned(own, a.dtype, a.shape, lambda a=a: a) for own, a in arrays.items()], config)
    return path


def wide(path: pathlib.Path, layers: int = 2, width: int = 256, **options: Any) -> pathlib.Path:
    """A Llama whose rows are as long as llama.cpp's larger blocks, as a Hugging Face folder in float32."""
    config = {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": width // 4,
        "vocab_size": 96,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "dtype": "float32",
        **options,
    }
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens": (96, width), "lm_head": (96, width), "model.norm": (width,)}
    for layer in range(layers):
        own = {
            **dict.fromkeys(("self_attn.q_proj", "self_attn.o_proj"), (width, width)),
            **dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (width // 2, width)),
            **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (2 * width, width)),
            "mlp.down_proj": (width, 2 * width),
            **dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (width,)),
        }
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
    arrays = {}
    for name, shape in shapes.items():
        a = rng.normal(0, shape[-1] ** -0.5 if len(shape) > 1 else 0.2, shape) + (len(shape) == 1)
        arrays[f"{name}.weight"] = a.astype(np.float32)
    write_folder(path, [Planned(own, a.dtype, a.shape, lambda a=a: a) for own, a in arrays.items()], config)
    return path
