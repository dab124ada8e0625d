"""/v1/completions, /v1/embeddings, /tokenize and /detokenize, as their clients see them."""

import array
import base64
import dataclasses

import numpy as np
import pytest
from client import Client, error
from fake_llm import FakeLLM, tokenizer
from pytest import approx

from shardlm.errors import ShardlmError
from shardlm.serve.classifier import Classifier
from shardlm.serve.outputs import CompletionOutput
from shardlm.serve.pooling import Pooling
from shardlm.serve.sampling_params import SamplingParams, StructuredOutputs

IDS = tokenizer().encode("the lazy dog")
PATH = "/v1/completions"


def test_prompts_of_every_kind_with_usage_and_several_replies():
    client = Client(FakeLLM(reply=lambda prompt: prompt[::-1]))
    for prompt in ("the lazy dog", ["the lazy dog"], IDS, [IDS]):
        body = client.post(PATH, {"prompt": prompt, "max_tokens": 100, "model": "fake"}).json()
        assert body["object"] == "text_completion" and body["id"].startswith("cmpl-") and body["model"] == "fake"
        assert body["choices"][0]["text"] == "god yzal eht"
    body = client.post(PATH, {"prompt": ["a b", "c d e"], "n": 2, "max_tokens": 100}).json()
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "b a"), (1, "b a"), (2, "e d c"), (3, "e d c")]
    read, wrote = (sum(len(tokenizer().encode(t)) for t in texts) for texts in (("a b", "c d e"), ("b a", "e d c") * 2))
    assert body["usage"] == {
        "prompt_tokens": read,
        "completion_tokens": wrote,
        "total_tokens": read + wrote,
        "prompt_tokens_details": {"cached_tokens": 6},
    }
    assert client.service.unanswered == client.service.active == 0 and not client.llm.running


def test_log_probabilities_as_lm_eval_reads_them():
    """Its local-completions asks for an echo and one more token, and sums token_logprobs[context : -1]."""
    client = Client()
    body = {"prompt": IDS, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 1234}
    choice = client.post(PATH, body).json()["choices"][0]
    scores = choice["logprobs"]
    assert choice["text"] == "the lazy dog" + "the" and scores["tokens"] == ["the", " lazy", " dog", "the"]
    assert scores["token_logprobs"] == [None, -4.0, -0.5, -0.5] and scores["text_offset"] == [0, 3, 8, 12]
    assert scores["top_logprobs"][0] is None
    pairs = zip(scores["top_logprobs"][1:], scores["token_logprobs"][1:], strict=True)
    assert [max(top.values()) == own for top, own in pairs] == [False, True, True]  # greedy or not
    # The prompt alone; without an echo, offsets count in the text that is there.
    only = client.post(PATH, {**body, "max_tokens": 0, "prompt": "the lazy dog"}).json()["choices"][0]
    assert only["text"] == "the lazy dog" and only["logprobs"]["token_logprobs"] == [None, -4.0, -0.5]
    plain = client.post(PATH, {**body, "echo": False, "max_tokens": 2, "logprobs": 2}).json()["choices"][0]["logprobs"]
    assert plain["text_offset"] == [0, 3] and [len(top) for top in plain["top_logprobs"]] == [2, 3]
    # vLLM's report on the prompt.
    told = client.post(PATH, {"prompt": IDS, "prompt_logprobs": 1}).json()["choices"][0]["prompt_logprobs"]
    assert told[0] is None and told[1][str(IDS[1])] == {"logprob": -4.0, "rank": 2, "decoded_token": " lazy"}


@pytest.mark.parametrize("chunk", [1, 3])
def test_streams_join_to_the_whole(chunk):
    """Offsets too, where the prompt or the reply has characters of several tokens."""
    client = Client(FakeLLM(reply=lambda prompt: prompt + " 日🙂 and so on", chunk=chunk))
    wishes = {
        "prompt": ["the fox", "the ロ dog"],
        "n": 2,
        "echo": True,
        "logprobs": 1,
        "max_tokens": 9,
        "stop": "o o",
    }
    whole = client.post(PATH, wishes).json()
    *events, usage = client.events(PATH, {**wishes, "stream_options": {"include_usage": True}})
    assert usage["choices"] == [] and usage["usage"] == whole["usage"]
    joined = {}
    for event in events:
        assert event["object"] == "text_completion" and event["usage"] is None
        (part,) = event["choices"]
        choice = joined.setdefault(part["index"], part)
        if choice is not part:
            assert choice["finish_reason"] is None
            choice["text"] += part["text"]
            choice |= {"finish_reason": part["finish_reason"], "stop_reason": part["stop_reason"]}
            for key, values in part["logprobs"].items():
                choice["logprobs"][key] += values
    assert [joined[i] for i in range(4)] == whole["choices"]
    for choice in whole["choices"]:
        scores, text = choice["logprobs"], choice["text"]
        for token, at in zip(scores["tokens"], scores["text_offset"], strict=True):
            assert "\ufffd" in token or at + len(token) > len(text) or text.startswith(token, at)


