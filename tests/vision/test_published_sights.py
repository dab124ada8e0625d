"""config.json in the form that checkpoints are published in, most of it left to the defaults of transformers: each
opens, text and eyes."""

import json
import tracemalloc

import jax
import jax.numpy as jnp
import more_published_configs
import numpy as np
import published_configs
import pytest
from served import with_tokenizer

from shardlm.errors import ShardlmError
from shardlm.mesh import MeshSpec
from shardlm.models import registry
from shardlm.vision.encoder import Encoder
from shardlm.vision.registry import sight_of

LLAVA = {  # llava-hf/llava-1.5-7b-hf
    "model_type": "llava", "ignore_index": -100, "image_token_index": 32000, "projector_hidden_act": "gelu",
    "vision_feature_layer": -2, "vision_feature_select_strategy": "default", "vocab_size": 32064,
    "text_config": {
        "_name_or_path": "lmsys/vicuna-7b-v1.5", "architectures": ["LlamaForCausalLM"], "model_type": "llama",
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "torch_dtype": "float16", "vocab_size": 32064,
    },
    "vision_config": {
        "hidden_size": 1024, "image_size": 336, "intermediate_size": 4096, "model_type": "clip_vision_model",
        "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "projection_dim": 768,
        "vocab_size": 32000,
    },
}  # fmt: skip
PIXTRAL = {  # mistral-community/pixtral-12b
    "model_type": "llava", "image_token_index": 10, "projector_hidden_act": "gelu", "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full", "image_seq_length": 1,
    "text_config": {
        "head_dim": 128, "hidden_size": 5120, "intermediate_size": 14336, "is_composition": True,
        "max_position_embeddings": 1024000, "model_type": "mistral", "num_hidden_layers": 40,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e9, "sliding_window": None,
        "vocab_size": 131072,
    },
    "vision_config": {
        "head_dim": 64, "hidden_act": "silu", "image_size": 1024, "is_composition": True, "model_type": "pixtral",
        "patch_size": 16, "rope_theta": 10000.0, "tie_word_embeddings": False,
    },
}  # fmt: skip
MISTRAL3 = {  # mistralai/Mistral-Small-3.1-24B-Instruct-2503
    "model_type": "mistral3", "image_token_index": 10, "multimodal_projector_bias": False,
    "projector_hidden_act": "gelu", "spatial_merge_size": 2, "vision_feature_layer": -1,
    "text_config": {
        "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
        "intermediate_size": 32768, "max_position_embeddings": 131072, "model_type": "mistral",
        "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
        "rope_theta": 1e9, "sliding_window": None, "use_cache": True, "vocab_size": 131072,
    },
    "vision_config": {
        "attention_dropout": 0.0, "head_dim": 64, "hidden_act": "silu", "hidden_size": 1024, "image_size": 1540,
        "intermediate_size": 4096, "model_type": "pixtral", "num_attention_heads": 16, "num_channels": 3,
        "num_hidden_layers": 24, "patch_size": 14, "rope_theta": 10000.0,
    },
}  # fmt: skip
GEMMA3 = {  # google/gemma-3-4b-it
    "model_type": "gemma3", "boi_token_index": 255999, "eoi_token_index": 256000, "image_token_index": 262144,
    "mm_tokens_per_image": 256,
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
    "vision_config": {
        "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "model_type": "siglip_vision_model",
        "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
    },
}  # fmt: skip
SMOLVLM = {  # HuggingFaceTB/SmolVLM2-2.2B-Instruct
    "model_type": "smolvlm", "image_token_id": 49190, "scale_factor": 3, "tie_word_embeddings": False,
    "text_config": {
        "_flash_attn_2_enabled": True, "architectures": ["VLlama3ForCausalLM"], "head_dim": 64, "hidden_size": 2048,
        "intermediate_size": 8192, "is_llama_config": True, "max_position_embeddings": 8192, "model_type": "llama",
        "neftune_noise_alpha": 0.0, "num_hidden_layers": 24, "pad_token_id": 2, "perceiver_config": {"attention": 1},
        "pixel_shuffle_factor": 3, "qk_layer_norms": False, "rms_norm_eps": 1e-5, "rope_interleaved": False,
        "rope_theta": 130000, "torch_dtype": "bfloat16", "use_resampler": False, "vocab_size": 49280,
    },
    "vision_config": {
        "hidden_size": 1152, "image_size": 384, "intermediate_size": 4304, "max_image_size": {"longest_edge": 384},
        "model_type": "smolvlm_vision", "num_hidden_layers": 27, "patch_size": 14, "size": {"longest_edge": 1536},
        "tie_word_embeddings": False, "use_base_siglip": False,
    },
}  # fmt: skip
ENDS = {"[IMG_BREAK]": 12, "[IMG_END]": 13}
SPLIT = {f"<row_{r}_col_{c}>": 100 + 10 * r + c for r in range(1, 7) for c in range(1, 7)}
CASES = {  # config, special tokens, what prepares images, layers, (vectors of an image of 500 x 300, patches of one)
    "llava": (LLAVA, {}, {"crop_size": {"height": 336, "width": 336}, "size": {"shortest_edge": 336}}, 32, 576, 23),
    "pixtral": (PIXTRAL, ENDS, {"size": {"longest_edge": 1024}, "patch_size": {"height": 16}}, 40, 32 * 19, 24),
    "mistral3": (MISTRAL3, ENDS, {"size": {"longest_edge": 1540}, "patch_size": 14}, 40, 18 * 11, 24),
    "gemma3": (GEMMA3, {"\n": 107, "\n\n": 108}, {"size": {"height": 896, "width": 896}}, 34, 256, 27),
    "smolvlm": (
        SMOLVLM,
        SPLIT | {"<fake_token_around_image>": 90, "<global-img>": 91, "\n": 92, "\n\n": 93},
        {"max_image_size": {"longest_edge": 384}, "size": {"longest_edge": 1536}, "resample": 1},
        24,
        13 * 81,  # 4 x 3 tiles and one of all
        27,
    ),
}
CASES |= published_configs.CASES | more_published_configs.CASES


