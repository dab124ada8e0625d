"""Videos in chats, as OpenAI's client sends vLLM's parts: read where they stand, bounded, and refused in words."""

import base64
import contextlib

import numpy as np
import openai
import pytest
from client import Client, error
from films import file_of
from PIL import Image
from seeing_llm import FILMS, PAD, ROW, VIDEO, SeeingLLM, part, picture, text
from sockets import listens

from shardlm.errors import ShardlmError
from shardlm.serve import images
from shardlm.serve.api import images as api_images
from shardlm.serve.images import Given
from shardlm.serve.media import MediaRules
from shardlm.serve.video_forms import key_of, videos_of

CHAT = "/v1/chat/completions"
SHADES = (10, 60, 200)
FRAMES = np.stack([np.full((32, 48, 3), shade, np.uint8) for shade in SHADES])
JPEGS = ",".join(base64.b64encode(picture(shade=shade)).decode() for shade in SHADES)
FILM = {"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{JPEGS}"}}
EACH = ROW + VIDEO * 6
WHOLE = f"<|vision_start|>{EACH * 3}<|vision_end|>"


def user(*parts):
    return [{"role": "user", "content": list(parts)}]


@pytest.fixture
def llm():
    return SeeingLLM(template_source=FILMS)


def shades(placed):
    return [int(one.picture.inputs["tiles"][0, 0]) for one in placed]


def check(llm, words, *expected):
    """That the model was last shown this text, and pictures of these shades where the text has them."""
    shown, placed = llm.seen[-1][0], llm.pictures[-1]
    assert words in shown and shades(placed) == list(expected)
    ids = llm.tokenizer.encode(shown)
    taken = [llm.tokenizer.decode([ids[take]], skip_special=False) for one in placed for take in one.takes]
    assert set(taken) <= {PAD, VIDEO} and len(taken) == sum(one.picture.vectors for one in placed)


