"""PaliGemma's eyes against transformers, and prompts whose tokens all see each other."""

import json
from collections.abc import Sequence

import numpy as np
import pytest
from seeing import Eyes, close, lively, noise, written
from served import SIZES, Family, asked, drawn, held_to_transformers, replies, with_tokenizer

from shardlm import LLM
from shardlm.errors import ShardlmError
from shardlm.mesh import MeshSpec
from shardlm.vision.registry import sight_of

torch = pytest.importorskip("torch", reason="what transformers made is in references/")
transformers = pytest.importorskip("transformers", reason="what transformers made is in references/")

TOKEN, BEGIN, END = 60, 2, 61
TOKENS = {"<image>": TOKEN, "\n": END}
PREPARED = {"size": {"height": 20, "width": 20}}
IMAGES = [(20, 20), (40, 30), (300, 170), (9, 90)]
OF_BOTH = {
    "hidden_size": 40, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64, "eos_token_id": 1, "bos_token_id": BEGIN,
}  # fmt: skip
TEXTS = {
    "second": OF_BOTH | {"model_type": "gemma2", "sliding_window": 64, "query_pre_attn_scalar": 16},
    "first": OF_BOTH | {"model_type": "gemma"},
}


def made(kind: str = "second"):
    torch.manual_seed(0)
    config = transformers.PaliGemmaConfig(
        vision_config={
            "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 2, "patch_size": 4, "image_size": 20, "vision_use_head": False,
        },
        text_config=TEXTS[kind], image_token_index=TOKEN, projection_dim=40, hidden_size=40, vocab_size=64,
    )  # fmt: skip
    return lively(transformers.PaliGemmaForConditionalGeneration(config).eval())


@pytest.fixture(scope="module")
def model():
    return made()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    return written(model, tmp_path_factory.mktemp("paligemma"), TOKENS, preprocessor_config=PREPARED)


@pytest.fixture(scope="module")
def eyes(folder):
    return Eyes(folder)


def processed(image: np.ndarray):
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    return SiglipImageProcessorPil(**PREPARED)(image, return_tensors="pt")["pixel_values"]


@torch.no_grad()
def test_images_and_vectors_are_those_of_transformers(eyes, model):
    for size in IMAGES:
        expected = processed(noise(*size))
        picture = eyes.sight.prepare(noise(*size))
        found = picture.inputs["pixels"].reshape(5, 5, 4, 4, 3).transpose(4, 0, 2, 1, 3).reshape(3, 20, 20)
        np.testing.assert_allclose(found, expected[0].numpy(), atol=1 / 255)
        close(eyes.vectors(picture), model.model.get_image_features(expected).pooler_output[0].numpy())


@pytest.mark.parametrize("ids", [[TOKEN, 5, 6], [BEGIN, TOKEN, 5, 6], [TOKEN, BEGIN, 5, 6, END]])
def test_a_prompt_is_what_the_processor_writes(eyes, ids):
    """<image>s, <bos>, the text and a line's end, whatever of it is there."""
    found, [placed] = eyes.sight.expanded(ids, [eyes.sight.prepare(noise(20, 20))])
    assert found == [*[TOKEN] * 25, BEGIN, 5, 6, END]
    assert placed.takes.tolist() == list(range(25))
    assert eyes.sight.expanded([BEGIN, 5, 6], []) == ([BEGIN, 5, 6], ())


class Inputs:
    """What transformers is given beside a prompt's tokens and those that it said: which are which."""

    def __init__(self):
        self.prompt = []

    def __call__(self, images: Sequence[np.ndarray], ids: Sequence[int]) -> dict:
        if not self.prompt or list(ids[: len(self.prompt)]) != self.prompt:
            self.prompt = list(ids)
        said = torch.tensor([[0] * len(self.prompt) + [1] * (len(ids) - len(self.prompt))])
        pixels = {"pixel_values": torch.cat([processed(image) for image in images])} if len(images) else {}
        return {"token_type_ids": said, **pixels}


ASKS = [
    ([TOKEN, BEGIN, 5, 6, 7, END], [noise(20, 40)]),
    ([TOKEN, TOKEN, BEGIN, 9, 16, END], [noise(60, 10, 1), noise(20, 40)]),
    ([BEGIN, 40, 41, 42, 43], []),
    ([TOKEN, BEGIN, 5, 6, 8, END], [noise(20, 40)]),  # which begins as the first, and whose beginning sees another end
]


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["second", "first"])
def test_replies_are_those_of_transformers(kind, tmp_path):
    """Again when prompts are in pages, of which none are another's; after a preemption; and on a mesh."""
    model = drawn(made(kind), seed=1)
    folder = written(model, tmp_path, TOKENS, preprocessor_config=PREPARED)
    with_tokenizer(folder, 64, TOKENS)
    sizes = SIZES | {"max_num_batched_tokens": 96}
    llm = LLM(folder, **sizes)
    held_to_transformers(Family(folder, model, Inputs()), llm, ASKS)
    again, expected = asked(llm, ASKS), replies(asked(LLM(folder, enable_prefix_caching=False, **sizes), ASKS))
    assert replies(again) == expected and again[0].num_cached_tokens >= 24
    assert replies(asked(LLM(folder, mesh=MeshSpec(tensor=2), **sizes), ASKS)) == expected
    tight = LLM(folder, enable_prefix_caching=False, kv_cache_bytes=70 * 1024, **sizes | {"max_model_len": 96})
    many = replies(asked(tight, ASKS * 2, count=24))
    assert tight.engine.scheduler.preemptions > 0
    assert many == replies(asked(llm, ASKS * 2, count=24))


def test_what_is_refused(folder, eyes, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    vision = config["vision_config"]
    with pytest.raises(ShardlmError, match="spin=1"):
        sight_of(folder, config | {"vision_config": vision | {"spin": 1}})
    other = written(None, tmp_path, TOKENS, preprocessor_config={"size": 48})
    with pytest.raises(ShardlmError, match="its encoder reads 20 x 20 pixels"):
        sight_of(other, config)
