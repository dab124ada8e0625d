"""Fields that vLLM has beside OpenAI's: ids of tokens, usage in each chunk, what is echoed, salts, documents."""

import asyncio
import dataclasses

import pytest
from client import Client, error
from fake_llm import FakeLLM

from shardlm.chat import ChatTemplate

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("logprobs", (None, 1))
def test_ids_of_tokens_whole_and_streamed(logprobs):
    client = Client(FakeLLM(chunk=2))
    encode, decode = client.llm.tokenizer.encode, client.llm.tokenizer.decode
    reply = encode("the quick brown fox")
    body = {"prompt": [encode("the fox"), encode("dog")], "n": 2, "return_token_ids": True, "logprobs": logprobs}
    choices = client.post(TEXT, body).json()["choices"]
    assert [choice["token_ids"] for choice in choices] == [reply] * 4
    assert [decode(choice["prompt_token_ids"]) for choice in choices] == ["the fox"] * 2 + ["dog"] * 2
    found, prompts = {}, {}
    for event in client.events(TEXT, body):
        for choice in event["choices"]:
            index = choice["index"]
            assert ("prompt_token_ids" in choice) == (index not in found)
            prompts.setdefault(index, choice.get("prompt_token_ids"))
            found[index] = found.get(index, []) + choice["token_ids"]
    assert found == dict.fromkeys(range(4), reply) and [decode(prompts[i]) for i in (0, 3)] == ["the fox", "dog"]
    first, *rest = client.events(CHAT, {"messages": USER, "return_token_ids": True})
    assert decode(first["prompt_token_ids"], skip_special=False) == client.llm.seen[-1][0]
    assert [id for one in rest for id in one["choices"][0].get("token_ids", ())] == reply
    assert "token_ids" not in str(client.post(CHAT, {"messages": USER}).json())


def test_tokens_by_their_ids_in_log_probabilities():
    client = Client()
    reply = [f"token_id:{token}" for token in client.llm.tokenizer.encode("the quick brown fox")]
    wish = {"return_tokens_as_token_ids": True}
    body = {"messages": USER, "logprobs": True, "top_logprobs": 2, **wish}
    told = client.post(CHAT, body).json()["choices"][0]["logprobs"]["content"]
    assert [one["token"] for one in told] == reply and told[0]["bytes"] == list(reply[0].encode())
    assert told[1]["top_logprobs"][0]["token"] == "token_id:60"
    legacy = client.post(TEXT, {"prompt": "dog", "logprobs": 1, "echo": True, **wish}).json()["choices"][0]["logprobs"]
    dog = [f"token_id:{token}" for token in client.llm.tokenizer.encode("dog")]
    assert legacy["tokens"] == dog + reply and set(legacy["top_logprobs"][-1]) <= {"token_id:60", reply[-1]}
    assert legacy["text_offset"][len(dog)] == len("dog")


