"""mm_processor_kwargs of a request: its images are prepared as those of an engine that was started so."""

import asyncio
import json

import httpx2
import numpy as np
import pytest
import references
from seeing import noise
from served import SIZES
from test_asked_images import GREEDY, TEMPLATE, data_url, file, said

from shardlm import LLM
from shardlm.chat import ChatTemplate
from shardlm.errors import ShardlmError
from shardlm.serve.api.app import make_app
from shardlm.serve.async_llm import AsyncLLM
from shardlm.vision.pixtral_images import PixtralImages
from shardlm.vision.qwen_images import QwenImages
from shardlm.vision.registry import sight_of

LARGE, SMALL = noise(80, 90), noise(24, 24, 1)
ASKED = {"size": {"longest_edge": 48}}  # of 96


def prompt(image, **more):
    return {"prompt": "t20 [IMG] t21", "multi_modal_data": {"image": image}, **more}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = references.folder("mistral3", tmp_path_factory.mktemp("sizes"))
    (found / "chat_template.jinja").write_text(TEMPLATE)
    return found


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder, **SIZES)


@pytest.fixture(scope="module")
def expected(folder):
    """Of the prompt with each image, by an engine that was started so."""
    return said(LLM(folder, mm_processor_kwargs=ASKED, **SIZES).generate([prompt(LARGE), prompt(SMALL)], GREEDY))


def test_by_prompt_and_by_call(llm, expected):
    usual = llm.generate([prompt(LARGE), prompt(SMALL)], GREEDY)
    assert said(usual)[0] != expected[0] and said(usual)[1] == expected[1]
    assert said(llm.generate([prompt(LARGE), prompt(SMALL)], GREEDY, mm_processor_kwargs=ASKED)) == expected
    own = [prompt(LARGE, mm_processor_kwargs=ASKED), prompt(LARGE)]
    both = llm.generate(own, GREEDY)
    assert said(both) == [expected[0], said(usual)[0]]
    assert len(both[0].prompt_token_ids) < len(both[1].prompt_token_ids)
    own[1]["mm_processor_kwargs"] = {"size": {"longest_edge": 96}}
    assert said(llm.generate(own, GREEDY, mm_processor_kwargs=ASKED)) == said(both)
    words = [{"type": "text", "text": "t20"}, {"type": "image", "image": LARGE}, {"type": "text", "text": "t21"}]
    chat = [{"role": "user", "content": words}]
    assert said(llm.chat(chat, GREEDY, mm_processor_kwargs=ASKED)) == expected[:1]
    assert said(llm.chat(chat, GREEDY)) == said(usual)[:1]
    first, second = (llm.embed(one)[0] for one in own)
    assert np.abs(np.array(first) - second).max() > 1e-3


def test_what_cannot_be_is_refused(llm):
    for asked, words in (
        ({"size": {"longest_edge": 97}}, "has size longest_edge=97, and the programs of this engine are for up to 96"),
        ({"size": {"longest_edge": "48"}}, "has size longest_edge='48'; it is a number of pixels"),
        ({"size": {"shortest_edge": 8}}, "has size={'shortest_edge': 8}; it is an object with longest_edge, height"),
        ({"max_pixels": 9}, "has 'max_pixels', and this model takes size; leave it out"),
        ([1], "mm_processor_kwargs is a list; it is an object"),
    ):
        for call in (
            lambda asked=asked: llm.generate(prompt(SMALL, mm_processor_kwargs=asked), GREEDY),
            lambda asked=asked: llm.generate(prompt(SMALL), GREEDY, mm_processor_kwargs=asked),
        ):
            with pytest.raises(ShardlmError, match=words):
                call()
    assert not llm.engine.has_unfinished


