"""What tests of /v1/messages ask, and the server that they ask it of."""

import contextlib
import functools
import json

import anthropic
import pydantic
from client import Client
from fake_llm import FakeLLM
from sockets import listens

PATH = "/v1/messages"
USER = [{"role": "user", "content": "hi"}]
ASK = {"model": "fake", "max_tokens": 400, "messages": USER}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "get_weather", "description": "Of a city.", "input_schema": SCHEMA}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
FORMAT = {"format": {"type": "json_schema", "schema": SCHEMA}}


@functools.cache
def _adapter(kind):
    return pydantic.TypeAdapter(kind)


def check(kind, value):
    """Raises pydantic's error where a value is not what a type of the client says."""
    _adapter(kind).validate_json(json.dumps(value), strict=True)


@contextlib.contextmanager
def serving_messages():
    """(the engine, Anthropic's client of its server, the server's service)."""
    llm = FakeLLM(template_name="qwen3", chunk=2, max_model_len=1000)
    app = Client(llm, api_keys=("secret",)).app
    with listens(app) as (_, address), anthropic.Anthropic(base_url=address, api_key="secret", max_retries=0) as client:
        yield llm, client, app.state.service
