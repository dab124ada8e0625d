"""Options of LLM of wrong types and beyond all bounds: each is refused by its name (serve/option_types.py)."""

import json
import math

import pytest
from engines import CONFIG, TOKENIZER

import shardlm
from shardlm.errors import ShardlmError
from shardlm.mesh import MeshSpec
from shardlm.serve.adapter_table import LoRARequest
from shardlm.serve.engine_config import EngineConfig
from shardlm.serve.options import config_of

METHOD = {"method": "ngram", "num_speculative_tokens": 2}
WRONG_TYPES = [
    *((name, value, "an axis size is an integer") for name in ("tensor", "data") for value in ("2", 2.0, True, None)),
    *(("mesh", value, "must be a MeshSpec") for value in ("tensor=2", {"tensor": 2}, 3)),
    *(("block_size", value, "block_size=.* must be") for value in (-1, "16", 16.0, True, 2**40)),
    *(("max_num_seqs", value, "max_num_seqs=.* must be") for value in (-1, math.nan, [16], 2**31)),
    *(("enable_lora", value, "enable_lora=.* must be True or False") for value in ("false", 0, [])),
    *(("enable_prefix_caching", value, "must be True or False") for value in ("no", 1)),
    *(("gpu_memory_utilization", value, "must be a number") for value in ("0.9", True, [0.9])),
    *(("gpu_memory_utilization", value, "is a share above") for value in (0, 2, math.nan, 0.05)),
    *(("kv_cache_dtype", value, "kv_cache_dtype=") for value in ("fp4", "", 3, ["fp8"])),
    *((name, [1], f"{name}=.* must be a text") for name in ("dtype", "quantization", "prefill_attention")),
    *(("max_loras", value, "max_loras=.* must be an integer") for value in ("2", 1.5, True)),
    *(("lora_modules", value, "must be a mapping") for value in (["a=b"], "a=b", {"a": 3}, {3: "b"}, {"": "b"})),
    *(("seed", value, "seed=.* must be an integer") for value in ("1", 1.5, [1], True)),
    *(("model", value, "model=.* must be a folder") for value in (3, b"x", {})),
    ("speculative_config", METHOD | {"num_speculative_tokens": 10**9}, "must be below max_model_len=64"),
    ("speculative_config", METHOD | {"prompt_lookup_max": 64}, "prompt_lookup_max=64 must be below"),
    ("speculative_config", [METHOD], "must be a mapping"),
]


def test_options_of_wrong_types_are_refused_before_weights_are_read(tmp_path, monkeypatch):
    config = {**CONFIG.to_hf(), "max_position_embeddings": 64, "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    TOKENIZER.save(tmp_path / "tokenizer.json")
    monkeypatch.setattr("shardlm.serve.build.load", None)
    for name, value, message in WRONG_TYPES:
        given = f"{name}_parallel_size" if name in ("tensor", "data") else name
        with pytest.raises(ShardlmError, match=message):
            shardlm.LLM(**({"model": tmp_path} | {given: value}))
    own = {"block_size": None, "enable_prefix_caching": None, "gpu_memory_utilization": None}
    assert config_of(MeshSpec(), None, own) == EngineConfig()  # as in vLLM, where None is the default
    for request in ({"lora_name": 3}, {"lora_name": ""}, {"lora_name": "a", "lora_path": 3}):
        with pytest.raises(ShardlmError, match="LoRARequest"):
            LoRARequest(**request)
