"""The options of the newest families' published checkpoints, as tests/hf/test_published.py has those of others."""

import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
from published_sizes import YARN, check_size, common
from test_opening import change_tensors

import shardlm
from shardlm import hf_files
from shardlm.errors import ShardlmError
from shardlm.models import registry

REFERENCES = pathlib.Path(__file__).parent / "references"
NEWEST = {  # name -> (config.json in the words of its publishers, billions of parameters that they state)
    "IQuest-Coder V1 40B": (
        common(80, 5120, 40, 8, 27648, 76800, model_type="iquestcoder", head_dim=128, attention_bias=False,
               mlp_bias=False, clip_qkv=None, use_sliding_window=False, sliding_window=None, rope_theta=500_000),
        39.8,
    ),
    "CWM": (
        common(64, 6144, 48, 8, 21504, 128256, model_type="cwm", head_dim=128, mlp_bias=False, sliding_window=8192,
               layer_types=["full_attention", *["sliding_attention"] * 3] * 16, pretraining_tp=1,
               rope_theta=1_000_000.0,
               rope_scaling={"factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3",
                             "original_max_position_embeddings": 8192}),
        32.6,
    ),
    "Ministral 8B": (
        common(36, 4096, 32, 8, 12288, 131072, model_type="ministral", head_dim=128, sliding_window=32768,
               rope_theta=100_000_000.0),
        8.02,
    ),
    "VaultGemma 1B": (
        common(26, 1152, 4, 4, 6912, 256000, model_type="vaultgemma", head_dim=256, hidden_act=None,
               hidden_activation="gelu_pytorch_tanh", attn_logit_softcapping=None, final_logit_softcapping=None,
               query_pre_attn_scalar=256, sliding_window=512, layer_types=["full_attention"] * 26, attention_bias=False,
               tie_word_embeddings=True),
        1.04,
    ),
    "Sarvam 30B": (
        common(19, 4096, 64, 4, 8192, 262144, model_type="sarvam_moe", head_dim=64, use_qkv_bias=False, use_bias=False,
               embedding_dropout=0.0, output_dropout=0.0, max_window_layers=19, num_experts=128, num_shared_experts=1,
               num_experts_per_tok=6, n_group=1, topk_group=1, moe_intermediate_size=1024, first_k_dense_replace=1,
               use_qk_norm=True, moe_router_enable_expert_bias=True, routed_scaling_factor=2.5, norm_topk_prob=True,
               attn_implementation="eager", base_model_tp_plan={"layers.*.attention.dense": "rowwise"},
               rope_theta=8_000_000.0),
        32.2,
    ),
    "Sarvam 105B": (
        common(32, 4096, 64, None, 16384, 262144, model_type="sarvam_mla", num_experts=128, num_shared_experts=1,
               num_experts_per_tok=8, moe_intermediate_size=2048, first_k_dense_replace=1, kv_lora_rank=512,
               q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64, q_head_dim=192, head_dim=576,
               v_head_dim=128,
               routed_scaling_factor=2.5, norm_topk_prob=True, attention_bias=False,
               rope_scaling=YARN | {"type": "deepseek_yarn", "mscale": 1.0, "mscale_all_dim": 1.0}),
        105,
    ),
    "Mellum 2": (
        common(28, 2304, 32, 4, 7168, 98304, model_type="mellum", head_dim=128, num_experts=64, num_experts_per_tok=8,
               moe_intermediate_size=896, norm_topk_prob=True, sliding_window=1024, rope_theta=None,
               layer_types=[*["sliding_attention"] * 3, "full_attention"] * 7, num_mtp_layers=1),
        12.1,
    ),
    "LFM3 1.7B": (
        common(24, 2048, 16, 4, 7680, 128000, model_type="lfm3", head_dim=128, norm_eps=1e-5, rms_norm_eps=None,
               hidden_act=None, conv_L_cache=7, conv_bias=False, sliding_window=256, rope_theta=None,
               use_sandwich_norm=True, use_attention_gate=True, tie_word_embeddings=True),
        1.7,
    ),
    "Gemma 3n E4B, text": (
        {"model_type": "gemma3n", "audio_config": {"hidden_size": 1536}, "vision_config": {"num_classes": 2},
         "text_config": common(35, 2048, 8, 2, [16384] * 35, 262400, model_type="gemma3n_text", head_dim=256,
                               hidden_act=None, hidden_activation="gelu_pytorch_tanh", altup_active_idx=0,
                               activation_sparsity_pattern=[0.95] * 10 + [0.0] * 25, altup_coef_clip=120.0,
                               altup_correct_scale=True, altup_lr_multiplier=1.0, altup_num_inputs=4,
                               final_logit_softcapping=30.0, hidden_size_per_layer_input=256, laurel_rank=64,
                               layer_types=[*["sliding_attention"] * 4, "full_attention"] * 7, num_kv_shared_layers=15,
                               query_pre_attn_scalar=256, rope_local_base_freq=10000.0, rope_scaling=None,
                               rope_theta=1000000.0, sliding_window=512, vocab_size_per_layer_input=262144,
                               tie_word_embeddings=True)},
        6.87,
    ),
    "Ling 3, by the defaults of transformers": (
        common(42, 2560, 32, 32, 6144, 157184, model_type="bailing_hybrid", head_dim=128, first_k_dense_replace=2,
               kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
               moe_intermediate_size=768, num_experts=512, num_experts_per_token=8, num_shared_experts=1,
               num_expert_group=8, topk_group=4, routed_scaling_factor=2.5, moe_renormalize=True, layer_group_size=6,
               kda_safe_gate=True, kda_lower_bound=-5.0, short_conv_kernel_size=4, model_max_length=262144,
               num_nextn_predict_layers=1, rope_theta=6_000_000.0),
        124.41,
    ),
    "Hy4, by the defaults of transformers": (
        common(34, 2816, 32, 32, 6912, 120832, model_type="hy_v4", moe_intermediate_size=768, n_routed_experts=256,
               n_shared_experts=1, num_experts_per_tok=8, routed_scaling_factor=2.827, norm_topk_prob=True,
               q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256,
               index_topk=2048, index_head_dim=128, index_n_heads=16, hc_mult=4, hc_magnitude=2.0, swiglu_limit=10.0),
        58.28,
    ),
    "Mistral Large 4, text, by the defaults of transformers": (
        {"model_type": "mistral_large4", "vision_config": {"model_type": "pixtral"}, "tie_word_embeddings": False,
         "text_config": common(72, 6144, 64, 64, 24576, 204800, model_type="mistral_large4_text", kv_lora_rank=512,
                               moe_intermediate_size=6144, n_routed_experts=128, n_shared_experts=1,
                               num_experts_per_tok=4, first_k_dense_replace=1, routed_scaling_factor=1.0, n_group=1,
                               topk_group=1, qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=128, index_topk=2048,
                               index_head_dim=128, index_n_heads=32, final_logit_softcapping=30.0, attention_bias=False,
                               rope_theta=None, rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0,
                               "factor": 2048.0, "original_max_position_embeddings": 512, "beta_fast": 32.0,
                               "beta_slow": 1.0, "attention_factor": 1.0})},
        1_050,
    ),
    "Flint, by the defaults of transformers": (
        common(49, 2048, 32, 4, 6144, 150144, model_type="flint", head_dim=128, attention_bias=False, num_experts=256,
               num_experts_per_tok=6, moe_intermediate_size=512, shared_expert_intermediate_size=1024,
               sliding_window=513, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[0, 1]),
        39.79,
    ),
    "Kolibri 1, by the defaults of transformers": (
        common(50, 2560, 48, 4, None, 128000, model_type="kolibri1", head_dim=128, num_experts=384,
               num_experts_per_tok=6, moe_intermediate_size=512, shared_expert_intermediate_size=512,
               sliding_window=513, norm_topk_prob=False),
        78.10,
    ),
    "Lara 4 Mini, by the defaults of transformers": (
        common(34, 1024, 16, 4, None, 151936, model_type="lara_mini", head_dim=128, num_experts=128,
               num_experts_per_tok=4, moe_intermediate_size=512, shared_expert_intermediate_size=512,
               sliding_window=512, linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_value_head_dim=128,
               linear_num_key_heads=8, linear_num_value_heads=16, tie_word_embeddings=True),
        7.28,
    ),
    "Muse Glimmer 30B, text, by the defaults of transformers": (
        {"model_type": "muse_glimmer", "vision_config": {"hidden_size": 1536}, "image_token_id": 200092,
         "video_token_id": 200091, "out_hidden_size": 6144, "projector_hidden_size": 4096,
         "text_config": common(52, 6656, 32, 2, 19968, 202048, model_type="muse_glimmer_text", head_dim=128,
                               hidden_act=None, hidden_activation="silu", sliding_window=2048, attention_bias=False,
                               qk_scale_factor=3.87, output_multiplier=0.19611613513818404, post_norm_eps=1e-8,
                               final_logit_softcapping=20.0, rope_theta=500_000.0,
                               layer_rope_theta=[500_000.0, 500_000.0, 500_000.0, 0] * 13)},
        27.85,
    ),
    "MiniMax-M1 80k": (
        common(80, 6144, 64, 8, 9216, 200064, model_type="minimax_m1", head_dim=128, rotary_dim=64, postnorm=True,
               attn_type_list=[0, 0, 0, 0, 0, 0, 0, 1] * 10, layernorm_full_attention_alpha=3.5565588200778455,
               layernorm_full_attention_beta=1.0, layernorm_linear_attention_alpha=3.5565588200778455,
               layernorm_linear_attention_beta=1.0, layernorm_mlp_alpha=3.5565588200778455, layernorm_mlp_beta=1.0,
               num_local_experts=32, num_experts_per_tok=2, router_aux_loss_coef=0.001, router_jitter_noise=0.0,
               shared_intermediate_size=0, shared_moe_mode="sigmoid", sliding_window=None, rope_theta=10_000_000),
        456,
    ),
    "LongCat Flash": (
        common(None, 6144, 64, None, None, 131072, model_type="longcat_flash", num_layers=28, attention_method="MLA",
               ffn_hidden_size=12288, expert_ffn_hidden_size=2048, n_routed_experts=512, zero_expert_num=256,
               zero_expert_type="identity", moe_topk=12, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128,
               qk_rope_head_dim=64, v_head_dim=128, mla_scale_q_lora=True, mla_scale_kv_lora=True, router_bias=False,
               routed_scaling_factor=6.0, attention_bias=False, rope_theta=10_000_000.0),
        560,
    ),
    "MiniMax M3, text, by the defaults of transformers": (
        {"model_type": "minimax_m3_vl", "vision_config": {"hidden_size": 1280}, "image_token_index": 200025,
         "video_token_index": 200026, "projector_hidden_size": 6144,
         "text_config": common(60, 6144, 64, 4, 3072, 200064, model_type="minimax_m3_vl_text", head_dim=128,
                               hidden_act="swigluoai", rotary_dim=64, rope_theta=5_000_000.0, swiglu_alpha=1.702,
                               swiglu_limit=7.0, dense_intermediate_size=12288, shared_intermediate_size=3072,
                               num_local_experts=128, num_experts_per_tok=4, routed_scaling_factor=2.0,
                               moe_layer_freq=[0] * 3 + [1] * 57,
                               sparse_attention_config={"sparse_num_index_heads": 4, "sparse_index_dim": 128,
                                                        "sparse_block_size": 128, "sparse_topk_blocks": 16,
                                                        "sparse_local_block": 1,
                                                        "sparse_attention_freq": [0] * 3 + [1] * 57})},
        426.2,
    ),
    "GLM-5.3 Flash, text, by the defaults of transformers": (
        {"model_type": "glm5_next", "vision_config": {"depth": 24}, "image_start_token_id": 154830,
         "text_config": common(45, 4096, 64, 64, 12288, 154880, model_type="glm5_next_text", rope_theta=None,
                               moe_intermediate_size=2048, n_routed_experts=288, n_shared_experts=1,
                               num_experts_per_tok=8, routed_scaling_factor=2.5, kv_lora_rank=512, q_lora_rank=1536,
                               qk_rope_head_dim=0, qk_nope_head_dim=256, v_head_dim=256, index_topk=2048,
                               index_head_dim=128, index_n_heads=32, index_kpool=16, norm_topk_prob=True,
                               linear_attn_config={"head_dim": 128, "num_heads": 64, "short_conv_kernel_size": 4,
                                                   "gate_lower_bound": -5.0, "safe_gate": True}, hc_mult=4,
                               hc_sinkhorn_iters=20, hc_eps=1e-6, swiglu_limit=10.0)},
        313.3,
    ),
    "Pythia 1.4B": (
        common(24, 2048, 16, None, 8192, 50304, model_type="gpt_neox", hidden_act="gelu", layer_norm_eps=1e-5,
               rms_norm_eps=None, rotary_emb_base=10000, rotary_pct=0.25, rope_theta=None, use_parallel_residual=True,
               max_position_embeddings=2048),
        1.415,
    ),
    "HyperCLOVA X SEED Think 14B": (
        common(38, 6144, 48, 8, 14336, 110592, model_type="hyperclovax", head_dim=128, use_post_norm=True,
               embedding_multiplier=10.0, attention_multiplier=0.0078125, residual_multiplier=1.0, logits_scaling=0.125,
               attention_bias=False, mlp_bias=False, pretraining_tp=1, rope_theta=100_000_000),
        14.75,
    ),
    "Jais 2 8B": (
        common(32, 3328, 26, 26, 26624, 150272, model_type="jais2", hidden_act="relu2", layer_norm_eps=1e-5,
               rms_norm_eps=None, head_dim=128, attention_bias=True, mlp_bias=True),
        8.09,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NEWEST)
