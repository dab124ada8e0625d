"""Images as users give them, in Python and over HTTP, to a small model that sees: replies are the engine's own to the
same prompt."""

import asyncio
import base64
import io
import json
import uuid

import httpx2
import numpy as np
import pytest
import test_served_images as served_images
from commands import run
from PIL import Image
from seeing import noise
from served import asked, replies
from test_served_images import ASKS, FIRST, IMG, SECOND

from shardlm import LLM, SamplingParams
from shardlm.chat import ChatTemplate
from shardlm.errors import ShardlmError
from shardlm.serve import batch_images
from shardlm.serve import llm as served_llm
from shardlm.serve.api.app import make_app
from shardlm.serve.async_llm import AsyncLLM
from shardlm.serve.beam_search import BeamSearchParams
from shardlm.serve.images import size_of
from shardlm.serve.request import PromptTooLong

family = served_images.family
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }} {% else %}{% for c in m.content %}"
    "{{ '[IMG]' if c.type == 'image' else c.text }} {% endfor %}{% endif %}{% endfor %}"
)
WORDS, IMAGES = "t20 [IMG] t21 [IMG]", [FIRST, SECOND]


def file(pixels):
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def data_url(pixels):
    return f"data:image/png;base64,{base64.b64encode(file(pixels)).decode()}"


@pytest.fixture(scope="module")
def llm(family, tmp_path_factory):
    (family.folder / "chat_template.jinja").write_text(TEMPLATE)
    images = tmp_path_factory.mktemp("images")
    (images / "first.png").write_bytes(file(FIRST))
    limits = {"image": 3}
    sizes = served_images.SIZES
    return LLM(family.folder, limit_mm_per_prompt=limits, allowed_local_media_path=images, **sizes)


@pytest.fixture(scope="module")
def expected(llm):
    """Of the words with both images."""
    return replies(asked(llm, [([20, IMG, 21, IMG], IMAGES)]))


def said(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_generate(llm, expected):
    forms = [IMAGES, tuple(map(Image.fromarray, IMAGES)), [file(FIRST), data_url(SECOND)]]
    prompts = [{"prompt": WORDS, "multi_modal_data": {"image": form}} for form in forms]
    prompts += [{"prompt_token_ids": [20, IMG, 21, IMG], "multi_modal_data": {"image": IMAGES}}]
    outputs = llm.generate(prompts, GREEDY)
    assert said(outputs) == expected * 4
    sight = llm.engine.sight
    tokens = sum(len(sight.tokens(sight.prepare(image))) for image in IMAGES)
    assert len(outputs[0].prompt_token_ids) == 2 + tokens and outputs[0].prompt == WORDS
    [alone] = llm.generate({"prompt": "[IMG]", "multi_modal_data": {"image": Image.fromarray(FIRST)}}, GREEDY)
    assert said([alone]) == replies(asked(llm, [([IMG], [FIRST])]))
    texts = llm.generate(["t7 t8 t9", {"prompt": "t7 t8 t9", "multi_modal_data": {}}], GREEDY)
    assert said(texts) == replies(asked(llm, ASKS[3:])) * 2


def test_chat(llm, expected, family):
    address = (family.folder.parent / "none").as_uri()
    first = llm._media.allowed_local_media_path
    parts = [
        [{"type": "image_url", "image_url": {"url": data_url(FIRST)}}, {"type": "image", "image": SECOND}],
        [
            {"type": "image_pil", "image_pil": Image.fromarray(FIRST)},
            {"type": "image_url", "image_url": data_url(SECOND)},
        ],
        [
            {"type": "image_url", "image_url": {"url": f"file://{first}/first.png"}},
            {"type": "image", "image": file(SECOND)},
        ],
    ]
    chats = [[{"role": "user", "content": [text("t20"), a, text("t21"), b]}] for a, b in parts]
    assert said(llm.chat(chats, GREEDY)) == expected * 3
    spread = [
        {"role": "user", "content": [text("t20"), parts[0][0]]},
        {"role": "user", "content": [text("t21"), parts[0][1]]},
    ]
    assert said(llm.chat(spread, GREEDY, chat_template_content_format="openai")) == expected
    named = [{"role": "user", "content": [text("t20"), parts[0][0], text("[IMG]")]}]
    with pytest.raises(ShardlmError, match="has places for 2 images and comes with 1"):  # a tokenizer of whole words
        llm.chat(named, GREEDY)
    for wrong, words in (
        (
            {"type": "image_url", "image_url": {"url": address}},
            r"messages\[0\].content\[0\]: .* is not below the folder",
        ),
        ({"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a"}}, "whose address is not public"),
        ({"type": "image", "image": 3}, "image 1 of 1: an image is a int"),
    ):
        with pytest.raises(ShardlmError, match=words):
            llm.chat([{"role": "user", "content": [wrong]}], GREEDY)


def text(words):
    return {"type": "text", "text": words}


