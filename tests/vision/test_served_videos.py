"""Videos in prompts, as an engine reads them beside all else that engines do; of Qwen2.5-VL, whose axis of time is one
of positions, opened as users do."""

import asyncio
import base64
import json

import httpx2
import numpy as np
import pytest
import references
from commands import run
from films import file_of, film
from PIL import Image
from served import SIZES, asked, held_to_references, replies

from shardlm import LLM, SamplingParams
from shardlm.chat import ChatTemplate
from shardlm.errors import ShardlmError
from shardlm.mesh import MeshSpec
from shardlm.serve.api.app import make_app
from shardlm.serve.api.settings import Settings
from shardlm.serve.async_llm import AsyncLLM
from shardlm.serve.request import PromptTooLong

NAME = "qwen2_5_vl-video"
ASKS = references.asks(NAME)
SAID = [one["reply"] for one in references.said(NAME)]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
TEMPLATE = """{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'video' %} <|vision_start|> <|video_pad|> <|vision_end|> {% elif part.type == 'image' %} <|vision_start|> <|image_pad|> <|vision_end|> {% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"""  # noqa: E501


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = references.folder(NAME, tmp_path_factory.mktemp("videos"))
    (found / "chat_template.jinja").write_text(TEMPLATE)
    return found


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder, **SIZES)


def tokens(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_replies_are_those_of_transformers(llm):
    held_to_references(NAME, llm)


def test_an_equal_beginning_is_found_and_another_time_is_not(llm):
    """The same frames at another rate are other positions."""
    [ids, _, [(frames, rate)]] = ASKS[0]
    [first] = asked(llm, [(ids, [], [(frames, rate)])])
    [again] = asked(llm, [(ids, [], [(frames, rate)])])
    assert again.num_cached_tokens > 40 and replies([again]) == replies([first]) == SAID[:1]
    [other] = asked(llm, [(ids, [], [(frames, rate / 4)])])
    assert 0 < other.num_cached_tokens <= 20  # the first picture's
    llm.engine.reset_prefix_cache()
    [fresh] = asked(llm, [(ids, [], [(frames, rate / 4)])])
    assert replies([other]) == replies([fresh])


def test_forms_of_users(llm, tmp_path):
    """An array, a list of images and pairs in prompts; files by their path, and by address, and frames in chats."""
    frames, word = film(6, 24, 40), {"type": "text", "text": "t21 t22"}
    text = "<|vision_start|> <|video_pad|> <|vision_end|> t21 t22"
    about = {"fps": 1.5, "frames_indices": list(range(6)), "total_num_frames": 6}
    ask = {"prompt": text, "multi_modal_data": {"video": (frames, about)}}
    expected = tokens(llm.generate(ask, GREEDY))
    several = [{**ask, "multi_modal_data": {"video": one}} for one in ([(list(frames), about)], [(frames, about)])]
    assert tokens(llm.generate(several, GREEDY)) == expected * 2
    bare = llm.generate({**ask, "multi_modal_data": {"video": frames}}, GREEDY)
    chat = [{"role": "user", "content": [{"type": "video", "video": list(frames)}, word]}]
    assert tokens(llm.chat(chat, GREEDY)) == tokens(bare)
    served = AsyncLLM(llm.engine, model_name="tiny", template=ChatTemplate.load(llm.folder))

    async def last():
        return [one async for one in served.generate(ask, GREEDY, request_id="a")][-1]

    assert tokens([asyncio.run(last())]) == expected
    served.shutdown()
    llm.engine.pace = None


def test_files(llm, tmp_path):
    pytest.importorskip("av", reason="needs av, of the extra video")
    file = file_of(film(16, 24, 40), 8)
    (tmp_path / "a.mp4").write_bytes(file)
    url = f"data:video/mp4;base64,{base64.b64encode(file).decode()}"
    words = {"type": "text", "text": "t21 t22"}
    forms = (
        {"type": "video", "path": str(tmp_path / "a.mp4")},
        {"type": "video", "video": url},
        {"type": "video_url", "video_url": {"url": url}},
        {"type": "video", "video": file},
    )
    outputs = [llm.chat([{"role": "user", "content": [form, words]}], GREEDY)[0] for form in forms]
    assert len({tuple(own) for own in tokens(outputs)}) == 1
    # 4 frames of 2 seconds, two by two, of 3 x 5 vectors.
    assert len(outputs[0].prompt_token_ids) == 2 * 15 + 4
    two = llm.chat([{"role": "user", "content": [forms[0], words]}], GREEDY, mm_processor_kwargs={"fps": 4})
    assert len(two[0].prompt_token_ids) == 4 * 15 + 4
    by_path = {"prompt": "<|vision_start|> <|video_pad|> <|vision_end|> t21 t22", "multi_modal_data": {"video": url}}
    assert tokens(llm.generate(by_path, GREEDY)) == tokens(outputs[:1])
    with pytest.raises(PromptTooLong, match=r"a video of 16 frames has \d+ tokens; max_model_len=256 must hold it"):
        llm.chat(
            [{"role": "user", "content": [forms[0], words]}],
            GREEDY,
            mm_processor_kwargs={"num_frames": 16, "min_pixels": 2048},
        )


def test_over_http(llm):
    """Several at once, one of which is broken: it alone is refused, and the engine goes on."""
    pytest.importorskip("av", reason="needs av, of the extra video")
    file = file_of(film(16, 24, 40), 8)
    served = AsyncLLM(llm.engine, model_name="tiny", template=ChatTemplate.load(llm.folder))
    app = make_app(served, Settings())
    words = {"type": "text", "text": "t21 t22"}

    def body(data, **more):
        url = f"data:video/mp4;base64,{base64.b64encode(data).decode()}"
        content = [{"type": "video_url", "video_url": {"url": url}}, words]
        return {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 6, **more}

    asks = [body(file), body(file[:700]), body(file, mm_processor_kwargs={"fps": 4}), body(file, ignore_eos=True)]

    async def answers():
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://here", timeout=60) as client:
            return await asyncio.gather(*(client.post("/v1/chat/completions", json=ask) for ask in asks))

    found = asyncio.run(answers())
    assert [one.status_code for one in found] == [200, 400, 200, 200]
    assert found[1].json()["error"]["message"].startswith("video 1 of 1: a video's file")
    [offline] = llm.chat([{"role": "user", "content": [{"type": "video", "video": file}, words]}], GREEDY)
    assert found[3].json()["choices"][0]["message"]["content"] == offline.outputs[0].text
    assert [found[i].json()["usage"]["prompt_tokens"] for i in (0, 2)] == [2 * 15 + 4, 4 * 15 + 4]
    served.shutdown()
    llm.engine.pace = None


def test_what_cannot_be_is_refused(llm, folder):
    ask = {"prompt": "t1 <|video_pad|>", "multi_modal_data": {"video": [film(2, 24, 40), film(2, 24, 40)]}}
    with pytest.raises(ShardlmError, match="places for 1 videos and comes with 2"):
        llm.generate(ask, GREEDY)
    with pytest.raises(ShardlmError, match="the prompt has places for videos"):
        llm.generate({"prompt": "t1 <|video_pad|>"}, GREEDY)
    with pytest.raises(ShardlmError, match="truncate_prompt_tokens=4 of a prompt with images"):
        one = {**ask, "multi_modal_data": {"video": film(2, 24, 40)}}
        llm.generate(one, SamplingParams(truncate_prompt_tokens=4))
    with pytest.raises(ShardlmError, match="this model reads images and no videos; leave those out"):
        LLM(references.HOME / "mistral3", limit_mm_per_prompt={"video": 1}, **SIZES)
    with pytest.raises(ShardlmError, match="allow one image"):
        LLM(folder, limit_mm_per_prompt={"image": 0, "video": 1}, **SIZES)
    settings = json.loads((folder / "video_preprocessor_config.json").read_text())
    assert settings["size"] == {"shortest_edge": 256, "longest_edge": 2048}


@pytest.mark.wide
@pytest.mark.parametrize(
    "options",
    [
        {"mesh": MeshSpec(pipeline=2)},
        {"mesh": MeshSpec(tensor=2)},
        {"mesh": MeshSpec(data=2)},
        {"deterministic": True},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}},
        {"max_num_batched_tokens": 17, "max_num_seqs": 1},
    ],
    ids=str,
)
def test_beside_all_else(folder, options):
    """Once more, when what prompts begin with is in pages."""
    llm = LLM(folder, **SIZES | options)
    for _ in range(2):
        assert replies(asked(llm, ASKS)) == SAID