class Uneven(FakeLLM):
    """The second reply begins after the first."""

    async def _replies(self, *arguments):
        began = False
        async for first, second in super()._replies(*arguments):
            if not began:
                yield [first, CompletionOutput(1, "", [], None, second.logprobs and [])]
            began = True
            yield [first, second]


def test_what_is_told_with_the_first_part_comes_where_a_reply_begins_late():
    client = Client(Uneven(chunk=2))
    body = {"prompt": "the fox", "n": 2, "logprobs": 1, "prompt_logprobs": 0, "return_token_ids": True}
    events = [event["choices"][0] for event in client.events(PATH, body)]
    for index in (0, 1):
        first, *rest = [choice for choice in events if choice["index"] == index]
        assert first["prompt_token_ids"] and first["prompt_logprobs"] and first["logprobs"]["text_offset"][0] == 0
        assert not any("prompt_token_ids" in choice for choice in rest)


def test_what_is_left_open_is_as_the_checkpoint_recommends():
    client = Client(sampling={"temperature": 0.6, "top_k": 20})
    client.post(PATH, {"prompt": "a", "temperature": 0, "top_p": 0.5})
    client.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})
    (_, text, _), (_, chat, _) = client.llm.seen
    assert (text.temperature, text.top_p, text.top_k) == (0, 0.5, 20)
    assert (chat.temperature, chat.top_p, chat.top_k) == (0.6, 1, 20)


def test_every_wish_reaches_the_engine():
    client = Client()
    wishes = {"n": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "seed": 7}
    wishes |= {"presence_penalty": 0.2, "frequency_penalty": -0.2, "logit_bias": {"65": 3}, "bad_words": ["x"]}
    wishes |= {"stop": ["a", "b"], "stop_token_ids": [66], "ignore_eos": True, "include_stop_str_in_output": True}
    wishes |= {"skip_special_tokens": False, "max_tokens": 4, "min_tokens": 2, "prompt_logprobs": 0, "logprobs": 3}
    wishes |= {"truncate_prompt_tokens": 2}
    ignored = {"user": "me", "metadata": {"a": 1}, "store": True, "best_of": 2}
    extra = {"guided_choice": ["the quick brown fox"], "priority": -3}
    response = client.post(PATH, {"prompt": "the lazy dog", **wishes, **ignored, **extra})
    assert response.status_code == 200, response.text
    prompt, params, priority = client.llm.seen[-1]
    choice = StructuredOutputs(choice=["the quick brown fox"])
    assert params == SamplingParams(**{**wishes, "structured_outputs": choice, "logit_bias": {65: 3.0}})
    assert prompt == " lazy dog" and priority == -3 and client.service.metrics.ignored_fields == 0
    # Left out or null: the defaults. What is not known is counted and left aside.
    client.post(
        PATH, {"prompt": "a", **dict.fromkeys([*wishes, *ignored, *extra, "model", "stream"]), "new_field": 1, "z": {}}
    )
    assert client.llm.seen[-1][1:] == (SamplingParams(), 0) and client.service.metrics.ignored_fields == 2
    # vLLM's -1, and what is larger than any vocabulary.
    client.post(PATH, {"prompt": "a", "truncate_prompt_tokens": -1, "top_k": 10**30, "max_tokens": 10**30})
    params = client.llm.seen[-1][1]
    assert (params.truncate_prompt_tokens, params.top_k, params.max_tokens) == (4095, 2**31 - 1, 2**31 - 1)
    # The echo of a prompt that was cut is what the model saw.
    cut = client.post(PATH, {"prompt": "the lazy dog", "truncate_prompt_tokens": 1, "echo": True, "max_tokens": 1})
    assert cut.json()["choices"][0]["text"] == " dogthe"


