"""The eyes of Idefics 3 and SmolVLM against transformers."""

import numpy as np
import pytest
from seeing import Eyes, close, lively, noise, written
from served import SIZES, Family, asked, drawn, held_to_transformers, replies, with_tokenizer

from shardlm import LLM
from shardlm.vision.smolvlm_images import learned

torch = pytest.importorskip("torch", reason="what transformers made is in references/")
transformers = pytest.importorskip("transformers", reason="what transformers made is in references/")

TOKEN, AROUND, EVERY = 50, 51, 52
PLACES = {f"<row_{row}_col_{column}>": 49 - 3 * row - column for row in (1, 2, 3) for column in (1, 2, 3)}
TOKENS = {"<image>": TOKEN, "<fake_token_around_image>": AROUND, "<global-img>": EVERY, **PLACES}
LINES = {"\n": 10, "\n\n": 11}
PREPARED = {"max_image_size": {"longest_edge": 18}, "size": {"longest_edge": 54}, "do_image_splitting": True}
IMAGES = [(16, 16), (40, 30), (300, 170), (9, 90), (60, 10)]


def made(kind: str):
    torch.manual_seed(0)
    cls = {"smolvlm": "SmolVLM", "idefics3": "Idefics3"}[kind]
    config = getattr(transformers, f"{cls}Config")(
        vision_config={
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
            "patch_size": 4, "image_size": 18,
        },
        text_config={
            "model_type": "llama", "hidden_size": 40, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "pad_token_id": 0,
        },
        image_token_id=TOKEN,
    )  # fmt: skip
    found = getattr(transformers, f"{cls}ForConditionalGeneration")(config).eval()
    return lively(found)


def folder_of(model, folder):
    written(model, folder, {}, preprocessor_config=PREPARED)
    with_tokenizer(folder, 64, TOKENS | LINES)
    return folder


@pytest.fixture(scope="module", params=["smolvlm", "idefics3"])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def model(kind):
    return made(kind)


@pytest.fixture(scope="module")
def eyes(model, kind, tmp_path_factory):
    return Eyes(folder_of(model, tmp_path_factory.mktemp(kind)))


def processed(kind: str, images):
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    cls = {"smolvlm": SmolVLMImageProcessorPil, "idefics3": Idefics3ImageProcessorPil}[kind]
    return cls(**PREPARED, return_row_col_info=True)([list(images)], return_tensors="pt")


@pytest.mark.parametrize("height, width", IMAGES)
@torch.no_grad()
def test_images_and_vectors_are_those_of_transformers(eyes, model, kind, height, width):
    image = noise(height, width)
    inputs = processed(kind, [image])
    expected = inputs["pixel_values"][0][:, :, :16, :16].numpy()
    picture = eyes.sight.prepare(image)
    assert picture.grid == (len(expected), 4)
    found = picture.inputs["pixels"].reshape(-1, 2, 2, 2, 2, 4, 4, 3)  # tile, square's and patch's row and column
    found = found.transpose(0, 7, 1, 3, 5, 2, 4, 6).reshape(-1, 3, 16, 16)
    np.testing.assert_allclose(found, expected, atol=1 / 255)
    if len(expected) > 1:
        assert picture.tiles == (inputs["rows"][0][0], inputs["cols"][0][0])
    vectors = model.model.get_image_features(inputs["pixel_values"], inputs["pixel_attention_mask"]).pooler_output
    close(eyes.vectors(picture), torch.cat(list(vectors)).numpy())


@pytest.mark.parametrize("across, positions", [(27, 27), (26, 26), (32, 32), (13, 70), (70, 70), (64, 64)])
def test_positions_are_rounded_as_by_transformers(across, positions):
    steps = torch.arange(1 / positions, 1.0, 1 / positions)
    share = torch.arange(across, dtype=torch.float32) * (1.0 / torch.tensor([across]))
    expected = torch.bucketize(torch.clamp(share, max=1.0 - 1e-6), steps, right=True)
    assert learned(across, positions).tolist() == expected.tolist()


def test_tokens(eyes):
    own = [TOKEN] * 4
    picture = eyes.sight.prepare(noise(36, 54))
    assert picture.tiles == (2, 3)
    rows = [[AROUND, PLACES[f"<row_{r}_col_{c}>"], *own] for r in (1, 2) for c in (1, 2, 3)]
    expected = [*rows[0], *rows[1], *rows[2], 10, *rows[3], *rows[4], *rows[5], 11, AROUND, EVERY, *own, AROUND]
    assert eyes.sight.tokens(picture) == expected
    assert (eyes.sight.token, eyes.sight.vector, eyes.sight.merged) == (TOKEN, TOKEN, 4)
    assert eyes.sight.sizes[-1] == 10 * 16


@pytest.mark.wide
def test_replies_are_those_of_transformers(kind, tmp_path):
    model = drawn(made(kind), seed=1)  # whose replies have no image token
    folder = folder_of(model, tmp_path)
    first, second = noise(20, 40), noise(60, 10, 1)
    asks = [([2, 5, TOKEN, 6], [first]), ([2, TOKEN, 9, TOKEN, 16], [second, first]), ([2, 12, 13], [])]

    def images(given, ids):
        if not given:
            return {}
        inputs = processed(kind, given)
        return {name: inputs[name] for name in ("pixel_values", "pixel_attention_mask")}

    llm = LLM(folder, **SIZES)
    held_to_transformers(Family(folder, model, images), llm, asks)
    assert replies(asked(llm, asks)) == replies(asked(llm, asks))
