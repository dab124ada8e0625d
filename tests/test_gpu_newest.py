"""What XLA makes of decoding with the newest families' layers for NVIDIA GPUs, compiled without one: pools are only
written into, and kernels read them where they lie. test_gpu_serving.py has others."""

import collections
import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import pytest
from gpu_programs import MARKS
from test_gpu_serving import decoding

from shardlm.models import registry

pytestmark = MARKS

SIZES = {"vocab_size": 2048, "hidden_size": 512, "intermediate_size": 512, "rms_norm_eps": 1e-6}
LATENT = {"q_lora_rank": 512, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "v_head_dim": 128}
EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "minimax_m3": SIZES
    | {"model_type": "minimax_m3_vl_text", "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 4}
    | {"layer_types": ["full_attention", "minimax_m3_sparse"], "mlp_layer_types": ["dense"] * 2}
    | {"num_local_experts": 8, "num_experts_per_tok": 2, "dense_intermediate_size": 512},
    "glm5_next": SIZES
    | {"model_type": "glm5_next_text", "num_hidden_layers": 2, "num_attention_heads": 16, **LATENT, **EXPERTS}
    | {"layer_types": ["linear_attention", "indexed_attention"], "mlp_layer_types": ["dense"] * 2}
    | {"linear_num_heads": 8, "linear_head_dim": 128},
    "longcat_flash": SIZES
    | {"model_type": "longcat_flash", "num_layers": 1, "num_attention_heads": 16, "qk_rope_head_dim": 64, **LATENT}
    | {"n_routed_experts": 8, "zero_expert_num": 4, "moe_topk": 2, "expert_ffn_hidden_size": 256},
    "minimax": SIZES
    | {"model_type": "minimax", "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 4}
    | {"head_dim": 128, "num_local_experts": 8, "num_experts_per_tok": 2}
    | {"layer_types": ["linear_attention", "full_attention"]},
    "muse_glimmer": SIZES
    | {"model_type": "muse_glimmer_text", "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 4}
    | {"head_dim": 128, "layer_types": ["full_attention"] * 2, "layer_rope_theta": [10000.0, 0]},
}
# Of attention over pages and of the merge of its parts, for each kv head by itself in MiniMax M3's second layer; of
# states, and of what mixes streams.
KERNELS = {("minimax_m3", 1): 10, ("minimax_m3", 2): 6, ("glm5_next", 1): 7, ("longcat_flash", 1): 4}
KERNELS |= {("minimax", 1): 3, ("muse_glimmer", 1): 4}


@dataclasses.dataclass(frozen=True)
class Family:
    name: str

    def transformer(self):
        return registry.transformer(FAMILIES[self.name])


@pytest.mark.parametrize(("name", "tensor"), [(name, 1) for name in FAMILIES] + [("minimax_m3", 2)])
def test_the_newest_decode_where_pages_lie(name, tensor):
    compiled, state = decoding(tensor, Family(name), "h100")
    text = compiled.as_text()
    kernels = text.count('custom_call_target="__gpu$xla.gpu.triton"')
    assert kernels == KERNELS[name, tensor]
    own = sum(math.prod(a.shape) * a.dtype.itemsize for a in state.pages.values()) // tensor
    assert compiled.memory_analysis().alias_size_in_bytes >= own
    for name, pool in state.pages.items():
        if pool.shape[0] % 4097:
            continue  # memories of texts, in slots
        kind = {"int16": "s16", "bfloat16": "bf16", "float32": "f32"}[pool.dtype.name]
        made = collections.Counter(re.findall(rf" = {kind}\[{pool.shape[0]},[\d,]+\]\S* ([\w-]+)\(", text))
        assert set(made) <= {"scatter", "fusion", "parameter", "get-tuple-element", "bitcast"}, (name, made)
