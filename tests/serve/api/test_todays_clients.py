"""What frameworks over OpenAI's and other clients send and read, beyond what those clients themselves do."""

import openai
import pytest
from client import Client, error
from fake_llm import FakeLLM
from sockets import serving

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
