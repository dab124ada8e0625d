"""The options of older families' published checkpoints, as tests/hf/test_published.py has those of others; what they
may say that is not followed, and what is theirs alone."""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from published_sizes import common, parameters
from small import mesh_of
from test_opening import change_tensors

from shardlm.errors import ShardlmError
from shardlm.execution import stored_dtype
from shardlm.hardware import GPUS
from shardlm.layers.param import Execution
from shardlm.mesh import MeshSpec
from shardlm.models import registry
from shardlm.models.pretrained import Pretrained
from shardlm.ops.routing import sparsely_mixed
from shardlm.plan.cluster import Cluster
from shardlm.plan.serving.case import ServedModel, ServingCase
from shardlm.rules import Rules
from shardlm.serve.engine_config import EngineConfig
from shardlm.serve.prefill import chosen
from shardlm.state import ModelDef, cache_entries

REFERENCES = pathlib.Path(__file__).parent / "references"
LONG = {"type": "longrope", "short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
PLAIN = dict.fromkeys(["rms_norm_eps", "rope_theta", "num_key_value_heads"])  # which they do not say
OF_GPT2 = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "layer_norm_epsilon": 1e-5, "use_cache": True}
OF_GPT2 |= {"initializer_range": 0.02, "summary_type": "cls_index", "summary_use_proj": True}
FALCON = {"alibi": False, "apply_residual_connection_post_layernorm": False, "attention_dropout": 0.0, "bias": False}
FALCON |= {"hidden_dropout": 0.0, "layer_norm_epsilon": 1e-5, "parallel_attn": True, "model_type": "falcon"}
FALCON |= {"auto_map": {"AutoConfig": "x"}, "initializer_range": 0.02, "vocab_size": 65024}
CLASSIC = {  # name -> (config.json in the words of its publishers, billions of parameters that they state)
    "OPT 125M": (
        common(12, 768, 12, None, None, 50272, model_type="opt", **PLAIN | {"hidden_act": None}, ffn_dim=3072,
               _remove_final_layer_norm=False, activation_dropout=0.0, activation_function="relu", dropout=0.1,
               do_layer_norm_before=True, init_std=0.02, layerdrop=0.0, max_position_embeddings=2048, prefix="</s>",
               word_embed_proj_dim=768, tie_word_embeddings=None),
        0.125239,
    ),
    "Phi 2": (
        common(32, 2560, 32, 32, 10240, 51200, model_type="phi", rms_norm_eps=None, layer_norm_eps=1e-5,
               hidden_act="gelu_new", embd_pdrop=0.0, resid_pdrop=0.1, partial_rotary_factor=0.4, qk_layernorm=False),
        2.779684,
    ),
    "Phi 3.5 MoE": (
        common(32, 4096, 32, 8, 6400, 32064, model_type="phimoe", attention_bias=True, lm_head_bias=True,
               hidden_dropout=0.0, input_jitter_noise=0.01, router_jitter_noise=0.01, num_local_experts=16,
               num_experts_per_tok=2, output_router_logits=False, router_aux_loss_coef=0.0, sliding_window=131072,
               max_position_embeddings=131072, original_max_position_embeddings=4096,
               rope_scaling=LONG | {"short_mscale": 1.243163121016122, "long_mscale": 1.243163121016122}),
        41.873,
    ),
    "Command R": (
        common(40, 8192, 64, 64, 22528, 256000, model_type="cohere", rms_norm_eps=None, layer_norm_eps=1e-5,
               logit_scale=0.0625, rope_theta=8_000_000.0, use_qk_norm=False, model_max_length=131072,
               attention_bias=False, pad_token_id=0, tie_word_embeddings=None),
        34.981,
    ),
    "Command R+": (
        common(64, 12288, 96, 8, 33792, 256000, model_type="cohere", rms_norm_eps=None, layer_norm_eps=1e-5,
               logit_scale=0.8333333333333334, rope_theta=75_000_000.0, use_qk_norm=True, attention_bias=False,
               tie_word_embeddings=None),
        103.811,
    ),
    "StableLM 2 1.6B": (
        common(24, 2048, 32, 32, 5632, 100352, model_type="stablelm", rms_norm_eps=None, layer_norm_eps=1e-5,
               partial_rotary_factor=0.25, use_qkv_bias=True, rope_scaling=None),
        1.6445,
    ),
    "StableLM 2 12B": (
        common(40, 5120, 32, 8, 13824, 100352, model_type="stablelm", rms_norm_eps=None, layer_norm_eps=1e-5,
               hidden_dropout=0.0, partial_rotary_factor=0.25, qk_layernorm=True, use_parallel_residual=True,
               use_qkv_bias=False),
        12.143,
    ),
    "Falcon 7B": (
        FALCON | {"hidden_size": 4544, "num_attention_heads": 71, "num_hidden_layers": 32, "multi_query": True,
                  "new_decoder_architecture": False},
        6.922,
    ),
    "Falcon 40B": (
        FALCON | {"hidden_size": 8192, "num_attention_heads": 128, "num_hidden_layers": 60, "num_kv_heads": 8,
                  "new_decoder_architecture": True},
        41.3,
    ),
    "Falcon 2 11B": (
        FALCON | {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 60, "num_kv_heads": 8,
                  "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1, "ff_factor": 4, "activation": "gelu",
                  "ffn_hidden_size": 16384, "rope_theta": 5_000_042.0, "rope_scaling": None,
                  "tie_word_embeddings": False, "max_position_embeddings": 8192},
        11.1,
    ),
    "StarCoder": (
        OF_GPT2 | {"model_type": "gpt_bigcode", "activation_function": "gelu", "attention_softmax_in_fp32": True,
                   "inference_runner": 0, "max_batch_size": None, "multi_query": True, "n_embd": 6144, "n_head": 48,
                   "n_inner": 24576, "n_layer": 40, "n_positions": 8192, "pad_key_length": True,
                   "pre_allocate_kv_cache": False, "scale_attention_softmax_in_fp32": True, "scale_attn_weights": True,
                   "validate_runner_input": True, "vocab_size": 49152},
        15.517,
    ),
    "MiniCPM 3 4B": (
        common(62, 2560, 40, 40, 6400, 73448, model_type="minicpm3", dim_model_base=256, scale_emb=12, scale_depth=1.4,
               kv_lora_rank=256, q_lora_rank=768, qk_nope_head_dim=64, qk_rope_head_dim=32, tie_word_embeddings=None,
               rope_scaling={"type": "longrope", "short_factor": [1.0] * 16, "long_factor": [1.0] * 16,
                             "original_max_position_embeddings": 32768}),
        4.07,
    ),
    "DBRX": (
        {"model_type": "dbrx", "d_model": 6144, "emb_pdrop": 0.0, "initializer_range": 0.02, "max_seq_len": 32768,
         "n_heads": 48, "n_layers": 40, "output_router_logits": False, "resid_pdrop": 0.0, "router_aux_loss_coef": 0.05,
         "tie_word_embeddings": False, "vocab_size": 100352, "use_cache": True,
         "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "model_type": "", "rope_theta": 500000},
         "ffn_config": {"ffn_hidden_size": 10752, "model_type": "", "moe_jitter_eps": 0.01, "moe_loss_weight": 0.05,
                        "moe_num_experts": 16, "moe_top_k": 4}},
        131.597,
    ),
    "GPT-J 6B": (
        OF_GPT2 | {"model_type": "gptj", "activation_function": "gelu_new", "gradient_checkpointing": False,
                   "n_embd": 4096, "n_head": 16, "n_inner": None, "n_layer": 28, "n_positions": 2048, "rotary": True,
                   "rotary_dim": 64, "scale_attn_weights": True, "tie_word_embeddings": False, "vocab_size": 50400},
        6.0509,
    ),
    "GPT-Neo 1.3B": (
        {"model_type": "gpt_neo", "activation_function": "gelu_new", "attention_dropout": 0,
         "attention_layers": ["global", "local"] * 12, "attention_types": [[["global", "local"], 12]],
         "embed_dropout": 0, "gradient_checkpointing": False, "hidden_size": 2048, "initializer_range": 0.02,
         "intermediate_size": None, "layer_norm_epsilon": 1e-5, "max_position_embeddings": 2048, "num_heads": 16,
         "num_layers": 24, "resid_dropout": 0, "use_cache": True, "vocab_size": 50257, "window_size": 256},
        1.3156,
    ),
    "Persimmon 8B": (
        common(36, 4096, 64, None, 16384, 262144, model_type="persimmon", hidden_act="relu2", layer_norm_eps=1e-5,
               rms_norm_eps=None, hidden_dropout=0.0, partial_rotary_factor=0.5, qk_layernorm=True, rope_scaling=None,
               rope_theta=25000.0, max_position_embeddings=16384),
        9.4,
    ),
    "BLOOM 560M": (
        {"model_type": "bloom", "apply_residual_connection_post_layernorm": False, "attention_dropout": 0.0,
         "attention_softmax_in_fp32": True, "bias_dropout_fusion": True, "hidden_dropout": 0.0, "n_embed": 1024,
         "initializer_range": 0.02, "layer_norm_epsilon": 1e-5, "masked_softmax_fusion": True, "n_inner": None,
         "n_layer": 24, "num_attention_heads": 16, "offset_alibi": 100, "pretraining_tp": 1, "seq_length": 2048,
         "skip_bias_add": True, "skip_bias_add_qkv": False, "slow_but_exact": False, "unk_token_id": 0,
         "use_cache": True, "vocab_size": 250880},
        0.559215,
    ),
    "MPT 7B": (
        {"model_type": "mpt", "d_model": 4096, "emb_pdrop": 0, "embedding_fraction": 1.0, "expansion_ratio": 4,
         "attn_config": {"alibi": True, "alibi_bias_max": 8, "attn_impl": "torch", "attn_pdrop": 0, "clip_qkv": None,
                         "attn_type": "multihead_attention", "attn_uses_sequence_id": False, "prefix_lm": False,
                         "qk_ln": False, "softmax_scale": None},
         "init_config": {"name": "kaiming_normal_"}, "init_device": "cpu", "learned_pos_emb": True, "logit_scale": None,
         "max_seq_len": 2048, "n_heads": 32, "n_layers": 32, "no_bias": True, "norm_type": "low_precision_layernorm",
         "resid_pdrop": 0, "tokenizer_name": "EleutherAI/gpt-neox-20b", "verbose": 0, "vocab_size": 50432},
        6.649,
    ),
    "Falcon RW 1B": (
        FALCON | {"hidden_size": 2048, "num_attention_heads": 32, "num_hidden_layers": 24, "alibi": True, "bias": True,
                  "multi_query": False, "parallel_attn": False, "new_decoder_architecture": False, "vocab_size": 50304},
        1.3116,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CLASSIC)
def test_classic_published_options_give_about_the_stated_size(name):
    config, billions = CLASSIC[name]
    assert parameters(config) == pytest.approx(billions * 1e9, rel=0.005)


def options_of(name: str) -> dict:
    return json.loads((REFERENCES / name / "config.json").read_text())


@pytest.mark.parametrize(
    ("name", "usual"),  # as the classes of transformers 5.24 have it
    [
        ("opt", {"activation_function": "relu", "enable_bias": True, "do_layer_norm_before": True}),
        ("opt", {"layer_norm_elementwise_affine": True, "word_embed_proj_dim": 32, "tie_word_embeddings": True}),
        ("phi", {"hidden_act": "gelu_new", "tie_word_embeddings": False}),
        ("phimoe", {"num_experts_per_tok": 2, "tie_word_embeddings": False}),
        ("cohere", {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        ("stablelm", {"qk_layernorm": False, "use_parallel_residual": False, "hidden_act": "silu"}),
        ("falcon", {"new_decoder_architecture": False, "multi_query": True, "parallel_attn": True, "bias": False}),
        ("falcon", {"tie_word_embeddings": True, "activation": "gelu"}),
        ("falcon_new", {"num_ln_in_parallel_attn": 2, "parallel_attn": True}),
        ("gpt_bigcode", {"multi_query": True, "activation_function": "gelu_pytorch_tanh"}),
        ("minicpm3", {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256, "v_head_dim": 8}),
        ("gptj", {"activation_function": "gelu_new", "rotary_dim": 64, "tie_word_embeddings": False}),
        ("gpt_neo", {"activation_function": "gelu_new", "window_size": 256, "tie_word_embeddings": True}),
        ("persimmon", {"qk_layernorm": True, "hidden_act": "relu2"}),
        ("bloom", {"apply_residual_connection_post_layernorm": False, "tie_word_embeddings": True}),
        ("mpt", {"tie_word_embeddings": True, "attn_config": {"alibi_bias_max": 8, "clip_qkv": None}}),
        ("falcon_rw", {"num_ln_in_parallel_attn": None, "new_decoder_architecture": False}),
    ],
)
def test_what_a_classic_does_not_say_is_as_transformers_has_it(name, usual):
    said = options_of(name)
    if name == "gptj":
        said |= {"n_head": 1, "n_embd": 64}  # of which 64 can be rotated
    for option, value in usual.items():
        absent = registry.transformer({key: own for key, own in said.items() if key != option})
        assert absent == registry.transformer({**said, option: value}), option


def test_a_base_of_dbrx_that_its_attention_says():
    said = options_of("dbrx")
    inside = {key: own for key, own in said.items() if key not in ("rope_parameters", "rope_theta")}
    inside["attn_config"] = said["attn_config"] | {"rope_theta": 500.0}
    of_all = {**inside, "rope_theta": 500.0, "attn_config": {**said["attn_config"], "rope_theta": None}}
    assert registry.transformer(inside) == registry.transformer(of_all) != registry.transformer(said)
    with pytest.raises(ShardlmError, match=r"rope_theta=500\.0 in attn_config and 10000\.0 in rope_parameters; remove"):
        registry.transformer({**said, "attn_config": inside["attn_config"]})


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("opt", {"word_embed_proj_dim": 16}, "word_embed_proj_dim=16 of hidden_size=32.* choose another size of OPT"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before=False, as OPT 350M alone"),
        ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm=True, which is not supported"),
        ("phimoe", {"num_experts_per_tok": 4}, "num_experts_per_tok=4, which is not supported; supported: 2"),
        ("falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn=2, which is not supported"),
        ("falcon_new", {"parallel_attn": False}, "parallel_attn=False, which is not supported"),
        ("gpt_bigcode", {"scale_attn_weights": False}, "scale_attn_weights=False, which is not supported"),
        ("minicpm3", {"attention_bias": True}, "attention_bias=True, which is not supported"),
        ("dbrx", {"attn_config": {"kv_n_heads": 2, "qk_ln": True}}, "in attn_config' has.* not know.*: qk_ln=True"),
        ("dbrx", {"ffn_config": {"moe_normalize_expert_weights": 2.0}}, "supported: None, 1"),
        ("dbrx", {"ffn_config": {"ffn_act_fn": {"name": "silu", "beta": 2}}}, "does not know.*: beta=2"),
        ("gptj", {"rotary_dim": None}, "has no 'rotary_dim'"),
        ("gptj", {"scale_attn_weights": False}, "scale_attn_weights=False, which is not supported"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "layernorm=True, which is not supported"),
        ("mpt", {"attn_config": {"alibi": False}}, "alibi=False, which is not supported; supported: True"),
        ("mpt", {"attn_config": {"qk_ln": True}}, "qk_ln=True, which is not supported"),
        ("gpt_neo", {"attention_types": [[["global"], 2]]}, "needs num_layers=3 of global, local together"),
    ],
)
def test_what_a_classic_may_say_that_is_refused(name, changes, message):
    with pytest.raises(ShardlmError, match=message):
        registry.transformer({**options_of(name), **changes})


def test_keys_with_positions_are_not_kept_in_8_bits():
    spec = MeshSpec()
    with jax.set_mesh(mesh_of(spec)):
        shape = registry.transformer(options_of("bloom"))
        for held in ("fp8", "int8"):
            model = ModelDef.make(shape, Execution(Rules.make("zero3", spec).for_decoding(), kv_cache=held))
            refused = f"^kv_cache_dtype={held}: keys of the model have their positions"
            with pytest.raises(ShardlmError, match=refused):
                cache_entries(model)
            served, engine = ServedModel.of_folder(REFERENCES / "bloom"), EngineConfig(kv_cache_dtype=held)
            with pytest.raises(ShardlmError, match=refused):  # on any mesh: none is looked for
                ServingCase(served, Cluster.of(GPUS["h100"], 1), engine, 20, 9)


def test_prompts_whose_keys_have_positions_attend_over_pages():
    """Whose kernel takes any width; of cuDNN's for narrower values not every version has them."""
    spec = MeshSpec()
    with jax.set_mesh(mesh_of(spec)):
        execution = Execution(Rules.make("zero3", spec).for_decoding(), dtype=jnp.bfloat16, attention="cudnn")
        ways = [
            chosen("auto", ModelDef.make(registry.transformer(options_of(name)), execution), False)
            for name in ("bloom", "falcon")
        ]
    assert [how.whole for how, _ in ways] == ["pages", "cudnn"] and "linear biases" in ways[0][1]


def test_positions_that_a_config_does_not_say():
    assert registry.longest(CLASSIC["Falcon 40B"][0]) == registry.longest(CLASSIC["BLOOM 560M"][0]) == 2048
    assert registry.longest({"model_type": "bloom"}) == 2048 and registry.longest({}) == 0
    for name in ("opt", "gpt_neo"):  # as many as their tables have
        said = {key: own for key, own in options_of(name).items() if key != "max_position_embeddings"}
        assert registry.longest(said) == registry.transformer(said).max_positions == 2048
    command_r = CLASSIC["Command R"][0] | {"max_position_embeddings": 8192}  # as published
    assert registry.longest(command_r) == 131072


def test_a_dtype_that_a_config_does_not_say_is_that_of_the_files(tmp_path):
    """BLOOM's and GPT-J's first ones; of config.json alone it is float32."""
    folder = shutil.copytree(REFERENCES / "bloom", tmp_path / "bloom")
    said = {name: value for name, value in options_of("bloom").items() if name != "dtype"}
    (folder / "config.json").write_text(json.dumps(said))
    change_tensors(folder, **{"word_embeddings_layernorm.bias": np.zeros(36, np.float32)})
    assert stored_dtype(Pretrained(str(folder))) == "bfloat16"
    (folder / "model.safetensors").unlink()
    assert stored_dtype(Pretrained(str(folder))) == "float32"


def test_galactica_says_of_its_positions_that_they_are_learned():
    said = options_of("galactica")
    published = said | {"learned_embeddings": True, "scale_embeddings": False}
    assert registry.transformer(published) == registry.transformer(said)
    with pytest.raises(ShardlmError, match="learned_embeddings=False, which is not supported"):
        registry.transformer(said | {"learned_embeddings": False})
    with pytest.raises(ShardlmError, match=r"does not know.*: scale_embeddings=True"):
        registry.transformer(said | {"scale_embeddings": True})


def test_experts_one_after_the_other_weigh_against_their_rivals():
    """By hand: of 4, 3.9, 1 and -1 with a jitter of 0.05 the rivals of 4 are 4 and 3.9; of 3.9 there are none."""
    weights, experts = sparsely_mixed(np.float32([[4.0, 3.9, 1.0, -1.0]]), 2, 0.05)
    assert experts.tolist() == [[0, 1]]
    np.testing.assert_allclose(weights, [[1 / (1 + np.exp(-0.1)), 1.0]], rtol=1e-6)
    assert sparsely_mixed(np.float32([[4.0, 3.9, 1.0, -1.0]]), 2, 0.0)[0].tolist() == [[1.0, 1.0]]
