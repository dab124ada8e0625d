"""The eyes of Janus and DeepSeek-VL against transformers."""

import json

import numpy as np
import pytest
from seeing import Eyes, close, lively, noise, written
from served import SIZES, Family, asked, drawn, held_to_transformers, replies, with_tokenizer

from shardlm import LLM
from shardlm.errors import ShardlmError
from shardlm.vision.registry import sight_of

torch = pytest.importorskip("torch", reason="what transformers made is in references/")
transformers = pytest.importorskip("transformers", reason="what transformers made is in references/")

TOKEN, KINDS = 60, ("janus", "deepseek_vl")
TOKENS = {"<begin_of_image>": 61, "<end_of_image>": 62, "<image_placeholder>": TOKEN}
PREPARED = {"size": {"height": 24, "width": 24}, "min_size": 5}
IMAGES = [(24, 24), (40, 30), (300, 170), (9, 90)]
TEXT = {
    "model_type": "llama", "hidden_size": 40, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "eos_token_id": 1,
}  # fmt: skip
EYES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4, "image_size": 24}
OF_JANUS = {"mlp_ratio": 2.0, "projection_dim": 40, "num_image_tokens": 36}
# What draws images, of which nothing is read.
DRAWS = {"base_channels": 32, "channel_multiplier": [1], "num_embeddings": 8, "latent_channels": 32, "embed_dim": 4}
DRAWS |= {"num_res_blocks": 1, "projection_dim": 8, "image_token_embed_dim": 8}


def made(kind: str):
    torch.manual_seed(0)
    if kind == "janus":
        config = transformers.JanusConfig(
            vision_config=EYES | OF_JANUS, text_config=TEXT, vq_config=DRAWS, image_token_id=TOKEN
        )
        return lively(transformers.JanusForConditionalGeneration(config).eval())
    eyes = EYES | {"intermediate_size": 48, "vision_use_head": False, "model_type": "siglip_vision_model"}
    config = transformers.DeepseekVLConfig(vision_config=eyes, text_config=TEXT, image_token_id=TOKEN)
    return lively(transformers.DeepseekVLForConditionalGeneration(config).eval())


@pytest.fixture(scope="module", params=KINDS)
def case(request, tmp_path_factory):
    """(folder, transformers' model, eyes)."""
    model = made(request.param)
    folder = written(model, tmp_path_factory.mktemp(request.param), TOKENS, preprocessor_config=PREPARED)
    return folder, model, Eyes(folder)


def processed(image: np.ndarray):
    from transformers.models.janus.image_processing_pil_janus import JanusImageProcessorPil

    return JanusImageProcessorPil(**PREPARED)(image, return_tensors="pt")["pixel_values"]


@torch.no_grad()
def test_images_and_vectors_are_those_of_transformers(case):
    _, model, eyes = case
    for size in IMAGES:
        expected = processed(noise(*size))
        picture = eyes.sight.prepare(noise(*size))
        found = picture.inputs["pixels"].reshape(6, 6, 4, 4, 3).transpose(4, 0, 2, 1, 3).reshape(3, 24, 24)
        np.testing.assert_allclose(found, expected[0].numpy(), atol=1 / 255)
        vectors = model.model.get_image_features(expected).pooler_output
        close(eyes.vectors(picture), vectors[0].numpy())


def test_tokens(case):
    _, model, eyes = case
    own = [TOKEN] * 36
    assert eyes.sight.tokens(eyes.sight.prepare(noise(16, 32))) == (
        [61, *own, 62] if model.config.model_type == "janus" else own
    )
    assert (eyes.sight.token, eyes.sight.vector, eyes.sight.sizes) == (TOKEN, TOKEN, (36,))


def test_what_is_refused(case, tmp_path):
    folder, model, _ = case
    config = json.loads((folder / "config.json").read_text())
    eyes = config["vision_config"]
    changes = [({"spin": 1}, "spin=1"), ({"num_attention_heads": "2"}, "num_attention_heads='2'")]
    if model.config.model_type == "janus":
        changes += [({"depth": 3}, "depth=3"), ({"num_image_tokens": 9}, "which are 36")]
        changes += [({"use_qk_norm": True}, "use_qk_norm=True")]
    for change, message in changes:
        with pytest.raises(ShardlmError, match=message):
            sight_of(folder, config | {"vision_config": eyes | change})
    for told, message in (({"min_size": 90}, "min_size=90"), ({"size": 48}, "size={'height': 48, 'width': 48}")):
        other = written(None, tmp_path, TOKENS, preprocessor_config=PREPARED | told)
        with pytest.raises(ShardlmError, match=message):
            sight_of(other, config)


@pytest.mark.wide
@pytest.mark.parametrize("kind", KINDS)
def test_replies_are_those_of_transformers(kind, tmp_path, monkeypatch):
    if kind == "janus":  # whose half that draws is too large to keep (references.py)
        monkeypatch.delenv("REFERENCES", raising=False)
    model = drawn(made(kind))
    folder = written(model, tmp_path, TOKENS, preprocessor_config=PREPARED)
    with_tokenizer(folder, 64, TOKENS)
    first, second = noise(20, 40), noise(60, 10, 1)
    asks = [([2, 5, TOKEN, 6], [first]), ([2, TOKEN, 9, TOKEN, 16], [second, first]), ([2, 40, 41], [])]

    def images(given, ids):
        return {"pixel_values": torch.cat([processed(image) for image in given])} if given else {}

    llm = LLM(folder, **SIZES)
    held_to_transformers(Family(folder, model, images), llm, asks)
    assert replies(asked(llm, asks)) == replies(asked(llm, asks))