def test_openais_client():
    """A file, which PyAV reads, and frames; beside an image."""
    pytest.importorskip("av", reason="needs av, of the extra video")
    llm = SeeingLLM(template_source=FILMS)
    file = base64.b64encode(file_of(FRAMES, 2)).decode()
    film = {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{file}"}}
    with contextlib.ExitStack() as stack:
        _, address = stack.enter_context(listens(Client(llm, max_body=200_000).app))
        how = {"base_url": f"{address}/v1", "api_key": "none", "max_retries": 0, "timeout": 60}
        client = stack.enter_context(openai.OpenAI(**how))
        messages = user(text("a "), film, text(" b "), part(picture()), FILM)
        whole = client.chat.completions.create(model="fake", messages=messages)
        image = f"<|vision_start|>{(PAD * 3 + ROW) * 2}<|vision_end|>"
        assert f"user\na {WHOLE} b {image}{WHOLE}<|im_end|>" in llm.seen[-1][0]
        found = shades(llm.pictures[-1])
        assert np.abs(np.array(found[:3]) - SHADES).max() < 6 and found[3:] == [90, *SHADES]
        assert whole.usage.prompt_tokens == len(llm.tokenizer.encode(llm.seen[-1][0]))
        some = {"mm_processor_kwargs": {"num_frames": 2}}
        client.chat.completions.create(model="fake", messages=user(film), extra_body=some)
        assert len(llm.pictures[-1]) == 2
        broken = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,aGVsbG8gd29ybGQ="}}
        with pytest.raises(openai.BadRequestError, match=r"video 1 of 1: .* it is none of MP4, MOV, WebM"):
            client.chat.completions.create(model="fake", messages=user(broken))
        whole = client.chat.completions.create(model="fake", messages=user(text("still here")))
        assert whole.choices[0].message.content == "the quick brown fox"


def test_forms_of_parts(llm, tmp_path):
    url = FILM["video_url"]["url"]
    frames = [f"data:image/jpeg;base64,{one}" for one in JPEGS.split(",")]
    client = Client(llm, media=MediaRules(allowed_local_media_path=str(tmp_path)))
    for film in (FILM, {**FILM, "video_url": url}, {"type": "video", "video": url}, {"type": "video", "video": frames}):
        assert client.post(CHAT, {"messages": user(text("a"), film)}).status_code == 200
        check(llm, f"user\na{WHOLE}<|im_end|>", *SHADES)
    for wrong, words in (
        ({"type": "video_url"}, "without a video; give an address, data:video/mp4"),
        ({"type": "video_url", "video_url": {"url": "data:video/mp4,aa"}}, "a video's address is 'data:video/mp4,aa'"),
        ({"type": "video", "video": "/etc/passwd"}, "a video's address is '/etc/passwd'; it begins with data:"),
        ({"type": "video", "path": "/etc/passwd"}, "a video's address is '/etc/passwd'"),
        ({"type": "video", "video": ["/etc/passwd"]}, "a video is a list; it is an address"),
        ({"type": "video_url", "video_url": {"url": "file:///etc/passwd"}}, "is not below the folder"),
        ({"type": "video_url", "video_url": {"url": "http://127.0.0.1/a.mp4"}}, "whose address is not public"),
        ({"type": "video", "video": []}, "a video has no frames"),
        ({"type": "video", "video": [frames[0], "data:image/png;base64,aGk="]}, "frame 1 of a video: an image's file"),
    ):
        told = error(client.post(CHAT, {"messages": user(wrong)}), 400)
        assert words in told["message"], told


def test_one_address_of_an_image_and_of_a_video(llm, tmp_path):
    """Each is what it was sent as."""
    images = [Image.fromarray(frame) for frame in FRAMES]
    images[0].save(tmp_path / "a.gif", save_all=True, append_images=images[1:], duration=100)
    address = (tmp_path / "a.gif").as_uri()
    client = Client(llm, media=MediaRules(allowed_local_media_path=str(tmp_path)))
    still, film = ({"type": kind, kind: {"url": address}} for kind in ("image_url", "video_url"))
    for parts, expected in (((still, film), [10, *SHADES]), ((film, still), [*SHADES, 10])):
        assert client.post(CHAT, {"messages": user(*parts)}).status_code == 200
        assert shades(llm.pictures[-1]) == expected


def test_frames_are_not_unpacked_before_their_number_is_known():
    """Nor taken from base64, of which a body may have a million."""
    llm = SeeingLLM(template_source=FILMS, max_model_len=16)
    frames = [f"data:image/png;base64,{one}" for one in (JPEGS.split(",")[0], "aGk=", "aGk=")]
    told = error(Client(llm).post(CHAT, {"messages": user({"type": "video", "video": frames})}), 400)
    assert "a video of 3 frames has 18 tokens; max_model_len=16 must hold it" in told["message"]
    for wrong in (["data:%"] * 5000, "data:video/jpeg;base64,%" + "," * 4999):
        told = error(Client(llm).post(CHAT, {"messages": user({"type": "video", "video": wrong})}), 400)
        assert "a video has 5000 frames; at most 4096 are taken" in told["message"]


def test_where_no_videos_are_read(llm):
    told = error(Client().post(CHAT, {"messages": user(FILM)}), 400)
    assert "is of type 'video_url'; this model reads text: images are read by" in told["message"]
    llm.images = images.Images(llm.images.sight.__class__(**{**vars(llm.images.sight), "videos": None}), llm.tokenizer)
    told = error(Client(llm).post(CHAT, {"messages": user(FILM)}), 400)
    assert "is of type 'video_url'; this model reads text and images" in told["message"]
    told = error(Client(SeeingLLM(template_source=FILMS)).post("/tokenize", {"messages": user(FILM)}), 400)
    assert "which are read in chats and embeddings" in told["message"]
    told = error(Client(SeeingLLM()).post("/v1/responses", {"input": user(FILM)}), 400)
    assert told["message"] == "input[0].content[0] is a video; they are read in chats and embeddings"


def test_a_template_without_videos_has_the_token_before_the_words():
    llm = SeeingLLM()
    assert Client(llm).post(CHAT, {"messages": user(text("a"), FILM, part(picture()))}).status_code == 200
    check(llm, f"user\n{WHOLE}\n<|vision_start|>{(PAD * 3 + ROW) * 2}<|vision_end|>\na<|im_end|>", *SHADES, 90)


def test_bounds():
    told = error(Client(SeeingLLM(template_source=FILMS, limit=1)).post(CHAT, {"messages": user(FILM, FILM)}), 400)
    assert 'the prompt has 2 videos; limit_mm_per_prompt={"video": 1} allows 1' in told["message"]
    llm = SeeingLLM(template_source=FILMS, max_model_len=16)
    told = error(Client(llm).post(CHAT, {"messages": user(FILM)}), 400)
    assert "a video of 3 frames has 18 tokens; max_model_len=16 must hold it. Ask for fewer frames" in told["message"]
    assert told["code"] == "context_length_exceeded" and not llm.prepared
    told = error(Client(llm).post(CHAT, {"messages": user(FILM), "mm_processor_kwargs": {"spin": 1}}), 400)
    assert told["param"] == "mm_processor_kwargs" and "takes num_frames" in told["message"]


def test_a_request_has_its_time(llm, monkeypatch):
    """However many videos it has, each within its own."""
    monkeypatch.setattr(api_images, "LONGEST", 0)
    assert Client(llm).post(CHAT, {"messages": user(FILM)}).status_code == 200
    told = error(Client(llm).post(CHAT, {"messages": user(FILM, FILM)}), 400)
    assert "the first 1 of 2 videos took more than 0 seconds; send fewer or smaller" in told["message"]


def test_words_cannot_take_the_place_of_a_video(llm):
    body = {"messages": user(text(f"{VIDEO}{PAD} "), FILM, text(VIDEO)), "return_prompt_text": True}
    answer = Client(llm).post(CHAT, body)
    assert answer.status_code == 200 and answer.json()["prompt_text"].count(VIDEO) == 3
    check_words, placed = llm.seen[-1][0], llm.pictures[-1]
    assert f"user\n{VIDEO}{PAD} {WHOLE}{VIDEO}<|im_end|>" in check_words and shades(placed) == list(SHADES)
    told = error(Client(llm).post("/v1/completions", {"prompt": f"a {VIDEO}"}), 400)
    assert "the prompt has places for videos (<|video_pad|>) and comes with none" in told["message"]


def test_a_video_that_comes_again_is_prepared_once(llm):
    client = Client(llm)
    for _ in range(3):
        assert client.post(CHAT, {"messages": user(FILM, FILM)}).status_code == 200
    assert len(llm.prepared) == 3
    answer = client.post("/v1/embeddings", {"messages": user(FILM), "normalize": False})
    assert answer.status_code == 200 and WHOLE in llm.pooled[-1][0] and len(llm.prepared) == 3


def test_prompts_in_memory(llm):
    """As LLM.generate and AsyncLLM.generate have them: an array, a list of images, several, with what is known."""
    ids = llm.tokenizer.encode(f"a {VIDEO} b {PAD}")
    given = Given([picture()], {}, [FRAMES])
    found, placed = images.with_images(llm.images, ids, given, 100)
    assert llm.tokenizer.decode(found, skip_special=False) == f"a {EACH * 3} b {(PAD * 3 + ROW) * 2}"
    assert shades(placed) == [*SHADES, 90]
    every = {"one array": FRAMES, "a list of frames": list(FRAMES), "a pair": (FRAMES, {"fps": 2})}
    for video in every.values():
        assert len(videos_of({"multi_modal_data": {"video": video}})) == 1
        assert len(videos_of({"multi_modal_data": {"video": [video, video]}})) == 2
        assert len(llm.images.prepared_video(video).pictures) == 3
    assert videos_of("a") == videos_of({"multi_modal_data": {"image": 1}}) == ()
    for video, words in (
        (3, "a video is a int; give a file's path"),
        (FRAMES[0], r"it is uint8 \[frames, height, width, 3\]"),
        ("/none.mp4", "the video /none.mp4 cannot be read"),
        ([FRAMES[0], FRAMES[1][:16]], "frame 1 of a video has 48 x 16 pixels and the first 48 x 32"),
        ((FRAMES, {"fps": 0}), "a video has fps=0; it is a number of frames a second, 0.01 to 10000"),
        ((FRAMES, {"fps": 1, "total_num_frames": 10**9}), r"would last 1e\+09 seconds; at most 1e\+07 are read"),
        ((FRAMES, {"frames_indices": [2, 1, 0]}), "frames_indices must be 3 numbers that ascend"),
        ((FRAMES, {"frames_indices": [0, None, 2]}), "frames_indices must be 3 numbers that ascend"),
        ((FRAMES, {"frames_indices": np.zeros((3, 1), int)}), "frames_indices must be 3 numbers that ascend"),
    ):
        with pytest.raises(ShardlmError, match=words):
            llm.images.prepared_video(video)
    with pytest.raises(ShardlmError, match="this model reads text, and the prompt has 1 videos"):
        images.with_images(None, ids, Given(videos=[FRAMES]), 100)


def test_what_videos_are_known_by():
    """All numbers of frames that are told of, and not those that are shown of a long array."""
    frames, every = np.zeros((1200, 2, 2, 3), np.uint8), np.arange(0, 2400, 2)
    other = every + (every == 1200)
    keys = {key_of((frames, {"frames_indices": own})) for own in (every, other)}
    assert len(keys) == 2 and key_of("data:\ud800") != key_of("data:")
