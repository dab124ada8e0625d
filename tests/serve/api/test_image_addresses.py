"""Images that requests name by their address: where they may be, how many come at once, and once for a request."""

import asyncio
import json

import pytest
from client import Client, error
from seeing_llm import SeeingLLM, part, picture, text
from test_images import CHAT, ONE, SMALL, TWO, WHOLE, check, user

from shardlm.serve import media
from shardlm.serve.api import service
from shardlm.serve.media import MediaRules


@pytest.fixture
def llm():
    return SeeingLLM()


def test_addresses(tmp_path, monkeypatch):
    (tmp_path / "a.png").write_bytes(ONE)
    llm = SeeingLLM()
    client = Client(llm, media=MediaRules(("images.example",), str(tmp_path)))

    async def fetched(url, rules, most):
        assert (url, rules.allowed_media_domains) == ("https://images.example/b", ("images.example",))
        await asyncio.sleep(0)
        return TWO

    monkeypatch.setattr(media, "_http", fetched)
    addresses = (tmp_path / "a.png").as_uri(), "https://images.example/b"
    parts = [{"type": "image_url", "image_url": url} for url in addresses]
    assert client.post(CHAT, {"messages": user(*parts)}).status_code == 200
    check(llm, WHOLE + SMALL, pictures=((2, 3, 90), (1, 1, 7)))
    for wrong, words in (
        ({"type": "image_url", "image_url": {"url": "a.png"}}, "begins with data:, https:, http: or file:"),
        ({"type": "image", "image": {"a": 1}}, "an image is a dict; it is an address"),
        ({"type": "image_url"}, "without an address"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "is not below the folder"),
        (part(picture(8, 8)), "8 x 8 pixels; it has 16 of a side"),
    ):
        told = error(
            client.post(CHAT, {"messages": [{"role": "system", "content": "s"}, *user(text("a"), wrong)]}), 400
        )
        assert words in told["message"]
        assert told["param"] == ("messages[1].content[1]" if "without" in words else "messages")
    asks = {"instructions": "s", "input": user({"type": "input_text", "text": "a"}, {"type": "input_image"})}
    told = error(client.post("/v1/responses", asks), 400)
    assert "without an address" in told["message"] and told["param"] == "input[0].content[1]"
    asks = {"instructions": "s", "input": user({"type": "input_image", "image_url": "a.png"})}
    told = error(client.post("/v1/responses", asks), 400)
    assert told["message"].startswith("image 1 of 1: ") and told["param"] == "input"


async def _held(client, monkeypatch, requests, file):
    """(answers to requests of twelve images by address; the most that were fetched at once; how many waited then)."""
    now, most, waited = 0, 0, []

    async def fetched(url, *_):
        nonlocal now, most
        now += 1
        most = max(most, now)
        waited.append(client.service.unanswered)
        try:
            await asyncio.sleep(0.05)
        finally:
            now -= 1
        return file

    monkeypatch.setattr(media, "_http", fetched)
    parts = [{"type": "image_url", "image_url": f"https://images.example/{i}"} for i in range(12)]
    content = json.dumps({"messages": user(*parts)})
    answers = await asyncio.gather(*(client.send("POST", CHAT, content) for _ in range(requests)))
    return answers, most, max(waited)


@pytest.mark.parametrize(("file", "status"), [(ONE, 200), (b"none", 400)])
def test_files_of_all_requests_have_a_bound(llm, monkeypatch, file, status):
    monkeypatch.setattr(service, "FILES", 10)
    client = Client(llm)
    answers, most, waited = asyncio.run(_held(client, monkeypatch, 3, file))
    assert [answer.status_code for answer in answers] == [status] * 3 and (most, waited) == (10, 3)
    assert client.service.unanswered == 0 and client.service.files._value == 10


def test_a_request_that_is_looked_at_several_times_fetches_its_images_once(llm, monkeypatch):
    """As where turns are left out until the model has room for the rest."""
    asked = []

    async def fetched(url, *_):
        asked.append(url)
        return ONE

    monkeypatch.setattr(media, "_http", fetched)
    turns = [
        turn
        for i in range(9)
        for turn in (
            user({"type": "input_image", "image_url": f"https://images.example/{i}"})[0],
            {"role": "assistant", "content": "the quick brown fox " * 3},
        )
    ]
    llm.max_model_len = 220
    body = {"input": [*turns, *user({"type": "input_text", "text": "a"})], "truncation": "auto", "max_output_tokens": 9}
    answer = Client(llm).post("/v1/responses", body)
    assert answer.status_code == 200, answer.text
    assert 1 < len(llm.pictures[-1]) < 9 and len(asked) == len(set(asked)) == 9


def test_requests_whose_images_come_wait_with_the_others(llm, monkeypatch):
    client = Client(llm, max_queue=2)
    answers, _, waited = asyncio.run(_held(client, monkeypatch, 5, ONE))
    refused = [answer for answer in answers if answer.status_code != 200]
    assert len(refused) == 3 and waited == 2
    assert all("2 requests wait for their first token" in error(answer, 429)["message"] for answer in refused)
