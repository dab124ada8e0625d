"""The Llama of configs/bench_768x12.py with random weights, twice: as a Hugging Face folder for `launch.serve`, and as
the same float32 numbers in GGUF for llama.cpp; and files of its kinds of few bits, which both serve. Needs gguf (pip
install gguf).

python benchmarks/peers/llama_gguf.py --output=runs/served      # runs/served/hf, model.gguf, model-q8_0.gguf, ...
"""

import argparse
import functools
import json
import pathlib

import gguf
import jax
import numpy as np

from shardlm import hf_files, weights
from shardlm.config import resolve
from shardlm.data.standard_library import files
from shardlm.layers.param import Execution
from shardlm.mesh import MeshSpec
from shardlm.models import registry
from shardlm.rules import Rules
from shardlm.state import ModelDef
from shardlm.tokenizer import train_bpe

ROOT = pathlib.Path(__file__).parents[2]
LONGEST = 4096
FILE_TYPES = {"f32": "ALL_F32", "q8_0": "MOSTLY_Q8_0", "q4_0": "MOSTLY_Q4_0"}
NORMAL, CONTROL = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
LAYER = {  # GGUF's names of a layer's tensors
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def write_hf(folder: pathlib.Path) -> None:
    """Random weights, and a tokenizer of the standard library's text with as many tokens as the model has."""
    shape = resolve(str(ROOT / "configs/bench_768x12.py"), []).config.model
    with jax.set_mesh(MeshSpec().build(jax.devices()[:1])):
        model = ModelDef.make(shape.transformer(), Execution(Rules.make("zero3", MeshSpec())))
        params = jax.jit(lambda seed: model.init(jax.random.key(seed)))(0)
    tokenizer = train_bpe((file.read_text(errors="replace") for file in files("stdlib:train")), shape.vocab_size)
    end = tokenizer.end_of_document_id
    config = {**shape.to_hf(), "max_position_embeddings": LONGEST, "eos_token_id": end, "dtype": "float32"}
    named = functools.partial(registry.names, config, model.config)
    hf_files.write_folder(folder, weights.planned(model.config, params, named, np.dtype("float32")), config)
    tokenizer.save(folder / "tokenizer.json")


def write_gguf(folder: pathlib.Path, output: pathlib.Path, kind: str) -> None:
    """Matrices in that kind of numbers, norms in float32."""
    as_type = gguf.GGMLQuantizationType[kind.upper()]

    def add(name: str, a: np.ndarray) -> None:
        held = gguf.quants.quantize(a, as_type) if a.ndim > 1 and kind != "f32" else a
        writer.add_tensor(name, held, raw_dtype=as_type if a.ndim > 1 else None)

    opened = hf_files.Folder.open(folder)
    config = opened.config
    writer = gguf.GGUFWriter(output, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[kind]])
    _add_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text()), config)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for ours, theirs in TOP.items():
        add(f"{ours}.weight", opened.tensors[f"{theirs}.weight"].read(...))
    for layer in range(config["num_hidden_layers"]):
        for ours, theirs in LAYER.items():
            a = opened.tensors[f"model.layers.{layer}.{theirs}.weight"].read(...)
            if ours in heads:  # llama.cpp rotates neighbours, Hugging Face halves of a head
                a = a.reshape(heads[ours], 2, -1, a.shape[-1]).swapaxes(1, 2).reshape(a.shape)
            add(f"blk.{layer}.{ours}.weight", np.ascontiguousarray(a))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict, config: dict) -> None:
    ids = {i: token for token, i in tokenizer["model"]["vocab"].items()}
    special = {entry["id"]: entry["content"] for entry in tokenizer["added_tokens"]}
    count = config["vocab_size"]
    tokens = [special.get(i) or ids.get(i) or f"<unused{i}>" for i in range(count)]
    merges = [one if isinstance(one, str) else " ".join(one) for one in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if i in special else NORMAL for i in range(count)])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=pathlib.Path, required=True)
    home = parser.parse_args().output
    if not (home / "hf").exists():
        write_hf(home / "hf")
    for kind in FILE_TYPES:
        write_gguf(home / "hf", home / ("model.gguf" if kind == "f32" else f"model-{kind}.gguf"), kind)


if __name__ == "__main__":
    main()
