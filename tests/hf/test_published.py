"""The options of published checkpoints are read: each gives a model of the size that its makers state."""

import dataclasses
import json
import math

import jax
import pytest
import small_moe
from small import mesh_of

from shardlm.errors import ShardlmError
from shardlm.layers.param import Execution
from shardlm.mesh import MeshSpec
from shardlm.models import registry
from shardlm.models.llama import LlamaConfig
from shardlm.models.mixtral import MixtralConfig
from shardlm.rules import Rules
from shardlm.state import ModelDef


def common(layers, hidden, heads, kv, mlp, vocab, **more):
    return {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv,
        "intermediate_size": mlp, "vocab_size": vocab, "rms_norm_eps": 1e-6, "hidden_act": "silu", "bos_token_id": 1,
        "eos_token_id": 2, "initializer_range": 0.02, "torch_dtype": "bfloat16", "transformers_version": "4.45.0",
        "use_cache": True, "attention_dropout": 0.0, "max_position_embeddings": 32768, "tie_word_embeddings": False,
        "rope_theta": 10000.0,
    } | more  # fmt: skip


YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"}
# name -> (config.json in the words of its publishers, stated parameters)
PUBLISHED = {
    "Llama 2 7B": (
        common(32, 4096, 32, 32, 11008, 32000, model_type="llama", rope_scaling=None, pretraining_tp=1),
        6_738_415_616,
    ),
    "Llama 3.1 8B": (
        common(
            32, 4096, 32, 8, 14336, 128256, model_type="llama", attention_bias=False, mlp_bias=False, rope_theta=5e5,
            max_position_embeddings=131072,
            rope_scaling={"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                          "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        ),
        8_030_261_248,
    ),
    "Mistral 7B v0.1": (
        common(32, 4096, 32, 8, 14336, 32000, model_type="mistral", sliding_window=4096),
        7_241_732_096,
    ),
    "Mixtral 8x7B": (
        common(32, 4096, 32, 8, 14336, 32000, model_type="mixtral", num_local_experts=8, num_experts_per_tok=2,
               output_router_logits=False, router_aux_loss_coef=0.02, sliding_window=None),
        46_702_792_704,
    ),
    "Qwen 2.5 7B": (
        common(28, 3584, 28, 4, 18944, 152064, model_type="qwen2", max_window_layers=28, sliding_window=131072,
               use_sliding_window=False),
        7_615_616_512,
    ),
    "Qwen 3 30B A3B": (
        common(48, 2048, 32, 4, 6144, 151936, model_type="qwen3_moe", head_dim=128, attention_bias=False,
               decoder_sparse_step=1, max_window_layers=48, mlp_only_layers=[], moe_intermediate_size=768,
               norm_topk_prob=True, num_experts=128, num_experts_per_tok=8, rope_scaling=None, sliding_window=None,
               use_sliding_window=False, router_aux_loss_coef=0.001, output_router_logits=False),
        30_532_122_624,
    ),
    "DeepSeek V3": (
        common(61, 7168, 128, 128, 18432, 129280, model_type="deepseek_v3", attention_bias=False, ep_size=1,
               aux_loss_alpha=0.001, first_k_dense_replace=3, kv_lora_rank=512, moe_intermediate_size=2048,
               moe_layer_freq=1, n_group=8, n_routed_experts=256, n_shared_experts=1, norm_topk_prob=True,
               num_experts_per_tok=8, num_nextn_predict_layers=1, q_lora_rank=1536, qk_nope_head_dim=128,
               qk_rope_head_dim=64, routed_scaling_factor=2.5, scoring_func="sigmoid", seq_aux=True, topk_group=4,
               topk_method="noaux_tc", v_head_dim=128, auto_map={"AutoConfig": "x"},
               quantization_config={"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                                    "weight_block_size": [128, 128]},
               rope_scaling=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}),
        671_026_419_200,  # without the layer that predicts a second token
    ),
    "DeepSeek MoE 16B": (
        common(28, 2048, 16, 16, 10944, 102400, model_type="deepseek", aux_loss_alpha=0.001, first_k_dense_replace=1,
               moe_intermediate_size=1408, moe_layer_freq=1, n_routed_experts=64, n_shared_experts=2,
               norm_topk_prob=False, num_experts_per_tok=6, rope_scaling=None, scoring_func="softmax", seq_aux=True),
        16_375_728_128,
    ),
    "Gemma 2 9B": (
        common(42, 3584, 16, 8, 14336, 256000, model_type="gemma2", head_dim=256, attn_logit_softcapping=50.0,
               final_logit_softcapping=30.0, hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh",
               cache_implementation="hybrid", query_pre_attn_scalar=256, sliding_window=4096, sliding_window_size=4096,
               tie_word_embeddings=True),
        9_241_705_984,
    ),
    "Gemma 3 4B, text": (
        {"model_type": "gemma3", "image_token_index": 262144, "vision_config": {"hidden_size": 1152},
         "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
                         "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                         "sliding_window": 1024}},
        3_880_263_168,
    ),
    "Phi 3 mini": (
        common(32, 3072, 32, 32, 8192, 32064, model_type="phi3", attention_bias=False, embd_pdrop=0.0, resid_pdrop=0.0,
               original_max_position_embeddings=4096, rope_scaling=None, sliding_window=2047),
        3_821_079_552,
    ),
    "SmolLM3 3B": (
        common(36, 2048, 16, 4, 11008, 128256, model_type="smollm3", attention_bias=False, mlp_bias=False,
               layer_types=["full_attention"] * 36, max_window_layers=28, no_rope_layer_interval=4,
               no_rope_layers=[1, 1, 1, 0] * 9, pretraining_tp=2, rope_scaling=None, sliding_window=None,
               use_sliding_window=False, tie_word_embeddings=True),
        3_075_098_624,
    ),
    "GPT-2": (
        {"model_type": "gpt2", "activation_function": "gelu_new", "attn_pdrop": 0.1, "bos_token_id": 50256,
         "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
         "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1,
         "summary_activation": None, "summary_first_dropout": 0.1, "summary_type": "cls_index",
         "summary_use_proj": True, "vocab_size": 50257,
         "task_specific_params": {"text-generation": {"do_sample": True}}},
        124_439_808,
    ),
    "GPT-OSS 20B": (
        common(24, 2880, 64, 8, 2880, 201088, model_type="gpt_oss", head_dim=64, attention_bias=True,
               experts_per_token=4, initial_context_length=4096, num_local_experts=32, num_experts_per_tok=4,
               layer_types=["sliding_attention", "full_attention"] * 12, output_router_logits=False,
               quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
               router_aux_loss_coef=0.9, sliding_window=128, swiglu_limit=7.0, rope_theta=150000,
               rope_scaling={"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn",
                             "original_max_position_embeddings": 4096, "truncate": False}),
        20_914_757_184,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_options_give_the_stated_size(name):
    config, stated = PUBLISHED[name]
    shape = registry.transformer(json.loads(json.dumps(config)))
    assert parameters(shape.without_mtp()) == stated
    if name == "DeepSeek V3":  # "11.5B unique parameters", say its publishers (README_WEIGHTS.md)
        assert parameters(shape) - stated == pytest.approx(11.5e9, rel=0.01)


def parameters(shape) -> int:
    with jax.set_mesh(mesh_of(MeshSpec())):
        model = ModelDef.make(shape, Execution(Rules.make("replicated", MeshSpec())))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model.shapes))


OURS = [
    LlamaConfig(vocab_size=64, embed_dim=32, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=10, mlp_dim=48),
    MixtralConfig(vocab_size=64, embed_dim=32, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, expert_dim=48),
    small_moe.DEEPSEEK,
    dataclasses.replace(small_moe.DEEPSEEK, mtp=2),
    dataclasses.replace(small_moe.DEEPSEEK, q_latent_dim=0, scoring="softmax", load_bias=False),
]


@pytest.mark.parametrize("config", OURS, ids=lambda config: type(config).__name__)
def test_our_own_configurations_come_back_from_their_config_json(config):
    options = json.loads(json.dumps(config.to_hf()))
    assert registry.transformer(options) == config.transformer()
    for block in set(config.transformer().blocks()):
        assert registry.names(options, config.transformer(), block)


def test_a_deepseek_that_is_neither_v2_nor_v3_cannot_be_published():
    with pytest.raises(ShardlmError, match=r"neither DeepSeek V2 \(softmax, False\) nor V3"):
        dataclasses.replace(small_moe.DEEPSEEK, load_bias=False).to_hf()
