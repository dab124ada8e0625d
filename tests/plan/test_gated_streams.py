"""Serving plans of models with gated streams, chosen blocks of tokens and n-grams (Qwen4-Exp), by hand."""

import functools

import pytest

from shardlm.hardware import GPUS
from shardlm.layers.attention import AttentionConfig
from shardlm.mesh import MeshSpec
from shardlm.models import registry
from shardlm.plan.cluster import Cluster
from shardlm.plan.serving.case import ServedModel, ServingCase
from shardlm.plan.serving.memory import serving_memory
from shardlm.plan.serving.ops import Pass, layer_work
from shardlm.plan.serving.time import Speed
from shardlm.plan.serving.weights import InUse, weights_of
from shardlm.serve.engine_config import EngineConfig
from shardlm.serving_rules import serving_rules

OPTIONS = {
    "model_type": "qwen4_exp_text",
    "vocab_size": 32_768,
    "hidden_size": 2048,
    "hidden_act": "silu",
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "ple_layer_ids": [2],
    "ngram_vocab_size_base": 200_000,
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 1024,
    "indexer_compress_ratio": 64,
}


@functools.cache
def shape():
    return registry.transformer(OPTIONS)


def served(count: int = 1) -> ServingCase:
    model = ServedModel("qwen4", shape(), "bfloat16", 65_536)
    options = {"mesh": MeshSpec(tensor=count), "max_model_len": 8192, "max_num_seqs": 64}
    return ServingCase(model, Cluster.of(GPUS["h100"], count), EngineConfig(**options), 2048, 200)


def test_every_weight_multiplies_every_token():
    model, rules = shape(), serving_rules(shape(), MeshSpec())
    weights, one = weights_of(model, MeshSpec(), "bfloat16", "dtype"), Pass(32, 32, 4096, 2)
    for block, own in zip(model.blocks(), weights.layers, strict=True):
        found = layer_work(block, [InUse.of(held, rules) for held in own], rules, 1.0, one, 2048)
        flops = sum(op.flops * op.count for op in found.ops if op.unit == "matmul")
        multiplied = block.attention.parameters_per_token(2048) + block.mlp.parameters_per_token(2048)
        multiplied += 2 * block.streams.parameters_per_token(2048)
        multiplied += block.ngrams.parameters_per_token(2048) if block.ngrams else 0
        few = 2048 * 32 + 2048  # the router's and the shared expert's gate, whose kernels are small
        assert flops == pytest.approx(2 * 32 * (multiplied - few), rel=0.002)


def test_a_table_of_n_grams_is_held_in_parts():
    [own] = shape().ngrams
    whole, halved = (serving_memory(served(count)).stages[0] for count in (1, 2))
    table = 2 * own.rows * own.width
    assert table > 0.3 * whole.weights and halved.weights < 0.6 * whole.weights
    # Of each text beside states: nine tokens of four streams that a convolution sees, and two tokens; whole everywhere.
    slots = whole.memories / (3 * (4 * 32 * 128**2 + 2 * 3 * 64 * 128) + 2 * 9 * 4 * 2048 + 4 * 2)
    assert slots == int(slots) > 64


def test_decoding_reads_chosen_blocks_and_keys_of_all():
    """Of the layer that attends: a text's blocks have as many bytes of keys to choose from, and no more is attended
    to."""
    case = served()
    speed = Speed.of(case, serving_memory(case))
    near, far = (speed.decode(1, context).least for context in (4096, 8096))
    assert far - near == pytest.approx(4000 * 128 * 2 / GPUS["h100"].hbm_bytes_per_second, rel=1e-3)
    attends = [block for block in shape().blocks() if isinstance(block.attention, AttentionConfig)]
    assert len(attends) == 1 and attends[0].attention.indexer.top_k == 1024 + 63