def test_several_at_once_over_http(llm, expected, family):
    served = AsyncLLM(
        llm.engine, model_name="tiny", template=ChatTemplate.load(family.folder), limit_mm_per_prompt={"image": 3}
    )
    sight = llm.engine.sight
    body = {
        "messages": [{"role": "user", "content": [text("t20"), image(FIRST), text("t21"), image(SECOND)]}],
        "temperature": 0,
        "max_tokens": 6,
        "ignore_eos": True,
        "return_token_ids": True,
    }

    async def ask():
        transport = httpx2.ASGITransport(app=make_app(served))
        async with httpx2.AsyncClient(transport=transport, base_url="http://here") as client:
            posts = (client.post("/v1/chat/completions", content=json.dumps(body), timeout=300) for _ in range(3))
            return await asyncio.gather(*posts, straight(served))

    try:
        *answers, direct = asyncio.run(ask())
    finally:
        served.shutdown()
        llm.engine.pace = None
    tokens = 2 + sum(len(sight.tokens(sight.prepare(one))) for one in IMAGES)
    for answer in answers:
        assert answer.status_code == 200, answer.text
        assert [answer.json()["choices"][0]["token_ids"]] == expected
        assert answer.json()["usage"]["prompt_tokens"] == tokens
    assert [direct] == expected


async def straight(served):
    prompt = {"prompt": WORDS, "multi_modal_data": {"image": IMAGES}}
    return [list(one.outputs[0].token_ids) async for one in served.generate(prompt, GREEDY, uuid.uuid4().hex)][-1]


def image(pixels):
    return {"type": "image_url", "image_url": {"url": data_url(pixels)}}


def test_what_cannot_be_is_refused_before_anything_runs(llm):
    def ask(prompt, images, **params):
        return llm.generate(
            {"prompt": prompt, "multi_modal_data": {"image": images}}, SamplingParams(max_tokens=2, **params)
        )

    for prompt, images, params, words in (
        ("t1 [IMG]", [], {}, "has places for 1 images and comes with 0"),
        ("t1", [FIRST], {}, "has places for 0 images and comes with 1"),
        ("[IMG] " * 4, [FIRST] * 4, {}, r'limit_mm_per_prompt={"image": 3} allows 3'),
        ("[IMG]", [FIRST], {"truncate_prompt_tokens": 5}, "truncate_prompt_tokens=5 of a prompt with images"),
        ("[IMG]", [np.zeros((8, 8), np.float32)], {}, "image 1 of 1: an image is an array float32"),
    ):
        with pytest.raises(ShardlmError, match=words):
            ask(prompt, images, **params)
    with pytest.raises(ShardlmError, match="places for 1 images and comes with 0"):
        llm.generate("t1 [IMG]", GREEDY)
    with pytest.raises(PromptTooLong, match=r"above|must hold it"):
        ask("[IMG] [IMG] [IMG]", [np.zeros((96, 96, 3), np.uint8)] * 3)
    with pytest.raises(ShardlmError, match=r"LLM.beam_search reads text"):
        llm.beam_search({"prompt": "[IMG]", "multi_modal_data": {"image": FIRST}}, BeamSearchParams(2, 2))
    with pytest.raises(ShardlmError, match=r"a prompt has 'image'; .*multi_modal_data for images"):
        llm.generate({"prompt": "t1", "image": {}}, GREEDY)
    assert not llm.engine.has_unfinished


def test_vectors_and_scores_of_prompts_with_images(llm):
    prompts = [{"prompt": "t1 [IMG] t3", "multi_modal_data": {"image": pixels}} for pixels in (FIRST, SECOND)]
    first, second = llm.embed(prompts)
    assert np.abs(np.array(first) - second).max() > 1e-3
    scores = llm.score(prompts[:1])[0]
    assert len(scores) == len(llm.generate(prompts[0], GREEDY)[0].prompt_token_ids) - 1


def test_more_images_than_memory_has_room_for(llm, monkeypatch):
    """Their prompts are prepared again when their turn comes, a few at a time, and replies are the same."""
    prompts = [{"prompt": "t1 [IMG] t3", "multi_modal_data": {"image": noise(40, 64, seed)}} for seed in range(8)]
    expected = said(llm.generate(prompts, GREEDY))
    own, waiting = llm.engine, []
    size = size_of(own.sight.prepare(noise(40, 64)))
    monkeypatch.setattr(batch_images, "HELD", 3 * size)
    monkeypatch.setattr(batch_images, "THREADS", 2)
    monkeypatch.setattr(served_llm, "WAITING", 1)
    monkeypatch.setattr(llm._images, "_kept", 0)

    def add(id, *args, **options):
        waiting.append((own.stats().num_waiting, len(own._groups)))
        return type(own).add(own, id, *args, **options)

    monkeypatch.setattr(own, "add", add)
    assert said(llm.generate(prompts, GREEDY)) == expected
    assert [groups for _, groups in waiting[:3]] == [0, 1, 2] and max(number for number, _ in waiting[3:]) == 0
    broken = [*prompts[:-1], {"prompt": "[IMG]", "multi_modal_data": {"image": b"GIF8"}}]
    waiting.clear()
    with pytest.raises(ShardlmError, match=r"image 1 of 1: .*none of PNG"):
        llm.generate(broken, GREEDY)
    assert not waiting


@pytest.mark.wide
def test_the_command_line(family, llm, tmp_path):
    """`python -m launch.generate --image`; what it says, without special tokens, is the engine's."""
    path = tmp_path / "a picture.png"
    path.write_bytes(file(FIRST))
    own = (f"--checkpoint={family.folder}", "--prompt=t20 t21", f"--image={path}")
    flags = ("--temperature=0", "--max_new_tokens=6")
    found = run("launch.generate", *own, "--chat", *flags)
    [expected] = llm.chat(
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": data_url(FIRST)}}, words("t20 t21")]}],
        SamplingParams(temperature=0, max_tokens=6),
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == expected.outputs[0].text.strip()
    refused = run("launch.generate", *own, *flags)
    assert refused.returncode == 1 and "add --chat" in refused.stderr


def words(text):
    return {"type": "text", "text": text}
