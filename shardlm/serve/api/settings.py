"""What whoever runs the server decides, as against those who call it."""

import dataclasses
from typing import Literal

from shardlm.errors import ShardlmError

ToolStyle = Literal["auto", "hermes", "llama"]


@dataclasses.dataclass(frozen=True)
class HttpSettings:
    """
    api_keys         one of them is asked for (Authorization: Bearer KEY); (): none
    cors_origins     origins whose pages may call the server; "*" for all
    max_body         bytes of a request's body
    read_seconds     its body must have come after so long
    write_seconds    a client that takes nothing off its stream for so long is given up
    """

    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_body: int = 32 * 2**20
    read_seconds: float = 30
    write_seconds: float = 60

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and value <= 0:
                raise ShardlmError(f"{field.name}={value} must be above 0")
            if isinstance(value, tuple) and "" in value:
                raise ShardlmError(f"{field.name} must hold no empty text")


@dataclasses.dataclass(frozen=True)
class Settings(HttpSettings):
    """
    model_names      what clients may call the model, the first for answers; (): the engine's name
    tool_style       how the model writes its calls of tools; auto: what its chat template tells
    max_queue        requests without their first token at which further ones are refused (429)
    max_replies      prompts times n, of one request
    request_seconds  a request is ended after so long; None: never
    """

    model_names: tuple[str, ...] = ()
    tool_style: ToolStyle = "auto"
    max_queue: int = 1024
    max_replies: int = 1024
    request_seconds: float | None = None
