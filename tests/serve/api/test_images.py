"""Images over each interface, as its own client sends them: the model reads them where they stand, they count, and what
is none is refused in words."""

import base64
import threading

import anthropic
import numpy as np
import openai
import pytest
from client import Client, error
from seeing_llm import PAD, TOOLS, WORDS, SeeingLLM, data_url, part, picture, seen, text
from sockets import listens

from shardlm.errors import ShardlmError
from shardlm.serve import images
from shardlm.serve.images import Given, Images
from shardlm.vision.read import pixels_of

CHAT = "/v1/chat/completions"
ONE, TWO = picture(), picture(16, 16, 7)
WHOLE, SMALL = (f"<|vision_start|>{seen(*tiles)}<|vision_end|>" for tiles in ((2, 3), (1, 1)))
REPLY = "the quick brown fox"


def user(*parts):
    return [{"role": "user", "content": list(parts)}]


@pytest.fixture
def llm():
    return SeeingLLM()


@pytest.fixture
def client(llm):
    return Client(llm)


@pytest.fixture(scope="module")
def served():
    llm = SeeingLLM()
    made = Client(llm, max_body=200_000)
    with listens(made.app) as (_, address):
        yield llm, address


def shades(placed):
    return [int(one.picture.inputs["tiles"][0, 0]) for one in placed]


def check(llm, *expected, pictures=((2, 3, 90),)):
    """That the model was last shown these texts, and pictures of so many tiles and this shade."""
    shown, found = llm.seen[-1][0], llm.pictures[-1]
    for words in expected:
        assert words in shown
    assert [(*one.picture.grid, shade) for one, shade in zip(found, shades(found), strict=True)] == list(pictures)
    ids = llm.tokenizer.encode(shown)
    for one in found:
        assert [ids[take] for take in one.takes] == [llm.images.sight.vector] * one.picture.vectors
        assert one.end - one.start == one.picture.grid[0] * (one.picture.grid[1] + 1)


def test_openais_client(served):
    llm, address = served
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60) as client:
        messages = user(text("a "), part(ONE), text(" b "), part(TWO), text("?"))
        whole = client.chat.completions.create(model="fake", messages=messages)
        assert whole.choices[0].message.content == REPLY
        check(llm, f"user\na {WHOLE} b {SMALL}?<|im_end|>", pictures=((2, 3, 90), (1, 1, 7)))
        assert whole.usage.prompt_tokens == len(llm.tokenizer.encode(llm.seen[-1][0]))
        stream = client.chat.completions.create(model="fake", messages=messages, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == REPLY
        response = client.responses.create(
            model="fake",
            instructions="Look.",
            input=[
                {
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "what is it?"},
                        {"type": "input_image", "image_url": data_url(ONE), "detail": "auto"},
                    ],
                }
            ],
        )
        assert response.output_text == REPLY and response.usage.input_tokens > 8
        check(llm, "system\nLook.", f"user\nwhat is it?{WHOLE}<|im_end|>")
        with pytest.raises(openai.BadRequestError, match=r"image 1 of 1: .* it is none of PNG"):
            client.chat.completions.create(model="fake", messages=user(part(b"GIF8?")))
        assert client.models.list().data[0].capabilities["vision"] is True


