"""What the newer families' checkpoints may say that is not followed, and what models of their kinds cannot be asked
for: each is refused by name. And what is in their files that no layer uses."""

import dataclasses
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
from small import mesh_of
from test_opening import change_tensors

import shardlm
from shardlm.errors import ShardlmError
from shardlm.hardware import GPUS
from shardlm.layers.page_layout import PageLayout, layout_of
from shardlm.layers.param import Execution
from shardlm.mesh import MeshSpec
from shardlm.models import registry
from shardlm.models.pretrained import Pretrained
from shardlm.plan.sketch import Sketch
from shardlm.rules import Rules
from shardlm.state import ModelDef, cache_entries
from shardlm.train.config import RunConfig, TrainConfig

REFERENCES = pathlib.Path(__file__).parent / "references"


def options_of(name: str) -> dict:
    return json.loads((REFERENCES / name / "config.json").read_text())


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all', which is not supported"),
        ("gemma4", {"layer_types": ["chunked_attention"] * 7}, "it needs num_hidden_layers=7 of full_attention, slid"),
        ("gemma4", {"num_kv_shared_layers": 6}, "of the first 1 layers none is of the kind full_attention"),
        (
            "gemma4",
            {"per_layer_config": {"2": {"sliding_window": 3}}},
            "supported: the same head_dim and num_key_value",
        ),
        ("gemma3n", {"num_kv_shared_layers": 3}, "of the first 1 layers none is of the kind full_attention"),
        ("gemma3n", {"intermediate_size": [48]}, r"intermediate_size=\[48\]; it needs num_hidden_layers=4 numbers"),
        (
            "gemma3n",
            {"altup_active_idx": 3},
            "3 streams, of which layers read number 3, and rank=10: at least 2, one of",
        ),
        ("gemma3n", {"activation_sparsity_pattern": [1.0] * 4}, "sparsity=1.0: it must be at least 0 and below 1"),
        ("gemma4_moe", {"per_layer_config": {"0": {"head_dim": 16}}}, r"layers of full_attention \(1, 3\), and for no"),
        ("llama4", {"num_experts_per_tok": 2}, "top_k=2: tokens are multiplied by their expert's weight before it"),
        ("llama4", {"layer_types": ["sliding_attention"] * 4}, "num_hidden_layers=4 of chunked_attention, full_att"),
        ("llama4", {"no_rope_layers": [1, 0]}, r"no_rope_layers=\[1, 0\]; it needs num_hidden_layers=4 of 0, 1"),
        ("llama4", {"rope_parameters": None}, "has no 'rope_theta', which a 'llama4_text' model needs"),
        ("hy_v3", {"mlp_layer_types": ["dense"]}, "it needs num_hidden_layers=3 of dense, sparse"),
        ("mistral4", {"n_group": 2}, "n_group=2, which is not supported; supported: 1"),
        ("vaultgemma", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0; it needs a number above 0"),
        ("sarvam_mla", {"n_group": 0}, "num_experts=8 cannot be split into groups=0; choose 1, 2, 4, 8"),
        ("internlm3", {"attention_bias": False}, "attention_bias=False, mlp_bias=True; supported: biases of all"),
        (
            "internlm3",
            {"qkv_bias": True, "mlp_bias": False},
            "qkv_bias=True, attention_bias=True, mlp_bias=False; supp",
        ),
        ("apertus", {"hidden_act": "silu"}, "hidden_act='silu', which is not supported; supported: 'xielu'"),
        ("granite_swa", {"layer_rope_theta": [0]}, r"layer_rope_theta=\[0\]; it needs num_hidden_layers=5 numbers"),
        ("hunyuan_moe", {"moe_topk": [1, 2, 2]}, r"moe_topk=\[1, 2, 2\]; supported: the same for all layers"),
        (
            "hunyuan_moe",
            {"moe_intermediate_size": 24},
            "moe_intermediate_size=24, which is not supported; supported: 48",
        ),
        ("laguna", {"moe_router_logit_softcapping": 5.0}, "moe_router_logit_softcapping=5.0, which is not supported"),
        ("laguna", {"num_attention_heads_per_layer": [4]}, r"=\[4\]; it needs num_hidden_layers=3 of them"),
        ("cohere2_moe", {"mlp_layer_types": ["sparse", "dense", "sparse"]}, r"supported: \['sparse', 'sparse', 'spars"),
        ("afmoe", {"score_func": "softmax"}, "score_func='softmax', which is not supported; supported: 'sigmoid'"),
        ("granitemoehybrid", {"mamba_proj_bias": True}, "mamba_proj_bias=True, which is not supported"),
        (
            "granitemoehybrid",
            {"mamba_d_head": 12},
            "mamba_n_heads=4 of mamba_d_head=12; together they need mamba_expand",
        ),
        ("granitemoehybrid", {"position_embedding_type": "alibi"}, "supported: None, 'nope', 'rope'"),
        (
            "granitemoehybrid",
            {"layer_types": ["mamba"]},
            "it needs num_hidden_layers=3 of linear_attention, mamba, full",
        ),
        ("granitemoehybrid", {"time_step_limit": [0.1]}, r"time_step_limit=\[0.1\]; it needs two numbers"),
        (
            "bamba",
            {"attn_layer_indices": [3]},
            r"attn_layer_indices=\[3\]; it needs numbers from 0 to num_hidden_layers",
        ),
        (
            "falcon_h1",
            {"ssm_multipliers": [1.0]},
            r"=\[1.0\]; it needs 5 numbers, of gate, values, keys",
        ),
        ("falcon_h1", {"projectors_bias": True}, "projectors_bias=True, which is not supported; supported: False"),
        ("falcon_h1", {"mamba_d_head": 8}, "mamba_n_heads=4 of mamba_d_head=8; together they need mamba_d_ssm=48"),
        ("lfm2", {"layer_types": ["conv"]}, "it needs num_hidden_layers=3 of conv, full_attention"),
        ("lfm2", {"conv_bias": True}, "conv_bias=True, which is not supported; supported: False"),
        ("lfm2", {"rope_parameters": None}, "has no 'rope_theta', which a 'lfm2' model needs"),
        ("lfm3", {"layer_types": ["conv"]}, "num_hidden_layers=4 of conv, full_attention, sliding_attention"),
        ("lfm3", {"conv_bias": True}, "conv_bias=True, which is not supported; supported: False"),
        ("cwm", {"rope_parameters": None}, "has no 'rope_theta', which a 'cwm' model needs"),
        ("sarvam_moe", {"use_qkv_bias": True}, "use_qkv_bias=True, which is not supported; supported: False"),
        (
            "sarvam_mla",
            {"score_function": "softmax"},
            "score_function='softmax', which is not supported; supported: 's",
        ),
        ("iquestcoder", {"clip_qkv": 8.0}, "has options that shardlm does not know .*: clip_qkv=8.0"),
        ("mellum", {"mlp_layer_types": ["sparse"]}, "it needs num_hidden_layers=3 of dense, sparse"),
        ("nemotron_h", {"layers_block_type": None}, "no layers_block_type and no hybrid_override_pattern"),
        ("nemotron_h", {"layers_block_type": ["mlp"]}, "'mlp' as first layer: each mlp and moe has to stand behind a"),
        ("nemotron_h", {"layers_block_type": "M-E"}, "layer 2, 'moe', behind 'mlp': each mlp and moe has to stand"),
        ("nemotron_h", {"layers_block_type": "MX"}, "a layer 'X' in 'MX'; layers are of M, "),
        ("nemotron_h", {"use_bias": True}, "use_bias=True, which is not supported"),
        ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope=False, which is not supported; supported: True"),
        ("kimi_linear", {"layer_types": ["linear_attention"]}, "it needs num_hidden_layers=4 of full_attention, lin"),
        (
            "kimi_linear",
            {"layer_types": None, "linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": [2, 3]}},
            "together need each number from 1 to num_hidden_layers=4 once",
        ),
        ("bailing_hybrid", {"layer_types": ["conv"] * 3}, "it needs num_hidden_layers=3 of full_attention, linear"),
        ("bailing_hybrid", {"attention_bias": True}, "attention_bias=True, which is not supported; supported: False"),
        (
            "hy_v4",
            {"indexer_types": ["shared"] * 4},
            "it needs num_hidden_layers=4 of full and shared, the first of th",
        ),
        ("gpt_neox", {"hidden_act": "gelu_fast"}, "hidden_act='gelu_fast'; supported: silu"),
        ("mistral_large4", {"kv_source_layers": [0, 0, 2, 2]}, r"supported: None, \[0, 1, 2, 3\]"),
        (
            "mistral_large4",
            {"no_rope_layers": [1]},
            r"no_rope_layers=\[1\]; it needs num_hidden_layers=4 of 0, 1, or",
        ),
        ("hy_v4", {"n_group": 2}, "n_group=2, which is not supported; supported: 1"),
        ("lara_mini", {"layer_types": ["conv"] * 4}, "num_hidden_layers=4 of full_attention, linear_attention, slid"),
        ("muse_glimmer", {"layer_rope_theta": [500.0] * 4}, "it needs num_hidden_layers=4 of 0 and rope_theta=10000"),
        ("minimax", {"mlp_beta_factor": 2}, "mlp_beta_factor=2, which is not supported; supported: 1"),
        ("minimax", {"layer_types": None, "attn_type_list": [0, 2, 1, 0]}, "needs num_hidden_layers=4 of full_att"),
        ("minimax", {"hidden_act": "gelu"}, "hidden_act='gelu', which is not supported; supported: 'silu'"),
        ("longcat_flash", {"zero_expert_type": "copy"}, "zero_expert_type='copy', which is not supported; supported"),
        (
            "longcat_flash",
            {"q_lora_rank": None},
            "config.json has no 'q_lora_rank', which a 'longcat_flash' model needs",
        ),
        ("longcat_flash", {"num_layers": 0}, "num_layers=0; it needs a whole number of at least 1"),
        ("minimax_m3", {"index_n_heads": 4}, "index_n_heads=4; supported: num_key_value_heads=2"),
        ("minimax_m3", {"swiglu_limit": 5.0}, "swiglu_limit=5.0, which is not supported; supported: 7.0"),
        ("minimax_m3", {"layer_types": ["conv"] * 4}, "num_hidden_layers=4 of minimax_m3_sparse, full_attention"),
        ("minimax_m3", {"index_topk_blocks": 2}, "blocks=2, block=3, last=2: each must be at least 1, and blocks more"),
        ("glm5_next", {"indexer_types": ["full", "full", "shared"]}, "of layers that attend to tokens full: each ch"),
        ("glm5_next", {"index_kpool_always_select_tail": False}, "=False, which is not supported; supported: True"),
        ("glm5_next", {"layer_types": ["linear_attention"]}, "it needs num_hidden_layers=3 of linear_attention, ind"),
        ("glm5_next", {"index_topk": 7}, "budget=7, block=3: each must be at least 1, and budget a multiple of block"),
        ("glm5_next", {"swiglu_limit": 0.0}, "swiglu_limit=0.0; it needs a number above 0"),
        ("mimo_v2_flash", {"swa_num_key_value_heads": 4}, "=4, which is not supported; supported: 2"),
        ("step3p5", {"attention_other_setting": {"head_dim": 4}}, "supported: other heads of queries alone"),
        (
            "step3p5",
            {"per_layer_config": {"0": {"num_attention_heads": 6}}},
            "supported: {'1': {'num_attention_heads': 6",
        ),
        ("step3p5", {"zero_centered": False}, "zero_centered=False, which is not supported; supported: True"),
        ("qwen4_exp", {"ple_layer_ids": [2]}, r"ple_layer_ids=\[2\]; supported: layers of linear attention, \[1, 3\]"),
        ("qwen4_exp", {"eos_token_id": None}, "eos_token_id=None, which ends what n-grams see; it needs a token"),
        ("qwen4_exp", {"indexer_budget": None}, "an indexer without indexer_budget; set all of them or none"),
        ("qwen4_exp", {"indexer_kv_heads": 2}, "indexer_kv_heads=2, which is not supported; supported: 1"),
        ("qwen4_exp", {"output_gate_type": "tanh"}, "output_gate_type='tanh'; supported: silu, sigmoid"),
        ("qwen4_exp", {"layer_types": ["full_attention"]}, "it needs num_hidden_layers=3 of linear_attention, indexed"),
        ("solar_open", {"use_qk_norm": True}, "use_qk_norm=True, which is not supported; supported: False"),
    ],
)
def test_an_option_that_is_not_followed_is_refused_by_name(name, changes, message):
    with pytest.raises(ShardlmError, match=message):
        registry.transformer(options_of(name) | changes)


