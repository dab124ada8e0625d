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