def test_newest_published_options_give_about_the_stated_size(name):
    check_size(*NEWEST[name])


@pytest.mark.parametrize(
    ("name", "usual"),  # as the classes of transformers 5.24 have it
    [
        ("gemma3n", {"final_logit_softcapping": 30.0, "sliding_window": 512}),
        ("vaultgemma", {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0, "sliding_window": 4096}),
        ("cwm", {"sliding_window": 8192}),
        ("ministral", {"sliding_window": 4096}),
        ("mellum", {"norm_topk_prob": True, "sliding_window": 1024}),
        ("hy_v4", {"routed_scaling_factor": 2.827}),
        ("sarvam_mla", {"routed_scaling_factor": 2.5}),
        ("sarvam_moe", {"routed_scaling_factor": 2.5, "rope_parameters": {"rope_theta": 8e6, "rope_type": "default"}}),
        ("bailing_hybrid", {"topk_group": 4}),
        ("flint", {"sliding_window": 513, "norm_topk_prob": True, "mlp_only_layers": [0, 1], "head_dim": 128}),
        ("kolibri1", {"sliding_window": 513, "norm_topk_prob": False, "shared_expert_intermediate_size": 512}),
        ("lara_mini", {"sliding_window": 512, "norm_topk_prob": True, "tie_word_embeddings": True}),
        ("minimax", {"hidden_act": "silu", "mlp_alpha_factor": 1, "block_size": 256}),
        ("minimax", {"layer_types": ["full_attention", "linear_attention"] * 2}),
        ("longcat_flash", {"routed_scaling_factor": 6.0, "zero_expert_num": 256}),
        ("minimax_m3", {"routed_scaling_factor": 2.0, "index_topk_blocks": 16, "index_local_blocks": 1}),
        ("glm5_next", {"routed_scaling_factor": 2.5, "hc_mult": 4, "swiglu_limit": 10.0}),
        ("muse_glimmer", {"final_logit_softcapping": 20.0, "output_multiplier": 0.19611613513818404}),
        ("muse_glimmer", {"qk_scale_factor": 3.87, "post_norm_eps": 1e-8, "sliding_window": 2048}),
        (
            "mistral_large4",
            {
                "final_logit_softcapping": 30.0,
                "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2048.0}
                | {"original_max_position_embeddings": 512, "attention_factor": 1.0},
            },
        ),
    ],
)
def test_what_is_not_said_is_as_transformers_has_it(name, usual):
    """No number of a checkpoint's tensors tells these, so that replies would be wrong and nothing said."""
    said = json.loads((REFERENCES / name / "config.json").read_text())
    for option, value in usual.items():
        absent = registry.transformer({key: own for key, own in said.items() if key != option})
        assert absent == registry.transformer({**said, option: value}), option