def test_a_published_form_gives_the_same_model():
    """Gemma 4's options as published say each size once; Kimi K2's are DeepSeek V3's; Kimi Linear's layers have
    numbers, Hunyuan A13B's sizes are said of each, InternLM 3's biases and much of MiMo-V2 and Step 3.5 have other
    names."""
    written = options_of("gemma4_moe")
    published = written | {"global_head_dim": 16, "num_global_key_value_heads": 1}
    del published["per_layer_config"]
    assert registry.transformer(published) == registry.transformer(written)
    latent = options_of("deepseek_v3")
    assert registry.transformer(latent | {"model_type": "kimi_k2"}) == registry.transformer(latent)
    written = options_of("kimi_linear")
    assert registry.longest(written) == 64  # model_max_length
    sizes = {"num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 4}
    linear = {"linear_attn_config": {"kda_layers": [1, 2, 4], "full_attn_layers": [3], **sizes}}
    published = {name: value for name, value in written.items() if name not in ("layer_types", "mlp_layer_types")}
    published = {name: value for name, value in published.items() if not name.startswith("linear_")}
    assert registry.transformer(published | linear) == registry.transformer(written)
    written = options_of("mimo_v2_flash")
    aside = ("layer_types", "mlp_layer_types", "rope_parameters", "rms_norm_eps", "routed_scaling_factor")
    published = {name: value for name, value in written.items() if name not in aside}
    published |= {"layernorm_epsilon": 1e-5, "sliding_window": 5, "sliding_window_size": 5, "scoring_func": "sigmoid"}
    published |= {"hybrid_layer_pattern": [0, 1, 1, 1], "moe_layer_freq": [0, 1, 1, 1], "swa_num_key_value_heads": 2}
    published |= {"rope_theta": 5_000_000, "swa_rope_theta": 10_000, "partial_rotary_factor": 0.334}
    assert registry.transformer(published) == registry.transformer(written)
    written = options_of("step3p5")
    aside = ("mlp_layer_types", "rope_parameters", "n_routed_experts", "num_sliding_attention_heads")
    aside += ("per_layer_config", "num_key_value_heads", "query_pre_attn_scalar", "num_experts_per_tok")
    published = {name: value for name, value in written.items() if name not in aside}
    kinds = [*written["layer_types"], "sliding_attention"]  # of a module that predicts further tokens too
    published |= {"layer_types": kinds, "num_nextn_predict_layers": 1, "moe_layers_enum": "1,2,3", "moe_top_k": 2}
    published |= {"rope_theta": [500.0, 1e4, 1e4, 500.0, 1e4], "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5, 1.0]}
    published |= {
        "moe_num_experts": 4,
        "num_attention_groups": 2,
        "attention_other_setting": {"num_attention_heads": 6},
    }
    assert registry.transformer(published) == registry.transformer(written)
    written = options_of("minimax")
    aside = ("layer_types", "rope_parameters", "block_size", *(name for name in written if name.endswith("_factor")))
    published = {name: value for name, value in written.items() if name not in aside}
    published |= {"model_type": "minimax_m1", "attn_type_list": [0, 0, 1, 0], "rope_theta": 1e6, "rotary_dim": 12}
    published |= {"postnorm": True, "layernorm_linear_attention_alpha": 1.3, "layernorm_full_attention_alpha": 1.2}
    published |= {"layernorm_mlp_alpha": 0.8, "layernorm_mlp_beta": 1.0, "shared_intermediate_size": 0}
    assert registry.transformer(published) == registry.transformer(written)
    written = options_of("minimax_m3")
    aside = ("layer_types", "mlp_layer_types", *(name for name in written if name.startswith("index_")))
    published = {name: value for name, value in written.items() if name not in aside} | {"hidden_act": "swigluoai"}
    sizes = {"sparse_num_index_heads": 2, "sparse_index_dim": 12, "sparse_block_size": 3, "sparse_topk_blocks": 4}
    sizes |= {"sparse_local_block": 2, "sparse_attention_freq": [0, 1, 1, 1]}
    published |= {"sparse_attention_config": sizes, "moe_layer_freq": [0, 1, 1, 1]}
    assert registry.transformer(published) == registry.transformer(written)
    written = options_of("glm5_next")
    published = {name: value for name, value in written.items() if not name.startswith("linear_")}
    sizes = {"head_dim": 8, "num_heads": 4, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0}
    assert registry.transformer(published | {"linear_attn_config": sizes}) == registry.transformer(written)
    written = options_of("hunyuan_moe")
    published = {"moe_topk": [2] * 3, "num_experts": [4] * 3, "moe_intermediate_size": [48] * 3, "use_cla": False}
    assert registry.transformer(written | published) == registry.transformer(written)
    written = options_of("internlm3")
    published = {"qkv_bias": True, "bias": True, "attention_bias": None, "mlp_bias": None}
    assert registry.transformer(written | published) == registry.transformer(written)


def test_projections_of_layers_that_read_others_are_left_alone(tmp_path):
    """As published Gemma 4 has them; a tensor that is nowhere used is still named."""
    folder = shutil.copytree(REFERENCES / "gemma4", tmp_path / "gemma4")
    where = "model.layers.4.self_attn."
    change_tensors(folder, **{f"{where}k_proj.weight": np.ones((32, 32), np.float32)})
    assert shardlm.load(folder).model.config == shardlm.load(REFERENCES / "gemma4").model.config
    change_tensors(folder, **{f"{where}z_proj.weight": np.ones((32, 32), np.float32)})
    with pytest.raises(ShardlmError, match=r"layers\.4\.self_attn\.z_proj\.weight is not known"):
        shardlm.load(folder)


def test_tables_of_ngrams_are_whole_and_of_their_options(tmp_path):
    folder = shutil.copytree(REFERENCES / "qwen4_exp", tmp_path / "qwen4_exp")
    options = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(options | {"seed": 15}))
    with pytest.raises(ShardlmError, match=r"layers\.0\.ple\.ple_embedding\.layer_multipliers is \[\d+, .* mend vocab"):
        shardlm.load(folder)
    (folder / "config.json").write_text(json.dumps(options))
    piece = "model.layers.0.ple.ple_embedding.ngram_embedding.shard_{}.weight"
    change_tensors(folder, **{piece.format(4): np.ones((62, 8), np.float32)})
    with pytest.raises(ShardlmError, match=r"ngram_embedding\.weight is in 4 pieces, of which shard_3 is missing"):
        shardlm.load(folder)
    change_tensors(folder, **{piece.format(3): np.ones((62, 8), np.float32)})
    with pytest.raises(ShardlmError, match=r"ngram_embedding\.weight: its pieces differ in dtype or width"):
        shardlm.load(folder)


def test_entries_of_one_kind_end_where_those_of_another_do():
    config = json.loads((REFERENCES / "deepseek_v4" / "config.json").read_text())
    config["compress_rates"]["heavily_compressed_attention"] = 3
    with pytest.raises(ShardlmError, match="entries of 2 tokens for compressed_sparse_attention and of 3 for heavily"):
        registry.transformer(config)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "gemma4",
            {"mesh": MeshSpec(data=1, fsdp=2, context=2)},
            "no formulas for layers that read the keys and values of others over context and inputs of each layer's "
            "own over context, which this model has: choose a mesh of data, fsdp and tensor",
        ),
        ("llama4", {}, "no formulas for attention within chunks of 7 tokens in rows of 16"),
        ("deepseek_v4", {"mesh": MeshSpec(pipeline=2)}, "pipeline=2: layers of the model look at the tokens"),
        ("minimax_m3", {"mesh": MeshSpec(context=2)}, "context=2: each kv head of the model attends to blocks of its"),
        ("glm5_next", {"mesh": MeshSpec(pipeline=2)}, "pipeline=2: layers of the model have several streams, or what"),
        ("longcat_flash", {"mesh": MeshSpec(pipeline=2)}, "=2: layers of the model have several streams, or what is"),
        (
            "qwen4_exp",
            {},
            "queries that attend to chosen blocks of tokens in rows of 16 and layers that look up n-grams and",
        ),
        (
            "gemma4",
            {"mesh": MeshSpec(pipeline=2)},
            "pipeline=2: layers of the model read the keys and values of others",
        ),
        (
            "gemma4",
            {"mesh": MeshSpec(data=1, fsdp=16)},
            "embed=8 cannot be split over fsdp=16; choose fsdp from 1, ",
        ),
    ],
)
def test_what_is_not_planned_is_refused_by_name(name, changes, message):
    train = TrainConfig(global_batch=32, seq_len=16, accumulation=2)
    config = RunConfig(model=Pretrained(str(REFERENCES / name)), train=train, mesh=MeshSpec(data=1))
    with pytest.raises(ShardlmError, match=message):
        Sketch.of(dataclasses.replace(config, **changes), GPUS["h100"])


