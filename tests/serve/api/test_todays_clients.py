"""What frameworks over OpenAI's and other clients send and read, beyond what those clients themselves do."""

import openai
import pytest
import tokenizers
from client import Client, error
from fake_llm import FakeLLM
from sockets import serving

from shardlm.serve.adapter_table import Adapter
from shardlm.serve.api.app import make_app
from shardlm.serve.api.server import Listen, Server
from shardlm.tokenizer import Tokenizer

PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "A"}}\n</tool_call>'
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}


def test_no_part_of_a_streamed_call_is_empty():
    """LiteLLM's reader of responses raises at one."""
    client = Client(FakeLLM(reply=CALL))
    body = {"input": "hi", "stream": True, "tools": [{"type": "function", **WEATHER}]}
    events = client.post("/v1/responses", body).text.split("\n\n")
    deltas = [event for event in events if "event: response.function_call_arguments.delta" in event]
    assert deltas and not any('"delta":""' in event for event in deltas)
    assert '"arguments":"{\\"city\\": \\"A\\"}"' in events[-2]


def test_tokens_of_responses_are_counted():
    """As PydanticAI does before it asks, and OpenAI's client can."""
    llm = FakeLLM(max_model_len=200)
    with serving(llm) as (_, address), openai.OpenAI(base_url=f"{address}/v1", api_key="-", timeout=60) as client:
        ask = {"model": "fake", "input": "hi", "instructions": "Be.", "tools": [{"type": "function", **WEATHER}]}
        count = client.responses.input_tokens.count(**ask)
        assert (count.object, llm.seen) == ("response.input_tokens", [])
        llm.max_model_len = 4096
        assert client.responses.create(**ask).usage.input_tokens == count.input_tokens > 200
        with pytest.raises(openai.BadRequestError, match="remembers nothing"):
            client.responses.input_tokens.count(model="fake", input="hi", previous_response_id="resp_1")
    assert error(Client().post("/v1/responses/input_tokens", {"input": []}), 400)["param"] == "input"


@pytest.mark.parametrize(
    ("path", "effort"),
    [
        (PATH, lambda word: {"messages": USER, "reasoning_effort": word}),
        ("/v1/responses", lambda word: {"input": "hi", "reasoning": {"effort": word}}),
    ],
)
def test_an_effort_turns_thoughts_on_and_off(path, effort):
    """As vLLM's does, for templates that know no efforts."""
    client = Client(FakeLLM(template_name="qwen3", reply="Yes."))

    def thinks(wish):
        assert client.post(path, wish).status_code == 200
        return not client.llm.seen[-1][0].endswith("<think>\n\n</think>\n\n")

    assert thinks(effort("low")) and not thinks(effort("none")) and thinks(effort(None))
    assert thinks(effort("none") | {"chat_template_kwargs": {"enable_thinking": True}})
    assert not thinks(effort("high") | {"chat_template_kwargs": {"enable_thinking": False}})


def test_no_further_log_probabilities_are_asked_for_with_0():
    body = Client().post(PATH, {"messages": USER, "logprobs": False, "top_logprobs": 0}).json()
    assert body["choices"][0]["logprobs"] is None


def with_ends():
    """An engine whose tokenizer puts a token before and one behind each text."""
    llm = FakeLLM()
    backend = tokenizers.Tokenizer.from_str(llm.tokenizer.to_json())
    backend.add_special_tokens(["[B]", "[E]"])
    special = [(name, backend.token_to_id(name)) for name in ("[B]", "[E]")]
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="[B] $A [E]", special_tokens=special)
    llm.tokenizer = Tokenizer(backend)
    return llm


def test_what_is_embedded_is_cut_at_its_end_as_vllm_and_ollama_do():
    """With the token that the tokenizer puts there, of which many models' vector is."""
    client = Client(with_ends())

    def read(path="/v1/embeddings", **wish):
        del client.llm.pooled[:]
        assert client.post(path, {"input": "the quick brown fox"} | wish).status_code == 200
        return [text for text, _, _ in client.llm.pooled]

    assert read(truncate_prompt_tokens=3) == ["[B]the[E]"]
    assert read(truncate_prompt_tokens=3, truncation_side="left") == ["[B] fox[E]"]
    assert read(truncate_prompt_tokens=6) == read(truncate_prompt_tokens=-1) == ["[B]the quick brown fox[E]"]
    assert read(truncate_prompt_tokens=1) == ["[B]"]
    assert read(truncate_prompt_tokens=2, add_special_tokens=False) == ["the quick"]
    assert read(truncate_prompt_tokens=2, add_special_tokens=False, truncation_side="left") == [" brown fox"]
    texts = {"text_1": "the fox", "text_2": "the lazy dog"}
    assert read("/score", **texts, truncate_prompt_tokens=3) == ["[B]the[E]", "[B]the[E]"]
    client.llm.max_model_len = 4
    assert read("/api/embed", model="fake", truncate=True) == ["[B]the quick[E]"]
    wish = {"prompt": "a", "truncate_prompt_tokens": 1, "truncation_side": "right"}
    assert error(client.post("/v1/completions", wish), 400)["param"] == "truncation_side"