def test_over_http(llm, expected, folder):
    served = AsyncLLM(llm.engine, model_name="tiny", template=ChatTemplate.load(folder))
    parts = [{"type": "text", "text": "t20"}, {"type": "image_url", "image_url": {"url": data_url(LARGE)}}]
    body = {
        "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "t21"}]}],
        "temperature": 0,
        "max_tokens": 6,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    inputs = [{"type": "input_text", "text": "t20"}, {"type": "input_image", "image_url": data_url(LARGE)}]
    response = {"input": [{"role": "user", "content": inputs}], "temperature": 0, "max_output_tokens": 6}
    asks = [
        ("chat/completions", body | {"mm_processor_kwargs": ASKED}),
        ("chat/completions", body),
        ("chat/completions", body | {"mm_processor_kwargs": {"size": {"longest_edge": 400}}}),
        ("responses", response),
        ("responses", response | {"mm_processor_kwargs": ASKED}),
        ("embeddings", {"messages": body["messages"]}),
        ("embeddings", {"messages": body["messages"], "mm_processor_kwargs": ASKED}),
        ("embeddings", {"messages": body["messages"], "mm_processor_kwargs": {"size": 3.5}}),
    ]

    async def ask():
        transport = httpx2.ASGITransport(app=make_app(served))
        async with httpx2.AsyncClient(transport=transport, base_url="http://here") as client:
            posts = [client.post(f"/v1/{path}", content=json.dumps(one), timeout=300) for path, one in asks]
            direct = served.generate(prompt(file(LARGE), mm_processor_kwargs=ASKED), GREEDY, "direct")
            return [await one for one in posts], [output async for output in direct][-1]

    try:
        (small, usual, refused, *others), direct = asyncio.run(ask())
    finally:
        served.shutdown()
        llm.engine.pace = None
    assert small.json()["choices"][0]["token_ids"] == expected[0] == list(direct.outputs[0].token_ids)
    assert usual.json()["choices"][0]["token_ids"] != expected[0]
    saved = usual.json()["usage"]["prompt_tokens"] - small.json()["usage"]["prompt_tokens"]
    assert saved > 0
    told = refused.json()["error"]
    assert refused.status_code == 400 and told["param"] == "mm_processor_kwargs" and "400, and the" in told["message"]
    large_response, small_response, large_vector, small_vector, wrong = others
    used = [one.json()["usage"]["input_tokens"] for one in (large_response, small_response)]
    assert used[0] - used[1] == saved
    used = [one.json()["usage"]["prompt_tokens"] for one in (large_vector, small_vector)]
    assert used[0] - used[1] == saved
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "mm_processor_kwargs"


def test_bounds_of_qwens_images():
    """Are those of a folder that says so; images that come out alike have one digest, and others their own."""
    told = {"min_pixels": 256, "max_pixels": 20_000}

    def by(told):
        return QwenImages.told(told, patch=4, merge=2, frames=2, window=0, side=0)

    usual, pixels = by(told), noise(300, 200)
    for asked in (
        {"max_pixels": 4096},
        {"size": {"longest_edge": 4096}},
        {"size": {"shortest_edge": 512, "longest_edge": 4096}, "min_pixels": None},
        {"min_pixels": 1024, "max_pixels": 1024},
    ):
        size = asked.get("size", {})
        least = asked.get("min_pixels") or size.get("shortest_edge", 256)
        most = asked.get("max_pixels") or size.get("longest_edge")
        prepare = usual.asked({name: value for name, value in asked.items() if value is not None})
        assert prepare == by({"min_pixels": least, "max_pixels": most})
        assert prepare(pixels).patches <= most // 16
        assert prepare(pixels).digest != usual(pixels).digest
    assert usual.asked({"max_pixels": 4096})(noise(16, 24)).digest == usual(noise(16, 24)).digest
    for asked, words in (
        ({"max_pixels": 20_001}, "has max_pixels=20001, and the programs of this engine are for up to 20000"),
        ({"max_pixels": 128}, "makes images of min_pixels=256 to max_pixels=128; the second must be 256 or more"),
        ({"max_pixels": True}, "has max_pixels=True; it is a number of pixels, 1 or more"),
        ({"min_pixels": -1}, "has min_pixels=-1; it is"),
        ({"size": {"height": 3}}, "it is an object with shortest_edge, longest_edge"),
    ):
        with pytest.raises(ShardlmError, match=words):
            usual.asked(asked)


def test_sizes_of_pixtrals_images():
    usual = PixtralImages.told({"size": {"longest_edge": 96}}, 4, 2, 96)
    for size in ({"longest_edge": 40}, {"height": 40, "width": 64}):
        assert usual.asked({"size": size}) == PixtralImages.told({"size": size}, 4, 2, 96)
    assert usual.asked({"size": {"longest_edge": 40}})(LARGE).digest != usual(LARGE).digest


@pytest.mark.parametrize("name", ["glm4v", "glm5_next", "minimax_m3_vl", "paddleocr_vl"])
def test_size_of_a_request_is_that_of_a_folder(name):
    """GLM's counts every frame."""
    folder = references.HOME / name
    options, own = (json.loads((folder / file).read_text()) for file in ("config.json", "preprocessor_config.json"))
    usual = own.get("size") or {"shortest_edge": own["min_pixels"], "longest_edge": own["max_pixels"]}
    sight = sight_of(folder, options)
    assert sight.asked({"size": usual}).prepare == sight.asked({"size": {}}).prepare == sight.prepare
    less = usual | {"longest_edge": usual["longest_edge"] // 2}
    asked = sight.asked({"size": {"longest_edge": less["longest_edge"]}}).prepare
    assert 0 < asked(LARGE).patches < 0.6 * sight.prepare(LARGE).patches
    if "size" in own:
        assert asked == sight_of(folder, options, {"size": less}).prepare
    with pytest.raises(ShardlmError, match=f"longest_edge.*={usual['longest_edge'] + 1}, and the programs|max_pixels="):
        sight.asked({"size": {"longest_edge": usual["longest_edge"] + 1}})
    with pytest.raises(ShardlmError, match="the second must be"):
        sight.asked({"size": {"longest_edge": 3}})


@pytest.mark.parametrize("name, takes", [("qwen4_exp", "min_pixels, max_pixels, size"), ("glm46v", "size")])
def test_how_videos_are_sampled_is_not_asked_of_models_that_do_not_heed_it(name, takes):
    """Of their images alone, and of GLM-4.6V, which samples by length."""
    options = json.loads((references.HOME / name / "config.json").read_text())
    with pytest.raises(ShardlmError, match=f"has 'fps', and this model takes {takes}"):
        sight_of(references.HOME / name, options, {"fps": 2})