def test_anthropics_client(served):
    llm, address = served
    block = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": base64.b64encode(ONE).decode()},
    }
    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    messages = [
        {"role": "user", "content": [block, text("what is it?")]},
        {"role": "assistant", "content": [text("I look."), call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [text("here"), block]}]},
        {"role": "user", "content": [text("and"), text("this?"), block]},
    ]
    with anthropic.Anthropic(base_url=address, api_key="none", max_retries=0, timeout=60) as client:
        message = client.messages.create(model="fake", max_tokens=20, system="Look.", messages=messages)
        assert message.content[0].text == REPLY
        expected = (
            f"user\n{WHOLE}what is it?<|im_end|>",
            f"tool\nhere{WHOLE}<|im_end|>",
            f"user\nand\nthis?{WHOLE}<|im_end|>",
        )
        check(llm, *expected, pictures=((2, 3, 90),) * 3)
        tokens = len(llm.tokenizer.encode(llm.seen[-1][0]))
        used = message.usage
        assert used.input_tokens + used.cache_read_input_tokens == tokens
        assert client.messages.count_tokens(model="fake", system="Look.", messages=messages).input_tokens == tokens
        failed = {"type": "tool_result", "tool_use_id": "t1", "is_error": True, "content": [block]}
        client.messages.create(
            model="fake", max_tokens=20, messages=[*messages[:2], {"role": "user", "content": [failed]}]
        )
        check(llm, f"tool\nError:{WHOLE}<|im_end|>", pictures=((2, 3, 90),) * 2)
        for source, words in (
            ({"type": "file", "file_id": "f"}, "must be of type base64 with data, or of type url"),
            ({"type": "base64", "media_type": "image/png", "data": "%"}, "is not in base64"),
            ({"type": "url", "url": "http://127.0.0.1/a.png"}, "whose address is not public"),
        ):
            wrong = [{"role": "user", "content": [{"type": "image", "source": source}]}]
            with pytest.raises(anthropic.BadRequestError, match=words):
                client.messages.create(model="fake", max_tokens=20, messages=wrong)
        assert client.models.retrieve("fake").capabilities.image_input.supported


def test_ollamas_client(served):
    ollama = pytest.importorskip("ollama", reason="needs ollama, of the extra test")
    llm, address = served
    client = ollama.Client(address)
    reply = client.chat("fake", [{"role": "user", "content": "what is it?", "images": [ONE, TWO]}])
    assert reply.message.content == REPLY
    check(llm, f"user\n{WHOLE}{SMALL}what is it?<|im_end|>", pictures=((2, 3, 90), (1, 1, 7)))
    assert reply.prompt_eval_count == len(llm.tokenizer.encode(llm.seen[-1][0]))
    answer = client.generate("fake", "what is it?", system="Look.", images=[ONE])
    assert (answer.response, answer.context) == (REPLY, None)
    check(llm, "system\nLook.", f"user\n{WHOLE}what is it?<|im_end|>")
    assert client.generate("fake", images=[ONE]).response == REPLY
    check(llm, f"user\n{WHOLE}<|im_end|>")
    assert "vision" in client.show("fake").capabilities
    for ask, words in (
        (lambda: client.generate("fake", PAD, images=[ONE], raw=True), "leave raw out"),
        (lambda: client.generate("fake", "hi", images=[b"GIF8?"]), "it is none of PNG"),
    ):
        with pytest.raises(ollama.ResponseError, match=words) as info:
            ask()
        assert info.value.status_code == 400


def test_a_model_that_reads_text_says_which_ones_see():
    client = Client()
    models = r"images are read by checkpoints with an encoder for them, such as those of Qwen3-VL"
    for path, body in (
        (CHAT, {"messages": user(part(ONE))}),
        ("/v1/responses", {"input": user({"type": "input_image", "image_url": data_url(ONE)})}),
        (
            "/v1/messages",
            {"messages": user({"type": "image", "source": {"type": "base64", "data": ""}}), "max_tokens": 1},
        ),
        ("/api/chat", {"model": "fake", "messages": [{"role": "user", "content": "a", "images": ["aGk="]}]}),
        ("/api/generate", {"model": "fake", "prompt": "a", "images": ["aGk="]}),
    ):
        response = client.post(path, body)
        assert response.status_code == 400 and models in response.text and "this model reads text" in response.text
    assert "mm_cache" not in client.get("/metrics").text
    assert not client.llm.seen and "capabilities" not in client.get("/v1/models").text
    assert "vision" not in client.post("/api/show", {"model": "fake"}).json()["capabilities"]


