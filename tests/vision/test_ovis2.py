"""Ovis 2's eyes against transformers."""

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

IMAGE, ATOM, AROUND = 54, 55, (56, 57, 58, 59, 60)
START, GRID, COLUMN, ROW, END = AROUND
TOKENS = {"<image>": IMAGE, "<IMG_START>": START, "<IMG_GRID>": GRID, "<IMG_COL>": COLUMN, "<IMG_ROW>": ROW}
TOKENS |= {"<IMG_END>": END}
PREPARED = {"size": {"height": 16, "width": 16}, "max_patches": 5, "crop_to_patches": True}
IMAGES = [(16, 16), (40, 30), (300, 170), (9, 90), (32, 16), (20, 50)]


def made():
    torch.manual_seed(0)
    config = transformers.Ovis2Config(
        vision_config={
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
            "patch_size": 4, "image_size": 16, "vocab_size": 45, "hidden_stride": 2, "qkv_bias": True,
        },
        text_config={
            "model_type": "qwen2", "hidden_size": 40, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "eos_token_id": 1,
        },
        image_token_id=ATOM, visual_indicator_token_ids=list(AROUND), hidden_size=40, vocab_size=64,
    )  # fmt: skip
    return lively(transformers.Ovis2ForConditionalGeneration(config).eval())


@pytest.fixture(scope="module")
def model():
    return made()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    return written(model, tmp_path_factory.mktemp("ovis2"), TOKENS, preprocessor_config=PREPARED)


@pytest.fixture(scope="module")
def eyes(folder):
    return Eyes(folder)


def processed(image: np.ndarray):
    """(pixels of tiles, (rows, columns) of them)."""
    from transformers.models.ovis2.image_processing_pil_ovis2 import Ovis2ImageProcessorPil

    made = Ovis2ImageProcessorPil(**PREPARED)(image, return_tensors="pt")
    return made["pixel_values"], made["grids"][0].tolist()


def theirs(grid: tuple[int, int]) -> list[int]:
    """As the processor writes an image's tokens."""
    rows, columns = grid
    own = [ATOM] * 4
    found = [START, *own, GRID]
    for row in range(rows) if rows * columns > 1 else ():
        for column in range(columns):
            found += [*own, *([COLUMN] if column < columns - 1 else [])]
        found += [ROW] if row < rows - 1 else []
    return [*found, END]


@torch.no_grad()
def test_images_and_vectors_are_those_of_transformers(eyes, model):
    seen = set()
    for size in IMAGES:
        expected, grid = processed(noise(*size))
        picture = eyes.sight.prepare(noise(*size))
        seen.add(tuple(grid))
        tokens = eyes.sight.tokens(picture)
        assert picture.tiles == tuple(grid) and tokens == theirs(grid)
        found = picture.inputs["pixels"][: len(expected) * 16].reshape(-1, 2, 2, 2, 2, 4, 4, 3)
        found = found.transpose(0, 7, 1, 3, 5, 2, 4, 6).reshape(-1, 3, 16, 16)
        np.testing.assert_allclose(found, expected.numpy(), atol=1 / 255)
        made = model.model.get_image_features(expected)
        vectors, around = made.pooler_output.reshape(-1, 40).numpy(), made.visual_indicator_features.numpy()
        of_atoms = iter(vectors)
        every = [next(of_atoms) if id == ATOM else around[AROUND.index(id)] for id in tokens]
        close(eyes.vectors(picture), np.array(every))
    assert len(seen) > 3


def test_tokens(eyes):
    assert (eyes.sight.token, eyes.sight.vector, eyes.sight.also) == (IMAGE, ATOM, AROUND)
    ids, [placed] = eyes.sight.expanded([2, IMAGE, 5], [eyes.sight.prepare(noise(16, 16))])
    assert ids == [2, START, *[ATOM] * 4, GRID, END, 5] and placed.takes.tolist() == list(range(1, 8))


def test_what_is_refused(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    for changes, message in (
        ({"tokenize_function": "gumbel_argmax"}, "tokenize_function='gumbel_argmax'"),
        ({"hidden_stride": 3}, "hidden_stride=3 of tiles of 4 patches"),
        ({"num_visual_indicator_tokens": 4}, "num_visual_indicator_tokens=4"),
        ({"spin": 1}, "spin=1"),
    ):
        with pytest.raises(ShardlmError, match=message):
            sight_of(folder, config | {"vision_config": config["vision_config"] | changes})
    with pytest.raises(ShardlmError, match=r"visual_indicator_token_ids=\[1, 2\]"):
        sight_of(folder, config | {"visual_indicator_token_ids": [1, 2]})


@pytest.mark.wide
def test_replies_are_those_of_transformers(tmp_path):
    model = drawn(made())
    folder = written(model, tmp_path, TOKENS, preprocessor_config=PREPARED)
    with_tokenizer(folder, 64, TOKENS | {"<IMG_ATOM>": ATOM})
    first, second = noise(20, 40), noise(60, 10, 1)
    asks = [([2, 5, IMAGE, 6], [first]), ([2, IMAGE, 9, IMAGE, 16], [second, first]), ([2, 40, 41], [])]

    def images(given, ids):
        return {"pixel_values": torch.cat([processed(image)[0] for image in given])} if given else {}

    llm = LLM(folder, **SIZES)
    held_to_transformers(Family(folder, model, images), llm, asks)
    assert replies(asked(llm, asks)) == replies(asked(llm, asks))
