"""The options of published checkpoints are read: each gives a model of the size that its makers state."""

import dataclasses
import json
import math
import pathlib

import pytest
import small_moe
from published_sizes import YARN, check_size, common, parameters

from shardlm.errors import ShardlmError
from shardlm.models import registry
from shardlm.models.llama import LlamaConfig
from shardlm.models.mixtral import MixtralConfig

REFERENCES = pathlib.Path(__file__).parent / "references"


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
    assert parameters(config) == stated
    if name == "DeepSeek V3":  # "11.5B unique parameters", say its publishers (README_WEIGHTS.md)
        assert parameters(config, further=True) - stated == pytest.approx(11.5e9, rel=0.01)


GLM = {
    "model_type": "glm4_moe", "attention_bias": True, "head_dim": 128, "partial_rotary_factor": 0.5, "n_group": 1,
    "topk_group": 1, "norm_topk_prob": True, "n_shared_experts": 1, "num_experts_per_tok": 8, "rope_scaling": None,
    "num_nextn_predict_layers": 1, "rope_theta": 1_000_000,
}  # fmt: skip
GRANITE4 = {
    "model_type": "granitemoehybrid", "layer_types": ["attention" if i % 10 == 5 else "mamba" for i in range(40)],
    "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_head": 64, "mamba_d_conv": 4, "mamba_expand": 2,
    "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_proj_bias": False, "position_embedding_type": "nope",
    "embedding_multiplier": 12, "logits_scaling": 8, "residual_multiplier": 0.22, "attention_multiplier": 0.0078125,
    "tie_word_embeddings": True,
}  # fmt: skip
NEMOTRON_H = {
    "model_type": "nemotron_h", "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4, "chunk_size": 128,
    "head_dim": 128, "mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "layer_norm_epsilon": 1e-5, "expand": 2,
    "norm_eps": 1e-5, "hidden_dropout": 0.0, "mamba_proj_bias": False, "mlp_bias": False, "use_bias": False,
    "use_conv_bias": True, "use_mamba_kernels": True, "rescale_prenorm_residual": True, "residual_in_fp32": False,
    "num_logits_to_keep": 1, "sliding_window": None, "time_step_limit": [0.0, math.inf], "time_step_min": 0.001,
    "time_step_max": 0.1, "time_step_floor": 0.0001, "attention_bias": False,
    "hidden_act": None,
}  # fmt: skip
FALCON_H1 = {
    "model_type": "falcon_h1", "attention_bias": False, "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 0.9375, "embedding_multiplier": 5.656854249492381, "key_multiplier": 0.390625,
    "lm_head_multiplier": 0.0390625, "mamba_chunk_size": 128, "mamba_conv_bias": True, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_n_groups": 1, "mamba_norm_before_gate": False, "mamba_proj_bias": False,
    "mamba_rms_norm": False, "mamba_use_mlp": True, "mlp_bias": False, "mlp_expansion_factor": 8,
    "mlp_multipliers": [0.8838834764831844, 0.5859375], "num_logits_to_keep": 1, "projectors_bias": False,
    "rope_scaling": None, "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.23570226039551587,
    "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
}  # fmt: skip
LFM2 = {
    "model_type": "lfm2", "conv_L_cache": 3, "conv_bias": False, "norm_eps": 1e-5, "rms_norm_eps": None,
    "hidden_act": None, "rope_theta": 1_000_000.0, "tie_word_embeddings": True,
}  # fmt: skip
NEWER = {  # name -> (config.json in the words of its publishers, billions of parameters that they state)
    "Granite 4.0 H Micro": (
        common(40, 2048, 32, 8, 8192, 100352, **GRANITE4, mamba_n_heads=64, shared_intermediate_size=8192,
               num_local_experts=0, num_experts_per_tok=0),
        3.19,
    ),
    "Granite 4.0 H Small": (
        common(40, 4096, 32, 8, 768, 100352, **GRANITE4, mamba_n_heads=128, shared_intermediate_size=1536,
               num_local_experts=72, num_experts_per_tok=10),
        32,
    ),
    "Bamba 9B": (
        common(32, 4096, 32, 8, 14336, 128256, model_type="bamba", attn_layer_indices=[9, 18, 27], mamba_n_heads=128,
               mamba_d_head=64, mamba_d_state=128, mamba_n_groups=1, mamba_expand=2, mamba_d_conv=4,
               mamba_chunk_size=256, mamba_conv_bias=True, mamba_proj_bias=False, z_loss_coefficient=0.0),
        9.78,
    ),
    "Falcon H1 0.5B": (
        common(36, 1024, 8, 2, 2048, 32784, **FALCON_H1, head_dim=64, mamba_d_ssm=1536, mamba_n_heads=24,
               mamba_d_head=64, mamba_d_state=128),
        0.521,
    ),
    "Falcon H1 7B": (
        common(44, 3072, 12, 2, 12288, 130048, **FALCON_H1, head_dim=128, mamba_d_ssm=3072, mamba_n_heads=24,
               mamba_d_head=128, mamba_d_state=256),
        7.59,
    ),
    "LFM2 1.2B": (
        common(16, 2048, 32, 8, None, 65536, **LFM2, block_auto_adjust_ff_dim=True, block_dim=2048,
               block_ff_dim=12288, block_ffn_dim_multiplier=1.0, block_mlp_init_scale=1.0, block_multiple_of=256,
               block_norm_eps=1e-5, block_out_init_scale=1.0, block_use_swiglu=True, block_use_xavier_init=True,
               conv_dim=2048, conv_dim_out=2048, conv_use_xavier_init=True, full_attn_idxs=[2, 5, 8, 10, 12, 14],
               num_heads=32, use_pos_enc=True),
        1.17,
    ),
    "LFM2 8B A1B": (
        common(24, 2048, 32, 8, 7168, 65536, **LFM2 | {"model_type": "lfm2_moe"}, moe_intermediate_size=1792,
               layer_types=["full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)],
               norm_topk_prob=True, num_dense_layers=2, num_experts=32, num_experts_per_tok=4,
               routed_scaling_factor=1.0, use_expert_bias=True),
        8.34,
    ),
    "Nemotron Nano 9B v2": (
        common(56, 4480, 40, 8, 15680, 131072, **NEMOTRON_H, mamba_num_heads=128, mamba_head_dim=80,
               hybrid_override_pattern="M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"),
        8.89,
    ),
    "Nemotron 3 Nano": (
        common(52, 2688, 32, 2, 1856, 131072, **NEMOTRON_H, mamba_num_heads=64, mamba_head_dim=64, n_group=1,
               hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", topk_group=1,
               moe_intermediate_size=1856, moe_shared_expert_intermediate_size=3712, n_routed_experts=128,
               n_shared_experts=1, num_experts_per_tok=6, norm_topk_prob=True, routed_scaling_factor=2.5),
        31.6,
    ),
    "GLM 4.5": (
        common(92, 5120, 96, 8, 12288, 151552, **GLM, first_k_dense_replace=3, moe_intermediate_size=1536,
               n_routed_experts=160, routed_scaling_factor=2.5, use_qk_norm=True),
        355,
    ),
    "GLM 4.5 Air": (
        common(46, 4096, 96, 8, 10944, 151552, **GLM, first_k_dense_replace=1, moe_intermediate_size=1408,
               n_routed_experts=128, routed_scaling_factor=1.0, use_qk_norm=False),
        106,
    ),
    "MiniMax M2": (
        common(62, 3072, 48, 8, 1536, 200064, model_type="minimax_m2", attn_type_list=[1] * 62, head_dim=128,
               layernorm_full_attention_beta=1.0, layernorm_linear_attention_beta=1.0, layernorm_mlp_beta=1.0,
               mlp_intermediate_size=8192, mtp_transformer_layers=1, num_experts_per_tok=8, num_local_experts=256,
               num_mtp_modules=3, output_router_logits=False, qk_norm_type="per_layer", rotary_dim=64,
               rope_theta=5_000_000, router_aux_loss_coef=0.001, router_jitter_noise=0.0, scoring_func="sigmoid",
               shared_intermediate_size=0, shared_moe_mode="sigmoid", sliding_window=None, use_mtp=True,
               use_qk_norm=True, use_routing_bias=True),
        229,
    ),
    "dots.llm1": (
        common(62, 4096, 32, 32, 10944, 152064, model_type="dots1", attention_bias=False, first_k_dense_replace=1,
               max_window_layers=62, moe_intermediate_size=1408, moe_layer_freq=1, n_group=1, n_routed_experts=128,
               n_shared_experts=2, norm_topk_prob=True, num_experts_per_tok=6, routed_scaling_factor=2.5,
               scoring_func="sigmoid", sliding_window=None, topk_group=1, topk_method="noaux_tc", rope_scaling=None),
        142,
    ),
    "OLMo 3 32B": (
        common(64, 5120, 40, 8, 27648, 100278, model_type="olmo3", attention_bias=False, sliding_window=4096,
               layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 16,
               rope_theta=500_000, rope_scaling={"attention_factor": 1.2079441541679836, "beta_fast": 32, "factor": 8.0,
               "beta_slow": 1, "original_max_position_embeddings": 8192, "rope_type": "yarn"}),
        32,
    ),
    "OLMoE 7B": (
        common(16, 2048, 16, 16, 1024, 50304, model_type="olmoe", attention_bias=False, clip_qkv=None,
               norm_topk_prob=False, num_experts=64, num_experts_per_tok=8, output_router_logits=False,
               rope_scaling=None, router_aux_loss_coef=0.01),
        6.9,
    ),
    "Seed-OSS 36B": (
        common(64, 5120, 80, 8, 27648, 155136, model_type="seed_oss", attention_bias=True, attention_out_bias=False,
               head_dim=128, mlp_bias=False, residual_dropout=0.1, rope_scaling={"rope_type": "default"}),
        36,
    ),
    "EXAONE 4 32B": (
        common(64, 5120, 40, 8, 27392, 102400, model_type="exaone4", head_dim=128, sliding_window=4096,
               layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 16,
               sliding_window_pattern="LLLG", rope_theta=1_000_000,
               rope_scaling={"factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192, "rope_type": "llama3"}),
        32,
    ),
    "Gemma 2B": (
        common(18, 2048, 8, 1, 16384, 256000, model_type="gemma", head_dim=256, hidden_act="gelu",
               hidden_activation=None, tie_word_embeddings=True, attention_bias=False, rope_scaling=None),
        2.5,
    ),
    "StarCoder 2 3B": (
        common(30, 3072, 24, 2, 12288, 49152, model_type="starcoder2", rms_norm_eps=None, norm_epsilon=1e-5,
               norm_type="layer_norm", mlp_type="default", residual_dropout=0.1, embedding_dropout=0.1, use_bias=True,
               hidden_act="gelu_pytorch_tanh", sliding_window=4096, tie_word_embeddings=True),
        3,
    ),
    "Command R7B": (
        common(32, 4096, 32, 8, 14336, 256000, model_type="cohere2", rms_norm_eps=None, attention_bias=False,
               cache_implementation="hybrid", head_dim=128, layer_norm_eps=1e-5, layer_switch=4, logit_scale=0.25,
               order_of_interleaved_layers="local_attn_first", position_embedding_type="rope_gptj", rope_scaling=None,
               rope_theta=50000, rotary_pct=1.0, sliding_window=4096, sliding_window_pattern=4,
               tie_word_embeddings=True, use_embedding_sharing=True, use_gated_activation=True,
               use_parallel_block=True, use_parallel_embedding=True),
        8.03,
    ),
    "DeepSeek V4 Flash": (
        common(43, 4096, 64, 1, 2048, 129280, model_type="deepseek_v4", moe_intermediate_size=2048,
               n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=6,
               q_lora_rank=1024, o_lora_rank=1024, o_groups=8, head_dim=512,
               compress_ratios=[0, 0, *[4, 128] * 20, 4, 0], compress_rope_theta=160000, index_n_heads=64,
               index_head_dim=128, index_topk=512, num_hash_layers=3, qk_rope_head_dim=64, sliding_window=128,
               swiglu_limit=10.0, hc_mult=4, hc_sinkhorn_iters=20, hc_eps=1e-6, scoring_func="sqrtsoftplus",
               norm_topk_prob=True, routed_scaling_factor=1.5, num_nextn_predict_layers=1, rope_scaling=YARN),
        284,
    ),
    "Qwen4-Exp, by the defaults of transformers": (
        common(40, 2048, 16, 2, None, 248320, model_type="qwen4_exp_text", head_dim=256, ple_layer_ids=[2],
               linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128,
               moe_intermediate_size=512, shared_expert_intermediate_size=512, num_experts=512, num_experts_per_tok=10,
               indexer_n_heads=16, indexer_kv_heads=1, indexer_head_dim=128, indexer_budget=2048,
               indexer_compress_ratio=64, rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.25}),
        108.35,
    ),
    "AFM 4.5B": (
        common(36, 2560, 20, 4, 18432, 128004, model_type="arcee", head_dim=128, hidden_act="relu2", mlp_bias=False,
               attention_bias=False, rope_scaling={"beta_fast": 32.0, "beta_slow": 1.0, "factor": 20.0, "mscale": 1.0,
               "original_max_position_embeddings": 4096, "rope_type": "yarn"}),
        4.6,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NEWER)
def test_newer_published_options_give_about_the_stated_size(name):
    check_size(*NEWER[name])


ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
FORMS = {  # a reference -> its options of a rotation in the older form
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.5},
    "glm4_moe": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "minimax_m2": {"rope_theta": 5000000.0, "rotary_dim": 6},
    "olmo3": {"rope_theta": 10000.0, "rope_scaling": ROPE, "layer_types": None},
    "exaone4": {"rope_theta": 10000.0, "sliding_window_pattern": "LG", "layer_types": None},
    "deepseek_v4": {"rope_scaling": {**ROPE, "type": ROPE["rope_type"], "rope_type": None}, "qk_rope_head_dim": 8}
    | {"compress_rates": None, "compress_rate_csa": 2, "compress_rate_hca": 4, "partial_rotary_factor": None}
    | {"mlp_layer_types": None, "num_hash_layers": 2, "expert_dtype": "fp4"},
}


@pytest.mark.parametrize("name", FORMS)
def test_older_and_newer_options_are_the_same_model(name):
    newer = json.loads((REFERENCES / name / "config.json").read_text())
    if name == "olmo3":  # transformers gives layers with a window the family's own base, whatever is asked for
        newer["rope_parameters"]["sliding_attention"]["rope_theta"] = 10000.0
    older = {option: value for option, value in newer.items() if option != "rope_parameters"} | FORMS[name]
    assert registry.transformer(older) == registry.transformer(newer)


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