def test_frequencies_that_are_learned_stay_in_one_stage():
    config = registry.transformer(options_of("mistral_large4") | {"indexer_types": ["full"] * 4})
    with pytest.raises(ShardlmError, match="pipeline=2: layers of the model turn by frequencies that are learned, wh"):
        config.check_stages(2)


def test_chunks_that_no_row_exceeds_are_planned():
    train, model = TrainConfig(global_batch=16, seq_len=4), Pretrained(str(REFERENCES / "llama4"))
    assert Sketch.of(RunConfig(model=model, train=train, mesh=MeshSpec(data=1)), GPUS["h100"]).shape.kinds


def test_heads_of_two_sizes_are_not_kept_in_int8():
    spec = MeshSpec()
    with jax.set_mesh(mesh_of(spec)):
        shape = registry.transformer(options_of("gemma4_moe"))
        model = ModelDef.make(shape, Execution(Rules.make("zero3", spec).for_decoding(), kv_cache="int8"))
        with pytest.raises(ShardlmError, match="int8 a scale for each head; choose auto or fp8"):
            cache_entries(model)


def test_a_page_holds_several_layers_of_narrow_heads_and_none_that_read():
    """Seven layers, of which the last four read the second's or the third's: two narrow ones share a place."""
    shape = registry.transformer(options_of("gemma4"))
    assert shape.sources == (0, 1, 2, 1, 2, 1, 2) and shape.sharing(1) == (2, 2, 1, 2, 1, 2, 1)
    windows = [block.attention.window for block in shape.blocks()]
    found = layout_of(windows, 9, 64, 4, 8, shape.sharing(1), shape.sources)
    assert found == PageLayout(
        9, (0, 6), ((1, 0), (1, 0), (0, 0), (1, 0), (0, 0), (1, 0), (0, 0)), parts=(0, 1, 0, 1, 0, 1, 0)
    )
    assert found.layers == 1