def test_scores_and_ranks_are_cosines_of_embeddings():
    client = Client()
    vectors = {"a": (1.0, 0.0), "b": (0.6, 0.8), "c": (0.0, 1.0)}

    async def pool(ids, lora_request=None, **options):
        return np.array(vectors[client.llm.tokenizer.decode(ids)]) * 7

    client.llm.pool = pool
    for path, left, right in (("/score", "text_1", "text_2"), ("/v1/score", "queries", "documents")):
        body = client.post(path, {left: "a", right: ["b", "c"]}).json()
        assert [one["score"] for one in body["data"]] == approx([0.6, 0.0]) and body["usage"]["total_tokens"] == 3
        assert body["id"].startswith("score-") and [one["index"] for one in body["data"]] == [0, 1]
        each = client.post(path, {left: ["a", "c"], right: ["b", "b"]}).json()["data"]
        assert [one["score"] for one in each] == approx([0.6, 0.8])
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        body = client.post(path, {"query": "c", "documents": ["a", {"text": "b"}, "c"], "top_n": 2}).json()
        shown = [(one["index"], one["relevance_score"], one["document"]["text"]) for one in body["results"]]
        assert shown == [(2, approx(1), "c"), (1, approx(0.8), "b")] and body["usage"]["total_tokens"] == 4
    bare = client.post("/rerank", {"query": "c", "documents": ["a"], "return_documents": False}).json()["results"]
    assert bare == [{"index": 0, "relevance_score": 0.0}]
    for path, wrong, message in (
        ("/score", {"text_1": "a"}, "needed in documents or text_2 or data_2; given: none"),
        ("/score", {"text_1": "a", "queries": "a", "text_2": "b"}, "given: queries, text_1"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_1 has 2 texts and text_2 1; give one for all"),
        ("/score", {"text_1": "", "text_2": ["a"]}, "text_1 is empty"),
        ("/rerank", {"query": "a", "documents": []}, "documents is empty"),
        ("/rerank", {"query": "a", "documents": [{"image": "x"}]}, r"documents[0] has no text"),
        ("/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n=-1 must be at least 0"),
    ):
        assert message in error(client.post(path, wrong), 400)["message"]


def test_scores_of_a_model_that_reads_both_texts():
    head = Classifier(np.array([[1, 0, 0, 0]], np.float32), np.zeros(1, np.float32), ("LABEL_0",), "sigmoid")
    client = Client(FakeLLM(pooling=Pooling(4, None, head)))
    body = client.post("/score", {"queries": "the", "documents": ["lazy dog", "fox"]}).json()
    assert [text for text, *_ in client.llm.pooled] == ["thelazy dog", "thefox"]
    counts = [len(tokenizer().encode(text)) for text in ("the", "lazy dog", "fox")]
    sizes = [counts[0] + n for n in counts[1:]]
    assert [one["score"] for one in body["data"]] == approx([1 / (1 + np.exp(-3 * n)) for n in sizes])
    assert body["usage"]["prompt_tokens"] == sum(sizes)
    raw = {"query": "the", "documents": ["lazy dog", "fox"], "use_activation": False}
    ranked = client.post("/rerank", raw).json()["results"]
    assert sorted(one["relevance_score"] for one in ranked) == sorted(3.0 * n for n in sizes)
    assert error(Client().post("/classify", {"input": "a"}), 400)["message"].startswith("this model has no head")
    assert Client().post("/pooling", {"input": "a"}).json()["data"][0]["data"] == approx([0.6, 0, -0.8, 0])


def test_embeddings():
    client, path = Client(), "/v1/embeddings"
    vectors = lambda **body: [one["embedding"] for one in client.post(path, body).json()["data"]]  # noqa: E731
    body = client.post(path, {"input": ["the lazy dog", "the"], "model": "fake"}).json()
    assert [one["embedding"] for one in body["data"]] == [approx([0.6, 0, -0.8, 0])] * 2
    assert body["usage"] == {"prompt_tokens": 4, "total_tokens": 4} and body["data"][1]["index"] == 1
    [coded] = vectors(input=IDS, encoding_format="base64")
    assert list(array.array("f", base64.b64decode(coded))) == approx([0.6, 0, -0.8, 0])
    for name in ("normalize", "use_activation"):
        assert vectors(input=[IDS, IDS[:1]], **{name: False}) == [[9, 0, -12, 0], [3, 0, -4, 0]]
    assert vectors(input="a", dimensions=4) == vectors(input="a")  # which are its own
    for wrong, value, param in (
        ("dimensions", 2, "dimensions"),
        ("input", [1, 10**6], None),
        ("encoding_format", "x", "encoding_format"),
        ("input", None, "input"),
        ("messages", [{"role": "user", "content": "hi"}], "input"),
        ("cache_salt", "", "cache_salt"),
        ("priority", 2**40, "priority"),
    ):
        assert error(client.post(path, {"input": "a", wrong: value}), 400)["param"] == param
    assert (
        "differ; give one"
        in error(client.post(path, {"input": "a", "normalize": True, "use_activation": False}), 400)["message"]
    )


def test_embeddings_of_models_that_were_trained_to_be_cut():
    client = Client(FakeLLM(pooling=Pooling.of(4, {"is_matryoshka": True})))
    cut = lambda size: client.post("/v1/embeddings", {"input": "a", "dimensions": size})  # noqa: E731
    assert [cut(n).json()["data"][0]["embedding"] for n in (1, 3)] == [[1.0], approx([0.6, 0, -0.8])]
    for size in (0, 5):
        assert f"dimensions={size} must be from 1 to the model's 4" in error(cut(size), 400)["message"]
    client.llm.pooling = Pooling.of(4, {"matryoshka_dimensions": [2]})
    assert cut(2).json()["data"][0]["embedding"] == [1.0, 0.0] and cut(4).is_success
    assert error(cut(3), 400)["message"].endswith("[2]")
    for sizes in (4, [0], [5], ["2"]):
        with pytest.raises(ShardlmError, match="sizes from 1 to the model's 4"):
            Pooling.of(4, {"matryoshka_dimensions": sizes})


def test_embeddings_of_chats():
    client, chat = Client(), [{"role": "user", "content": "the fox"}]
    order = {"priority": 3, "cache_salt": "mine"}
    body = client.post("/v1/embeddings", {"messages": chat, **order}).json()
    [(text, *rest)] = client.llm.pooled
    assert text.endswith("<|im_start|>user\nthe fox<|im_end|>\n") and rest == [3, "mine"]
    assert body["usage"]["prompt_tokens"] == len(client.llm.tokenizer.encode(text)) and len(body["data"]) == 1
    client.post("/v1/embeddings", {"messages": chat, "add_generation_prompt": True})
    assert client.llm.pooled[-1][0] == f"{text}<|im_start|>assistant\n"
    refused = error(client.post("/v1/embeddings", {"messages": chat, "chat_template": "{{ messages }}"}), 400)
    assert refused["param"] == "chat_template" and client.service.metrics.ignored_fields == 0


def test_the_end_that_a_checkpoint_names_is_told():
    """That of chats is often another than that of documents."""
    client = Client()
    assert client.get("/tokenizer_info").json()["eos_token"] == "<|endoftext|>"
    named = dataclasses.replace(client.llm.template, special={"eos_token": "<|im_end|>"})
    client.llm.template = named
    assert client.get("/tokenizer_info").json()["eos_token"] == "<|im_end|>"


def test_tokens_there_and_back():
    client = Client()
    body = client.post("/tokenize", {"prompt": "the lazy dog", "return_token_strs": True}).json()
    assert body == {"count": 3, "max_model_len": 4096, "tokens": IDS, "token_strs": ["the", " lazy", " dog"]}
    assert client.post("/detokenize", {"tokens": IDS}).json() == {"prompt": "the lazy dog"}
    chat = client.post("/tokenize", {"messages": [{"role": "user", "content": "the"}]}).json()
    text = client.post("/detokenize", {"tokens": chat["tokens"]}).json()["prompt"]
    assert text.endswith("<|im_start|>user\nthe<|im_end|>\n<|im_start|>assistant\n") and chat["token_strs"] is None
    assert error(client.post("/tokenize", {}), 400)["param"] == "prompt"
    assert "outside the vocabulary" in error(client.post("/detokenize", {"tokens": [-1]}), 400)["message"]


def test_what_the_tokenizer_puts_before_a_text_is_left_out():
    client = Client()
    for prompt in ("the lazy dog", IDS):
        client.post(PATH, {"prompt": prompt, "add_special_tokens": False, "max_tokens": 1})
    assert [seen for seen, *_ in client.llm.seen] == ["the lazy dog"] * 2
    told = client.post(PATH, {"prompt": "the", "add_special_tokens": False, "echo": True, "max_tokens": 1}).json()
    assert told["choices"][0]["text"].startswith("the")
