"""MiniMax M3's eyes against transformers."""

import json
import pathlib

import pytest
from seeing import Eyes, close, lively, noise, written
from served import SIZES, Family, asked, drawn, held_to_transformers, replies, with_tokenizer

from shardlm import LLM
from shardlm.errors import ShardlmError
from shardlm.vision.registry import sight_of

torch = pytest.importorskip("torch", reason="what transformers made is in references/")
transformers = pytest.importorskip("transformers", reason="what transformers made is in references/")

TOKEN = 90
TOKENS = {"]<]start of image[>[": 91, "]<]end of image[>[": 92}
PREPARED = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 256, "max_pixels": 4096}
IMAGES = [(40, 40), (24, 72), (90, 21)]
TEXT = pathlib.Path(__file__).parents[1] / "hf" / "references" / "minimax_m3" / "config.json"


def made():
    torch.manual_seed(0)
    config = transformers.MiniMaxM3VLConfig(
        vision_config={
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
            "patch_size": 4,
        },
        text_config=json.loads(TEXT.read_text()) | {"max_position_embeddings": 256},
        image_token_index=TOKEN, projector_hidden_size=40,
    )  # fmt: skip
    return lively(transformers.MiniMaxM3SparseForConditionalGeneration(config).eval())


@pytest.fixture(scope="module")
def model():
    return made()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    return written(model, tmp_path_factory.mktemp("minimax_m3_vl"), TOKENS, preprocessor_config=PREPARED)


@pytest.fixture(scope="module")
def eyes(folder):
    return Eyes(folder)


def processed(images):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(**PREPARED)(images, input_data_format="channels_last", return_tensors="pt")


@torch.no_grad()
def test_vectors_are_those_of_transformers(eyes, model):
    for size in IMAGES:
        picture, inputs = eyes.sight.prepare(noise(*size)), processed([noise(*size)])
        vectors = model.model.get_image_features(**inputs).pooler_output[0].numpy()
        for patches in {picture.patches, 256}:
            close(eyes.vectors(picture, patches), vectors)
        assert eyes.sight.tokens(picture) == [91, *[TOKEN] * len(vectors), 92]


def test_sizes(folder, model, tmp_path):
    """As published, which says [672, 672]."""
    config = json.loads((folder / "config.json").read_text())
    own = {name: value for name, value in PREPARED.items() if "pixels" not in name} | {"size": [672, 672]}
    other = written(None, tmp_path, TOKENS, preprocessor_config=own)
    images = sight_of(other, config).prepare
    assert (images.fewest, images.most) == (3136, 451_584)
    with pytest.raises(ShardlmError, match="spin=1"):
        sight_of(folder, config | {"vision_config": config["vision_config"] | {"spin": 1}})


@pytest.mark.wide
def test_replies_are_those_of_transformers(tmp_path):
    model = drawn(made())
    folder = written(model, tmp_path, TOKENS, preprocessor_config=PREPARED)
    with_tokenizer(folder, 96, TOKENS | {"]<]image[>[": TOKEN, "<|endoftext|>": 94})
    first, second = noise(24, 40), noise(60, 21, 1)
    asks = [([2, 5, TOKEN, 6], [first]), ([2, TOKEN, 9, TOKEN, 16], [second, first]), ([2, 40, 41], [])]
    llm = LLM(folder, **SIZES)
    family = Family(folder, model, lambda given, ids: dict(processed(list(given))) if given else {})
    held_to_transformers(family, llm, asks)
    assert replies(asked(llm, asks)) == replies(asked(llm, asks))