@pytest.mark.parametrize("name", CASES)
def test_a_published_checkpoint_opens(name, tmp_path):
    config, tokens, prepared, text_layers, vectors, layers = CASES[name]
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(prepared))
    with_tokenizer(tmp_path, 200, tokens)
    text = registry.transformer(config)
    assert text.num_layers == text_layers
    sight = sight_of(tmp_path, config)
    assert sight.encoder.tower.layers == layers and sight.encoder.width == text.embed_dim
    picture = sight.prepare(np.zeros((300, 500, 3), np.uint8))
    assert picture.vectors == vectors and picture.patches <= sight.sizes[-1]
    assert sum(token in (sight.vector, *sight.also) for token in sight.tokens(picture)) == vectors
    mesh, size = MeshSpec().build(jax.devices()[:1]), sight.sizes[0]
    encoder = Encoder.make(sight.encoder, jnp.bfloat16, mesh)
    with jax.set_mesh(mesh):
        count = jax.ShapeDtypeStruct((), jnp.int32)
        made = jax.eval_shape(encoder, encoder.shapes, encoder.inputs(size), count)
    width = (1 + sight.deep) * text.embed_dim
    assert (made.shape, made.dtype) == ((size // sight.merged, width), jnp.bfloat16)


@pytest.mark.parametrize("name", CASES)
def test_images_that_are_almost_a_line_take_little_memory(name, tmp_path):
    """Or are refused: of 1 x 32768 pixels LLaVA's shorter side makes 336 x 11 million."""
    config, tokens, prepared, *_ = CASES[name]
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(prepared))
    with_tokenizer(tmp_path, 200, tokens)
    sight = sight_of(tmp_path, config)
    for shape in ((1, 32768), (32768, 1), (2, 32768), (1, 1)):
        tracemalloc.start()
        try:
            picture = sight.prepare(np.zeros((*shape, 3), np.uint8))
            assert picture.patches <= sight.sizes[-1]
        except ShardlmError as error:
            assert (max(shape) > 1 or name == "lighton_ocr") and "crop it" in str(error)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert most < 2**29, shape


def test_an_image_that_is_made_a_square_has_a_bound(tmp_path):
    config, tokens, prepared, *_ = CASES["llava"]
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(prepared | {"do_pad": True}))
    with_tokenizer(tmp_path, 200, tokens)
    prepare = sight_of(tmp_path, config).prepare
    assert prepare(np.zeros((3, 2000, 3), np.uint8)).vectors == 576
    with pytest.raises(ShardlmError, match="an image of 32768 x 1 pixels becomes one of 32768 x 32768 for this model"):
        prepare(np.zeros((1, 32768, 3), np.uint8))