@pytest.mark.parametrize("path", (CHAT, TEXT))
def test_usage_in_each_chunk(path):
    client = Client(FakeLLM(chunk=2))
    body = {"messages": USER} if path == CHAT else {"prompt": "a"}
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = client.events(path, {**body, "stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and len(set(counts)) >= 2 and chunks[-1]["usage"] == last["usage"]
    for without in ({"include_usage": True}, {"continuous_usage_stats": True}):
        some = client.events(path, {**body, "stream_options": without})
        assert not any(chunk.get("usage") for chunk in some[:-1])


def test_chats_echo_what_the_reply_goes_on_with():
    client = Client()
    parts = [{"type": "text", "text": "The"}, {"type": "text", "text": "lazy"}]
    for content, shown in (("The lazy", "The lazy"), (parts, "The\nlazy")):
        body = {"messages": [*USER, {"role": "assistant", "content": content}], "echo": True}
        body |= {"continue_final_message": True, "n": 2}
        for choice in client.post(CHAT, body).json()["choices"]:
            assert choice["message"]["content"] == f"{shown}the quick brown fox"
        events = client.events(CHAT, body)
        texts = {0: "", 1: ""}
        for choice in (choice for event in events for choice in event["choices"]):
            texts[choice["index"]] += choice["delta"].get("content") or ""
        assert set(texts.values()) == {f"{shown}the quick brown fox"}
    plain = client.post(CHAT, {"messages": USER, "echo": True}).json()
    assert plain["choices"][0]["message"]["content"] == "the quick brown fox"  # the last message is not its own


def test_what_goes_to_the_template_and_the_engine():
    client = Client()
    client.llm.template = ChatTemplate(
        "{% for d in documents or [] %}{{ d.text }}{% endfor %}!{{ messages[0].content }}"
    )
    documents = [{"title": "T", "text": "rain"}]
    client.post(CHAT, {"messages": USER, "documents": documents, "cache_salt": "secret"})
    assert client.llm.seen[-1][0] == "rain!hi" and client.llm.salts == ["secret"]
    client.post(TEXT, {"prompt": "a", "cache_salt": "other"})
    client.post(TEXT, {"prompt": "a"})
    assert client.llm.salts == ["secret", "other", ""] and client.service.metrics.ignored_fields == 0
    starts = []
    plain = client.llm.tokenizer
    client.llm.tokenizer = Starting(plain, starts)
    for wish in ({}, {"add_special_tokens": True}, {"add_special_tokens": False}):
        assert client.post(CHAT, {"messages": USER, **wish}).status_code == 200
    assert starts == ["!hi"]


@dataclasses.dataclass
class Starting:
    """A tokenizer that says when it puts something at the ends."""

    plain: object
    starts: list

    def __getattr__(self, name):
        return getattr(self.plain, name)

    def encode_prompt(self, text):
        self.starts.append(text)
        return self.plain.encode_prompt(text)


def test_ids_that_the_client_gives_and_fields_of_responses():
    client = Client()
    for path, body, head in ((CHAT, {"messages": USER}, "chatcmpl"), (TEXT, {"prompt": "a"}, "cmpl")):
        body["request_id"] = "mine"
        answers = [client.post(path, body).json(), *client.events(path, body)]  # in use twice at once would do, too
        assert {answer["id"] for answer in answers} == {f"{head}-mine"}
        assert error(client.post(path, {**body, "request_id": "a" * 10**5}), 400)["param"] == "request_id"
    wishes = {"top_k": 3, "seed": 7, "stop": ["fox"], "priority": 2, "cache_salt": "s", "repetition_penalty": 1.5}
    body = client.post("/v1/responses", {"input": "hi", **wishes, "ignore_eos": True}).json()
    _, params, priority = client.llm.seen[-1]
    assert (params.top_k, params.seed, params.stop, params.repetition_penalty) == (3, 7, ("fox",), 1.5)
    assert params.ignore_eos and priority == 2 and client.llm.salts[-1] == "s"
    assert body["output"][0]["content"][0]["text"] == "the quick brown "
    assert client.service.metrics.ignored_fields == 0


def test_sagemaker_asks_for_all_at_one_path():
    client, seen = Client(), []
    for body, kind in (
        ({"messages": USER, "prompt": None}, "chat.completion"),
        ({"prompt": "a", "unknown": 1}, "text_completion"),
        ({"input": ["a", "b"]}, "list"),
    ):
        seen.append(client.post("/invocations", body).json()["object"] == kind)
    assert all(seen) and client.service.metrics.ignored_fields == 2
    assert client.events("/invocations", {"prompt": "a"})[0]["object"] == "text_completion"
    assert "no messages, prompt or input" in error(client.post("/invocations", {"inputs": "a"}), 400)["message"]
    assert error(client.post("/invocations", {"prompt": "a", "n": "b"}), 400)["param"] == "n"
    assert "not JSON" in error(client.post("/invocations", raw="{"), 400)["message"]
    assert error(client.post("/invocations", {"prompt": "a", "model": "x"}), 404)["param"] == "model"


def test_the_prefix_cache_is_reset_by_the_administrator_and_the_load_is_told():
    client, key = Client(FakeLLM(delay=60), admin_keys=("admin",)), {"authorization": "Bearer admin"}
    path = "/reset_prefix_cache"
    assert client.post(path, headers=key).json()["success"] and client.post("/flush_cache", headers=key).is_success
    assert error(client.post(path), 401)["code"] == "invalid_api_key"
    assert error(Client().post(path, headers=key), 403)["code"] == "no_admin_key"
    assert "give true or false" in error(client.post(f"{path}?reset_running_requests=7", headers=key), 400)["message"]
    assert error(client.post(f"{path}?reset_external=true", headers=key), 400)["param"] == "reset_external"

    async def while_one_runs():
        running = asyncio.create_task(client.send("POST", TEXT, '{"prompt": "a"}'))
        while not client.llm.running:
            await asyncio.sleep(0)
        refused = error(await client.send("POST", path, None, key), 409)
        assert refused["code"] == "requests_running" and "?reset_running_requests=true" in refused["message"]
        assert (await client.send("POST", f"{path}?reset_running_requests=true", None, key)).is_success
        assert (await client.send("GET", "/load", None)).json() == {"server_load": 1}
        client.llm.delay = 0
        assert (await running).is_success

    asyncio.run(while_one_runs())
    assert client.get("/load").json() == {"server_load": 0}
    client.llm.died = "the device is lost"
    assert error(client.post(path, headers=key), 500)["code"] == "engine_error"


def test_structural_tags_in_both_of_their_forms():
    client, tag = Client(), {"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}
    old = {"type": "structural_tag", "structures": [tag], "triggers": ["<f>"]}
    new = {"type": "structural_tag", "format": {"type": "regex", "pattern": "(a/b|the) quick.*"}}
    for form in (old, new):
        for path, body in ((CHAT, {"messages": USER}), (TEXT, {"prompt": "a"})):
            for wish in ({"response_format": form}, {"structured_outputs": {"structural_tag": form}}):
                assert client.post(path, {**body, **wish}).is_success
                assert client.llm.seen[-1][1].structured_outputs.structural_tag == form
    wrong = {"prompt": "a", "response_format": {**old, "triggers": ["<g>"]}}
    assert "begins with '<f>' has none of the triggers" in error(client.post(TEXT, wrong), 400)["message"]
    assert client.service.metrics.ignored_fields == 0


@pytest.mark.parametrize("path", (CHAT, TEXT))
def test_beams_are_searched_as_many_as_replies_are_asked_for(path):
    client = Client()
    named = {"messages": USER} if path == CHAT else {"prompt": ["a", "b"]}
    body = {**named, "use_beam_search": True, "n": 3, "max_tokens": 4, "temperature": 0.7, "return_token_ids": True}
    answer = client.post(path, body).json()
    count = 3 * (1 + (path == TEXT))
    assert [one["index"] for one in answer["choices"]] == list(range(count))
    tokens = [tuple(one["token_ids"]) for one in answer["choices"][:3]]
    assert len(set(tokens)) == 3 and {len(one) for one in tokens} == {4}
    assert {one["finish_reason"] for one in answer["choices"]} == {"length"}
    assert answer["usage"]["completion_tokens"] == 4 * count
    asked = client.llm.seen[0][1]
    assert (asked.max_tokens, asked.logprobs, asked.temperature) == (1, 6, 0)
    told = client.post(path, {**body, "logprobs": 2} if path == TEXT else {**body, "logprobs": True, "top_logprobs": 2})
    found = told.json()["choices"][0]["logprobs"]
    each = found["top_logprobs"] if path == TEXT else [place["top_logprobs"] for place in found["content"]]
    assert len(each) == 4 and all(len(place) in (2, 3) for place in each)
    texts = [one["text"] if path == TEXT else one["message"]["content"] for one in answer["choices"]]
    streamed = [""] * count
    for event in client.events(path, body):
        for one in event["choices"]:
            streamed[one["index"]] += one.get("text") or one.get("delta", {}).get("content") or ""
    assert streamed == texts and client.service.metrics.ignored_fields == 0 and not client.llm.running
    assert client.post(path, {**body, "stop": [], "repetition_penalty": 1, "length_penalty": 0}).is_success
    for name, value in (
        *(("stop", "x"), ("repetition_penalty", 1.1), ("guided_regex", "a"), ("n", 11), ("max_tokens", 0)),
        *(("prompt_logprobs", 0), ("response_format", {"type": "json_object"}), ("seed", "x")),
    ):
        assert error(client.post(path, {**body, name: value}), 400)["param"] == name
    assert error(client.post(TEXT, {**body, "prompt": "a", "echo": True, "logprobs": 1}), 400)["param"] == "echo"


def test_what_would_change_the_answer_is_refused():
    for name, value in (("length_penalty", 1.0), ("cache_salt", ""), ("cache_salt", "a" * 10**6)):
        assert error(Client().post(TEXT, {"prompt": "a", name: value}), 400)["param"] == name
    client = Client()
    wishes = {"use_beam_search": False, "spaces_between_special_tokens": True, "mm_processor_kwargs": {}}
    assert client.post(TEXT, {"prompt": "a", **wishes}).status_code == 200
    assert client.service.metrics.ignored_fields == 2


BUDGETS = {  # template: (wishes, what thoughts the prompt has begun; None: the reply shows it; "": it does not think)
    "qwen3": ({}, None),
    "qwen3 off": ({"chat_template_kwargs": {"enable_thinking": False}}, False),
    "deepseek": ({}, "\n"),
    "deepseek goes on": (
        {
            "messages": [*USER, {"role": "assistant", "content": "<think>\nHm"}],
            "continue_final_message": True,
        },
        "\nHm",
    ),
}


@pytest.mark.parametrize("name", BUDGETS)
def test_a_budget_of_thoughts_knows_where_they_begin(name):
    wishes, said = BUDGETS[name]
    client = Client(FakeLLM(reply="x</think>y", template_name=name.split()[0]))
    for body in ({"stream": False}, {"n": 2}):
        client.post(CHAT, {"messages": USER, "thinking_token_budget": 7, **body, **wishes})
        params = client.llm.seen[-1][1]
        if said is False:
            assert params.thinking_token_budget is params.thoughts is None
            continue
        assert params.thinking_token_budget == 7 and params.thoughts.end == params.thoughts.over == "</think>"
        assert params.thoughts.said == said and params.thoughts.begins == ("<think>",)
    assert client.service.metrics.ignored_fields == 0


def test_a_budget_of_thoughts_elsewhere_than_in_chats():
    client = Client(FakeLLM(template_name="qwen3"))
    prompts = {"a": None, "a<think>b": "b", "<think>a</think>b": None}
    client.post(TEXT, {"prompt": list(prompts), "thinking_token_budget": 7})
    assert {text: params.thoughts.said for text, params, _ in client.llm.seen} == prompts
    client.post(TEXT, {"prompt": client.llm.tokenizer.encode("a<think>b"), "thinking_token_budget": 0})
    params = client.llm.seen[-1][1]
    assert (params.thoughts.said, params.thinking_token_budget) == ("b", 0)
    client.post("/v1/responses", {"input": "hi", "thinking_token_budget": 3})
    assert client.llm.seen[-1][1].thinking_token_budget == 3
    client.post(TEXT, {"prompt": "a", "thinking_token_budget": -1})
    assert client.llm.seen[-1][1].thinking_token_budget is None
    for wish in (-2, 1.5, "4"):
        refused = error(client.post(CHAT, {"messages": USER, "thinking_token_budget": wish}), 400)
        assert refused["param"] == "thinking_token_budget"
    assert client.service.metrics.ignored_fields == 0


@pytest.mark.parametrize("parser, why", (("none", "no reasoning parser is chosen"), ("openai_gptoss", "no one mark")))
def test_a_budget_of_thoughts_needs_a_parser(parser, why):
    client = Client(FakeLLM(template_name="gpt_oss"), reasoning_parser=parser)
    for path, body in ((CHAT, {"messages": USER}), (TEXT, {"prompt": "a"}), ("/v1/responses", {"input": "a"})):
        refused = error(client.post(path, {**body, "thinking_token_budget": 3}), 400)
        assert refused["param"] == "thinking_token_budget" and why in refused["message"]
        assert client.post(path, {**body, "thinking_token_budget": -1}).status_code == 200


def test_the_text_of_a_chats_prompt():
    client = Client(FakeLLM(template_name="qwen3"))
    body = {"messages": USER, "n": 2, "return_prompt_text": True}
    answer = client.post(CHAT, body).json()
    assert answer["prompt_text"] == client.llm.seen[-1][0] and "hi" in answer["prompt_text"]
    events = client.events(CHAT, body)
    assert [event.get("prompt_text") for event in events if "prompt_text" in event] == [answer["prompt_text"]] * 2
    assert "prompt_text" in events[0] and "prompt_text" not in str(client.post(CHAT, {"messages": USER}).json())


@pytest.mark.parametrize("body", [{"prompt": "ab"}, {"prompt": "ab", "stream": True}, {"prompt": ""}])
def test_a_request_is_called_in_its_answer_as_its_client_calls_it(body):
    client = Client()
    named = client.post("/v1/completions", body, headers={"X-Request-Id": "trace-7/a"})
    assert named.headers.get_list("x-request-id") == ["trace-7/a"]
    for no_word in ("", "two words", "x" * 129):
        own = client.post("/v1/completions", body, headers={"X-Request-Id": no_word}).headers["x-request-id"]
        assert own != no_word and len(own) == 32