def test_images_where_texts_alone_are_read(client):
    body = {"messages": user(part(ONE))}
    told = error(client.post("/tokenize", body), 400)
    assert "messages has images, which are read in chats and embeddings" in told["message"]
    assert told["param"] == "messages"
    told = error(client.post("/v1/embeddings", {**body, "truncate_prompt_tokens": 5}), 400)
    assert told["param"] == "truncate_prompt_tokens" and not client.llm.pooled
    told = error(client.post(CHAT, {**body, "truncate_prompt_tokens": 5}), 400)
    assert "truncate_prompt_tokens=5 of a prompt with images" in told["message"]
    told = error(client.post(CHAT, {**body, "use_beam_search": True, "n": 2, "temperature": 0}), 400)
    assert told["param"] == "use_beam_search"
    told = error(client.post("/v1/completions", {"prompt": f"a {PAD}"}), 400)
    assert "the prompt has places for 1 images and comes with 0" in told["message"]
    assert client.post("/v1/completions", {"prompt": "a"}).status_code == 200
    assert client.post(CHAT, {"messages": user(text("a"))}).status_code == 200


@pytest.mark.parametrize("count", [0, 1])
def test_words_cannot_take_the_place_of_an_image(client, count):
    """The token's name is words, in whatever is sent: tools, thoughts, results."""
    client.llm.template = type(client.llm.template)(TOOLS + "{{ tools | tojson if tools }}")
    tools = [{"type": "function", "function": {"name": f"a{PAD}"}}]
    body = {"messages": user(text(f"{PAD} "), *[part(ONE)] * count), "tools": tools, "return_prompt_text": True}
    answer = client.post(CHAT, body)
    assert answer.status_code == 200 and answer.json()["prompt_text"].count(PAD) == 2 + count
    shown, [*pictures] = client.llm.seen[-1][0], client.llm.pictures[-1]
    assert len(pictures) == count and shown.count(PAD) == 2 + 6 * count and f"a{PAD}" in shown
    assert f"{PAD} {WHOLE * count}" in shown


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
def test_embeddings(client, path):
    """As vLLM's, of what models of both are made for."""
    answer = client.post(path, {"messages": user(text(f"a {PAD}"), part(ONE)), "normalize": False}).json()
    shown, [placed] = client.llm.pooled[-1][0], client.llm.pictures[-1]
    assert f"user\na {PAD}{WHOLE}<|im_end|>" in shown and placed.picture.grid == (2, 3)
    assert answer["usage"]["prompt_tokens"] == answer["data"][0].get("embedding", answer["data"][0].get("data"))[0] / 3
    assert client.post(path, {"messages": user(text("a"))}).status_code == 200 and len(client.llm.pictures) == 1


def test_a_template_of_texts_has_the_token_before_them():
    llm = SeeingLLM(template_source=WORDS)
    assert Client(llm).post(CHAT, {"messages": user(text("a"), part(ONE), text("b"))}).status_code == 200
    check(llm, f"user\n{WHOLE}\na\nb<|im_end|>")


def test_how_many(monkeypatch):
    client = Client(SeeingLLM(limit=1))
    assert client.post(CHAT, {"messages": user(part(ONE))}).status_code == 200
    monkeypatch.setattr(images, "pixels_of", None)
    told = error(client.post(CHAT, {"messages": user(part(ONE), part(ONE))}), 400)
    assert 'the prompt has 2 images; limit_mm_per_prompt={"image": 1} allows 1' in told["message"]
    told = error(Client(SeeingLLM(limit=0)).post(CHAT, {"messages": user(part(ONE))}), 400)
    assert "allows 0" in told["message"]


def test_more_than_there_is_room_for_ends_early():
    llm = SeeingLLM(max_model_len=160)
    every = [part(picture(32, 48, shade)) for shade in range(40)]
    told = error(Client(llm).post(CHAT, {"messages": user(*every)}), 400)
    assert "at least 192 tokens in its first 24 images; max_model_len=160" in told["message"]
    assert told["code"] == "context_length_exceeded" and len(llm.prepared) == 24
    told = error(Client(llm).post(CHAT, {"messages": user(part(ONE), text("the quick " * 100))}), 400)
    assert told["code"] == "context_length_exceeded"