@pytest.mark.wide
def test_who_is_preempted_reads_its_videos_again(folder):
    tight = LLM(folder, **SIZES | {"enable_prefix_caching": False}, kv_cache_bytes=80 * 1024)
    more = asked(tight, ASKS * 3, count=24)
    assert tight.engine.scheduler.preemptions > 0
    assert [reply[:6] for reply in replies(more)] == SAID * 3


@pytest.mark.wide
def test_a_small_encoder_cache_lets_prompts_wait(llm, monkeypatch):
    cache = llm.engine.scheduler._holdings.encoder_cache
    llm.engine.reset_prefix_cache()
    monkeypatch.setattr(cache, "_free", cache._free[-100:])
    assert replies(asked(llm, ASKS)) == SAID
    llm.engine.reset_prefix_cache()


@pytest.mark.wide
def test_the_command_line(llm, tmp_path):
    """`python -m launch.generate --video`, of an animation, which Pillow reads."""
    path, images = tmp_path / "a.gif", [Image.fromarray(frame) for frame in film(16, 24, 40)]
    images[0].save(path, save_all=True, append_images=images[1:], duration=120)
    own = (f"--checkpoint={llm.folder}", "--prompt=t21 t22", f"--video={path}")
    found = run("launch.generate", *own, "--chat", "--temperature=0", "--max_new_tokens=6")
    content = [{"type": "video", "path": path}, {"type": "text", "text": "t21 t22"}]
    [expected] = llm.chat([{"role": "user", "content": content}], SamplingParams(temperature=0, max_tokens=6))
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == expected.outputs[0].text.strip()
    refused = run("launch.generate", *own)
    assert refused.returncode == 1 and "--video is a part of a chat's message" in refused.stderr


def test_pictures_of_a_still_film_are_read_once(llm):
    """Their vectors are in one place, at however many times."""
    still = np.repeat(film(1, 24, 40), 6, axis=0)
    llm.engine.reset_prefix_cache()
    [ids, *_] = ASKS[0]
    asked(llm, [(ids, [], [(still, 1.5)])])
    assert sum(map(len, llm.engine.scheduler._holdings.encoder_cache._places.values())) == 15