def test_a_prompt_without_words_is_what_the_tokenizer_puts_there():
    client = Client(with_ends())
    body = client.post("/v1/completions", {"prompt": ["", "the"], "max_tokens": 1}).json()
    assert len(body["choices"]) == 2 and body["usage"]["prompt_tokens"] >= 3
    for llm, wish in ((client.llm, {"prompt": "", "add_special_tokens": False}), (client.llm, {"prompt": [[]]})):
        assert error(Client(llm).post("/v1/completions", wish), 400)["param"] == "prompt"
    assert error(Client().post("/v1/completions", {"prompt": ""}), 400)["message"].startswith("prompt is empty")


def test_texts_of_nothing_are_embedded_where_the_tokenizer_ends_them():
    """A blank document among many is one vector of many to vLLM."""
    client, body = Client(with_ends()), {"input": ["a", ""]}
    assert len(client.post("/v1/embeddings", body).json()["data"]) == 2
    assert [text for text, *_ in client.llm.pooled] == ["[B]a[E]", "[B][E]"]
    assert error(Client().post("/v1/embeddings", body), 400)["message"].startswith("input[1] is empty")


def test_openais_paths_know_models_as_ollama_lists_them():
    """VS Code's Copilot Chat reads /api/tags and asks /v1/chat/completions."""
    llm = FakeLLM(adapters=(Adapter("poet", "folder", 1, 1),))
    client = Client(llm, model_names=("fake", "org/one:7b"))
    listed = [model["name"] for model in client.get("/api/tags").json()["models"]]
    assert listed == ["fake:latest", "org/one:7b", "poet:latest"]
    for name in listed:
        assert client.post(PATH, {"model": name, "messages": USER}).json()["model"] == name
        assert client.get(f"/v1/models/{name}").status_code == 200
    assert [bool(one) for one in llm.adapted] == [False, False, True]
    for name in ("Fake", "org/one", "poet:7b", ":latest"):
        assert error(client.post(PATH, {"model": name, "messages": USER}), 404)["code"] == "model_not_found"


def test_schemas_without_strict_may_ask_for_what_is_not_supported():
    """As OpenAI's: uniqueItems is of each set of pydantic's."""
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    client = Client(FakeLLM(reply="[1, 2]"))

    def form(**strict):
        wish = {"type": "json_schema", "json_schema": {"schema": schema, **strict}}
        return {"messages": USER, "response_format": wish}

    assert client.post(PATH, form()).json()["choices"][0]["message"]["content"] == "[1, 2]"
    assert client.post(PATH, form(strict=False)).status_code == 200
    assert "uniqueItems" in error(client.post(PATH, form(strict=True)), 400)["message"]
    asked = {"input": "hi", "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}}
    assert client.post("/v1/responses", asked).status_code == 200

    def tools(choice, **strict):
        function = {"name": "add", "parameters": {"type": "object", "properties": {"n": schema}}, **strict}
        return {"messages": USER, "tools": [{"type": "function", "function": function}], "tool_choice": choice}

    for choice, reply in (
        ({"type": "function", "function": {"name": "add"}}, '{"n": [1]}'),
        ("required", '[{"name": "add", "arguments": {"n": [1]}}]'),
    ):
        client.llm.reply = reply
        [call] = client.post(PATH, tools(choice)).json()["choices"][0]["message"]["tool_calls"]
        assert call["function"] == {"name": "add", "arguments": '{"n": [1]}'}
        assert "uniqueItems" in error(client.post(PATH, tools(choice, strict=True)), 400)["message"]


def test_parts_that_are_texts_themselves_and_calls_in_their_older_form():
    client = Client()

    def prompt(*messages):
        assert client.post(PATH, {"messages": [*USER, *messages]}).status_code == 200
        return client.llm.seen[-1][0]

    parts = ["Look:", {"type": "text", "text": "here"}]
    assert "<|im_start|>user\nLook:\nhere<|im_end|>" in prompt({"role": "user", "content": parts})
    call = {"name": "weather", "arguments": '{"city": "A"}'}
    said = {"role": "assistant", "content": None}
    older = prompt({**said, "function_call": call}, {"role": "function", "name": "weather", "content": "rain"})
    newer = {**said, "function_call": None, "tool_calls": [{"id": "1", "type": "function", "function": call}]}
    assert older == prompt(newer, {"role": "tool", "tool_call_id": "1", "content": "rain"})
    assert CALL in older and "<tool_response>\nrain\n</tool_response>" in older
    wrong = {"messages": [*USER, {**said, "function_call": {"name": 3}}]}
    assert error(client.post(PATH, wrong), 400)["param"] == "messages[1].tool_calls"


def test_idle_connections_are_kept_for_longer_than_clients_keep_theirs():
    """Go's for 90 seconds: of requests over one that the server closes at that moment most are not answered."""
    assert Server(make_app(FakeLLM()), Listen()).config.timeout_keep_alive > 90
