"""Writes adapters/: what PEFT saves on references/ (make_references.py), and the logits it computes with them.

python tests/hf/make_adapters.py tests/hf  # needs torch, transformers and peft; the files are part of the repository
"""

import pathlib
import sys

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES = {
    "llama": {"r": 4, "lora_alpha": 8, "target_modules": ALL},
    "llama_tied": {"r": 2, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "layers_to_transform": [0, 2]},
    "phi3": {"r": 3, "lora_alpha": 6, "target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]},
    "gpt2": {"r": 4, "lora_alpha": 4, "target_modules": ["c_attn", "c_fc", "c_proj"], "fan_in_fan_out": True},
    "gemma4": {"r": 4, "lora_alpha": 2, "target_modules": ALL},
    "glm4": {"r": 4, "lora_alpha": 8, "target_modules": [*ALL[:4], "gate_up_proj"]},
    "qwen3_5": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": [*ALL, "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"],
    },
    "qwen3_next": {"r": 4, "lora_alpha": 8, "target_modules": [*ALL[:3], "in_proj_qkvz", "in_proj_ba", "out_proj"]},
    "lfm2": {"r": 4, "lora_alpha": 8, "target_modules": [*ALL[:3], "in_proj", "out_proj", "w1", "w2", "w3"]},
    "nemotron_h": {"r": 4, "lora_alpha": 8, "target_modules": [*ALL[:4], "in_proj"]},  # PEFT has no others
    # Its queries, keys and values are in groups in one projection.
    "falcon_new": {"r": 4, "lora_alpha": 8, "target_modules": ["query_key_value", "dense", "dense_h_to_4h"]},
    "deepseek_v2": {
        "r": 4,
        "lora_alpha": 8,
        "use_rslora": True,
        "target_modules": ["q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
        "rank_pattern": {"kv_b_proj": 2},
        "alpha_pattern": {"o_proj": 3},
    },
}


def make(name: str, root: pathlib.Path) -> None:
    torch.manual_seed(0)
    reference, folder = root / "references" / name, root / "adapters" / name
    model = transformers.AutoModelForCausalLM.from_pretrained(
        reference, dtype=torch.float32, attn_implementation="eager"
    )
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **CASES[name])
    adapted = peft.get_peft_model(model, config)
    adapted.save_pretrained(folder)
    tokens = load_file(reference / "expected.safetensors.reference")["tokens"]
    logits = adapted.eval()(tokens.long(), use_cache=False).logits
    save_file({"logits": logits.detach()}, str(folder / "expected.safetensors.reference"))
    (folder / "README.md").unlink(missing_ok=True)


if __name__ == "__main__":
    for name in sys.argv[2:] or CASES:
        make(name, pathlib.Path(sys.argv[1]))
        print(name)