def test_ling_as_transformers_writes_it():
    """Where head_dim is that of latent attention's rotation, and linear_head_dim what was published as head_dim."""
    said = json.loads((REFERENCES / "bailing_hybrid" / "config.json").read_text())
    assert said["head_dim"] == said["qk_rope_head_dim"] == said["linear_head_dim"]
    written = registry.transformer({**said, "linear_head_dim": 16})
    published = {key: value for key, value in said.items() if not key.startswith("linear_")} | {"head_dim": 16}
    assert written == registry.transformer(published) != registry.transformer(said)


SEEING = {  # name -> (before the names of the text's tensors, and of what sees and is left aside)
    "glm5_next": ("model.language_model.", ["model.visual.blocks.0.attn.qkv", "model.visual.merger.proj"]),
    "minimax_m3": (
        "language_model.model.",
        ["vision_tower.vision_model.pre_layrnorm", "multi_modal_projector.linear_1", "patch_merge_mlp.linear_2"],
    ),
    "muse_glimmer": (
        "model.language_model.",
        ["model.vision_tower.norm", "model.vision_adapter.fc1", "model.vision_projection"],
    ),
}


@pytest.mark.parametrize("name", SEEING)
def test_text_beside_what_sees(name, tmp_path):
    """As published, with the options of both."""
    prefix, seen = SEEING[name]
    folder = shutil.copytree(REFERENCES / name, tmp_path / "seeing")
    options = json.loads((folder / "config.json").read_text())
    own = {"model_type": options["model_type"].removesuffix("_text"), "text_config": options, "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(own | {"image_token_id": 5}))
    tensors = {n: stored.read(...).astype(np.float32) for n, stored in hf_files.Folder.open(folder).tensors.items()}
    head = prefix.removesuffix("model.") if name == "minimax_m3" else ""
    moved = {n.replace("model.", prefix, 1) if n.startswith("model.") else f"{head}{n}": a for n, a in tensors.items()}
    aside = {f"{n}.weight": np.ones((2, 2), np.float32) for n in seen}
    change_tensors(folder, **dict.fromkeys(tensors) | moved | aside)
    opened, alone = (shardlm.load(path, dtype="float32") for path in (folder, REFERENCES / name))
    assert opened.model.config == alone.model.config
    assert jax.tree.all(jax.tree.map(np.array_equal, opened.params, alone.params))


def test_longcat_as_transformers_writes_it(tmp_path):
    """With gates of experts that give back what they read; one beyond them is named."""
    folder = shutil.copytree(REFERENCES / "longcat_flash", tmp_path / "written")
    expert = "model.layers.1.mlp.experts.{}.gate_proj.weight"
    change_tensors(folder, **{expert.format(number): np.ones((24, 32), np.float32) for number in (4, 5)})
    opened, plain = (shardlm.load(path, dtype="float32") for path in (folder, REFERENCES / "longcat_flash"))
    assert jax.tree.all(jax.tree.map(np.array_equal, opened.params, plain.params))
    change_tensors(folder, **{expert.format(6): np.ones((24, 32), np.float32)})
    with pytest.raises(ShardlmError, match=r"experts\.6\.gate_proj\.weight is not known"):
        shardlm.load(folder, dtype="float32")


def test_minimax_without_the_decays_that_transformers_writes(tmp_path):
    """Which are rounded: they are made of the options."""
    folder = shutil.copytree(REFERENCES / "minimax", tmp_path / "written")
    change_tensors(folder, **{"model.layers.0.self_attn.slope_rate": np.ones((4, 1, 1), np.float32)})
    opened, plain = (shardlm.load(path, dtype="float32") for path in (folder, REFERENCES / "minimax"))
    assert jax.tree.all(jax.tree.map(np.array_equal, opened.params, plain.params))
