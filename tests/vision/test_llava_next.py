"""The eyes of LLaVA-NeXT, of Granite Vision and of LLaVA-OneVision against transformers."""

import json
import math

import numpy as np
import pytest
from seeing import Eyes, close, lively, noise, written
from served import SIZES, Family, asked, drawn, held_to_transformers, replies, with_tokenizer

from shardlm import LLM
from shardlm.errors import ShardlmError
from shardlm.vision.registry import sight_of

torch = pytest.importorskip("torch", reason="what transformers made is in references/")
transformers = pytest.importorskip("transformers", reason="what transformers made is in references/")

TOKEN = 60
IMAGES = [(16, 16), (40, 30), (300, 170), (9, 50), (60, 11), (33, 32)]
SIDES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 4}
CANVASES = [[16, 32], [32, 16], [32, 32], [48, 16], [16, 48]]
OF_18 = [[n // 16 * 18 for n in pair] for pair in CANVASES]  # of which whole patches are read: 16
MANY = [[18 * rows, 18 * columns] for rows in range(1, 5) for columns in range(1, 5)]
TEXT = {
    "hidden_size": 40, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "tie_word_embeddings": False, "eos_token_id": 1,
}  # fmt: skip
SIGLIP = {"model_type": "siglip_vision_model", "image_size": 18, "vision_use_head": False, **SIDES}
# transformers 5.24 does not divide logits by their scale where it sees.
GRANITE = {"model_type": "granite", "embedding_multiplier": 3.0, "logits_scaling": 1.0}
FULL = {"vision_feature_select_strategy": "full"}
KINDS = {  # class, text, vision_config, further options, what prepares images
    "clip": (
        "LlavaNext", {"model_type": "mistral", "head_dim": 16},
        {"model_type": "clip_vision_model", "image_size": 16, **SIDES},
        {"image_grid_pinpoints": CANVASES},
        {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}},
    ),
    "granite": (
        "LlavaNext", GRANITE, SIGLIP,
        {"image_grid_pinpoints": OF_18, "vision_feature_layer": [-2, 1, -1], **FULL},
        {"size": {"height": 18, "width": 18}, "crop_size": {"height": 18, "width": 18}},
    ),
    "onevision": (
        "LlavaOnevision", {"model_type": "qwen2"}, SIGLIP,
        {"image_grid_pinpoints": MANY, "vision_aspect_ratio": "anyres_max_2"},
        {"size": {"height": 18, "width": 18}},
    ),
}  # fmt: skip


def made(kind: str):
    torch.manual_seed(0)
    name, text, vision, further, _ = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(
        vision_config=dict(vision), text_config=TEXT | text, image_token_index=TOKEN, **further
    )
    return lively(getattr(transformers, f"{name}ForConditionalGeneration")(config).eval())


def prepared(kind: str) -> dict:
    *_, further, how = KINDS[kind]
    return how | {"image_grid_pinpoints": further["image_grid_pinpoints"]}


def processed(kind: str, images):
    from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil

    cls = LlavaOnevisionImageProcessorPil if kind == "onevision" else LlavaNextImageProcessorPil
    found = cls(**prepared(kind))(images, return_tensors="pt", input_data_format="channels_last")
    return {name: found[name] for name in ("pixel_values", "image_sizes")}


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def model(kind):
    return made(kind)


@pytest.fixture(scope="module")
def eyes(model, kind, tmp_path_factory):
    return Eyes(written(model, tmp_path_factory.mktemp(kind), {}, preprocessor_config=prepared(kind)))


@torch.no_grad()
def test_images_and_vectors_are_those_of_transformers(eyes, model, kind):
    for size in IMAGES:
        inputs = processed(kind, [noise(*size)])
        [vectors] = model.model.get_image_features(**inputs).pooler_output
        picture = eyes.sight.prepare(noise(*size))
        tiles = inputs["pixel_values"].shape[1]
        assert tiles == math.prod(picture.tiles) + 1
        found = picture.inputs["pixels"][: tiles * 16].reshape(tiles, 4, 4, 4, 4, 3).transpose(0, 5, 1, 3, 2, 4)
        expected = inputs["pixel_values"][0, ..., :16, :16].numpy()
        np.testing.assert_allclose(found.reshape(expected.shape), expected, atol=1 / 255)
        scale = model.config.text_config.embedding_multiplier if kind == "granite" else 1.0
        for patches in {eyes.sight.sizes[-1], next(n for n in eyes.sight.sizes if n >= picture.patches)}:
            close(eyes.vectors(picture, patches), scale * vectors.numpy())
        assert eyes.sight.tokens(picture) == [TOKEN] * len(vectors)


def test_sight(eyes, kind):
    sight = eyes.sight
    assert (sight.token, sight.vector, sight.merged, sight.fewer) == (TOKEN, TOKEN, 1, True)
    counts = {"onevision": (1, 2, 4, 8, 16)}.get(kind, (1, 2, 4))
    assert sight.sizes == tuple(16 * (count + 1) + 4 * count for count in counts) and sight.up_to(1) == sight


@pytest.mark.parametrize(
    "file, told, message",
    [
        ("config.json", {"vision_feature_layer": 4}, "vision_feature_layer=4 of 3 layers"),
        ("config.json", {"vision_feature_layer": [-3, 1]}, "of 3 layers, one of them twice"),
        ("config.json", {"vision_feature_layer": [-1, "x"]}, "a value that nothing can be made of"),
        ("config.json", {"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy='full'"),
        ("config.json", {"image_grid_pinpoints": [[16, 16]]}, "have different image_grid_pinpoints"),
        ("both", {"image_grid_pinpoints": [[16, 32], [16, 24]]}, r"image_grid_pinpoints with \[16, 24\]"),
        ("both", {"image_grid_pinpoints": [[16, 2**28]]}, f"{2**28}.*at most {2**26} pixels"),
        ("preprocessor_config.json", {"size": {"shortest_edge": 24}}, "its encoder reads 16 x 16 pixels"),
        ("preprocessor_config.json", {"do_resize": False}, "do_resize=false"),
    ],
)
def test_what_is_refused(file, told, message, tmp_path):
    folder = written(made("clip"), tmp_path, {}, preprocessor_config=prepared("clip"))
    for name in ("config.json", "preprocessor_config.json") if file == "both" else (file,):
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | told))
    with pytest.raises(ShardlmError, match=message):
        sight_of(folder, json.loads((folder / "config.json").read_text()))


def test_images_that_are_almost_a_line(eyes):
    for size in ((1, 3000), (3000, 1)):
        with pytest.raises(ShardlmError, match="has none left in one direction on a canvas"):
            eyes.sight.prepare(noise(*size))
    assert eyes.sight.prepare(noise(1, 12)).patches <= eyes.sight.sizes[-1]


@pytest.mark.wide
def test_replies_are_those_of_transformers(kind, tmp_path):
    model = drawn(made(kind))
    folder = written(model, tmp_path, {}, preprocessor_config=prepared(kind))
    with_tokenizer(folder, 64, {"<image>": TOKEN})
    first, second = noise(20, 32), noise(64, 60, 1)
    asks = [([2, 5, TOKEN, 6], [first]), ([2, TOKEN, 9, TOKEN, 16], [second, first]), ([2, 40, 41], [])]
    llm = LLM(folder, **SIZES)
    images = lambda given, ids: processed(kind, list(given)) if given else {}  # noqa: E731
    held_to_transformers(Family(folder, model, images), llm, asks)
    assert replies(asked(llm, asks)) == replies(asked(llm, asks))
