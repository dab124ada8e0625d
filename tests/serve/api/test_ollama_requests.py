"""What any client may send to Ollama's interface."""

import json

import numpy as np
import pytest
from client import Client
from fake_llm import FakeLLM

from shardlm.serve.api.ollama.names import known_as, tagged
from shardlm.serve.classifier import Classifier
from shardlm.serve.pooling import Pooling

USER = [{"role": "user", "content": "hi"}]
TEXT = "the quick brown fox"


def test_a_model_without_a_template_goes_on():
    made = Client(FakeLLM(template_name=""))
    ask = {"model": "fake", "stream": False, "prompt": "the lazy"}
    assert made.post("/api/generate", ask).json()["response"] == TEXT and made.llm.seen[-1][0] == "the lazy"
    context = made.post("/api/generate", ask).json()["context"]
    made.post("/api/generate", {**ask, "context": context, "prompt": " dog"})
    assert made.llm.seen[-1][0] == f"the lazy{TEXT} dog"
    for path, wish, words in (
        ("generate", {"system": "s"}, "system needs a chat template"),
        ("generate", {"think": True}, '"fake" does not support thinking'),
        ("chat", {"messages": USER}, '"fake" does not support chat'),
    ):
        response = made.post(f"/api/{path}", {**ask, **wish})
        assert response.status_code == 400 and words in response.json()["error"]


@pytest.mark.parametrize(
    ("template", "pooling", "told"),
    [
        ("qwen3", Pooling(4), ["completion", "tools", "thinking"]),
        ("", Pooling(4), ["completion"]),
        ("", Pooling(4, classifier=Classifier(np.ones((1, 4)), np.zeros(1), ("yes",), "sigmoid")), ["embedding"]),
    ],
)
def test_what_a_model_can_do(template, pooling, told):
    made = Client(FakeLLM(template_name=template, pooling=pooling))
    assert made.post("/api/show", {"name": "fake"}).json()["capabilities"] == told


def test_names_as_ollama_matches_them():
    assert tagged("llama3.2") == "llama3.2:latest" and tagged("host:80/a/b") == "host:80/a/b:latest"
    assert known_as("llama3.2", ["llama3.2:3b", "llama3.2:latest"]) == "llama3.2:latest"
    assert known_as("registry.ollama.ai/library/Llama3.2:3B", ["llama3.2:3b"]) == "llama3.2:3b"
    assert known_as("a:latest", ["a", "a:latest"]) == "a:latest" and known_as("a:1", ["a"]) is None


HOSTILE = {
    "no JSON": b"{",
    "no UTF-8": b'{"model": "fake", "prompt": "\xff"}',
    "half a character": b'{"model": "fake", "prompt": "\\ud83d"}',
    "a list": b"[]",
    "no model": {"prompt": "hi"},
    "model": {"model": 3},
    "prompt": {"prompt": ["hi"]},
    "options": {"options": [1]},
    "temperature": {"options": {"temperature": -1}},
    "hot": {"options": {"temperature": "hot"}},
    "large": {"options": {"temperature": 1e300}},
    "top_k": {"options": {"top_k": -5}},
    "seed": {"options": {"seed": 10**30}},
    "num_predict": {"options": {"num_predict": -7}},
    "repeat_penalty": {"options": {"repeat_penalty": 0}},
    "stop": {"options": {"stop": [""]}},
    "format": {"format": "xml"},
    "schema": {"format": {"type": "no such"}},
    "think": {"think": "a lot"},
    "top_logprobs": {"top_logprobs": 21},
    "context": {"context": [-1]},
    "messages": {"messages": [{"content": "hi"}]},
    "calls": {"messages": [{"role": "assistant", "tool_calls": [3]}]},
    "function": {"messages": [{"role": "assistant", "tool_calls": [{"function": 3}]}]},
    "tools": {"messages": USER, "tools": [{"function": {}}]},
    "images": {"messages": [{**USER[0], "images": ["aGk="]}]},
}
WORDS = {"repeat_penalty": "repeat_penalty=0", "format": 'expected "json"', "no model": "model is required"}


@pytest.mark.parametrize("stream", [True, False])
def test_what_makes_no_sense_is_refused_in_ollamas_form(stream):
    made = Client(FakeLLM(template_name="qwen3"), max_body=10_000)
    for name, wish in HOSTILE.items():
        path = "/api/chat" if isinstance(wish, dict) and "messages" in wish else "/api/generate"
        usual = {} if name == "no model" else {"model": "fake"}
        raw = wish if isinstance(wish, bytes) else json.dumps({**usual, "prompt": "hi", "stream": stream, **wish})
        response = made.post(path, raw=raw)
        told = response.json()
        assert response.status_code == 400 and told.keys() == {"error"}, (name, response.text)
        assert told["error"] and WORDS.get(name, "") in told["error"], name
    assert made.post("/api/chat", raw=b" " * 20_000).status_code == 413
    assert isinstance(made.get("/api/nothing").json()["error"], str) and made.get("/api/chat").status_code == 405
    assert not made.llm.seen and made.service.active == 0