def test_an_image_that_comes_again_is_prepared_once():
    llm = SeeingLLM()
    client = Client(llm)
    for _ in range(3):
        assert client.post(CHAT, {"messages": user(part(ONE), part(TWO), part(ONE))}).status_code == 200
    assert len(llm.prepared) == 2
    told = client.get("/metrics").text
    assert 'vllm:mm_cache_queries_total{model_name="fake",engine="0"} 9\n' in told
    assert 'vllm:mm_cache_hits_total{model_name="fake",engine="0"} 7\n' in told
    spaced = {"type": "image_url", "image_url": {"url": data_url(ONE).replace("image/png", "image/PNG;a=b")}}
    client.post(CHAT, {"messages": user(spaced)})
    assert len(llm.prepared) == 2


def test_the_least_recently_sent_are_forgotten():
    llm = SeeingLLM()
    one = Images(llm.images.sight, llm.tokenizer, kept=3 * 6 * 3 * 4)  # float32 [6, 3] each
    pixels = [np.full((32, 48, 3), shade, np.uint8) for shade in range(4)]
    kept = [one.prepared(own) for own in pixels[:3]]
    assert one.prepared(pixels[0]) is kept[0]
    one.prepared(pixels[3])  # in the place of the second
    assert one.prepared(pixels[0]) is kept[0] and one.prepared(pixels[2]) is kept[2]
    assert one.prepared(pixels[1]) is not kept[1] and len(llm.prepared) == 5
    assert one.prepared(kept[1]) is kept[1]  # a Picture is as it is
    assert one.prepared(pixels[0].reshape(48, 32, 3)).grid == (3, 2)  # of the same bytes


def test_they_are_prepared_beside_the_event_loop(llm, monkeypatch):
    threads = []

    def read(image):
        threads.append(threading.current_thread().name)
        return pixels_of(image)

    monkeypatch.setattr(images, "pixels_of", read)
    assert Client(llm).post(CHAT, {"messages": user(part(ONE))}).status_code == 200
    assert len(threads) == 1 and threads[0].startswith("images")


def test_of_what_is_prompts_in_memory(llm):
    """As LLM.generate and AsyncLLM.generate have them."""
    ids = llm.tokenizer.encode(f"a {PAD} b {PAD}")
    found, placed = images.with_images(llm.images, ids, Given([ONE, pixels_of(TWO)]), 100)
    assert llm.tokenizer.decode(found, skip_special=False) == f"a {seen(2, 3)} b {seen(1, 1)}"
    assert shades(placed) == [90, 7]
    for given, words in (
        ([], "has places for 2 images and comes with 0"),
        ([ONE], "has places for 2 images and comes with 1"),
        ([ONE, 3], "image 2 of 2: an image is a int; give a PIL.Image"),
        ([ONE, "https://a/b"], "image 2 of 2: an image's address is"),
    ):
        with pytest.raises(ShardlmError, match=words):
            images.with_images(llm.images, ids, Given(given), 100)
    with pytest.raises(ShardlmError, match="this model reads text, and the prompt has 1 images; images are read by"):
        images.with_images(None, ids, Given([ONE]), 100)
    assert images.images_of({"prompt": "a", "multi_modal_data": {"image": ONE}}) == (ONE,)
    for none in ({}, {"image": None}, {"image": ()}, None):
        assert images.images_of({"prompt": "a", "multi_modal_data": none}) == images.images_of("a") == ()
    for wrong in ({"audio": 1}, [ONE]):
        with pytest.raises(ShardlmError, match=r'multi_modal_data has .*; it is {"image": one or a list, "video": one'):
            images.images_of({"prompt": "a", "multi_modal_data": wrong})
