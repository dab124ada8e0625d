"""What whoever runs the server decides, as against those who call it."""

import dataclasses
from typing import Literal

from shardlm.errors import ShardlmError

ToolStyle = Literal["auto", "hermes", "llama"]


@dataclasses.dataclass(frozen=True)
class Settings:
    """
    model_names      what clients may call the model, the first for answers; (): the engine's name
    api_keys         one of them is asked for (Authorization: Bearer KEY); (): none
    cors_origins     origins whose pages may call the server; "*" for all
    tool_style       how the model writes its calls of tools; auto: what its chat template tells
    max_body         bytes of a request's body
    max_queue        requests without their first token at which further ones are refused (429)
    max_replies      prompts times n, of one request
    request_seconds  a request is ended after so long; None: never
    read_seconds     its body must have come after so long
    write_seconds    a client that takes nothing off its stream for so long is given up
    """

    model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    tool_style: ToolStyle = "auto"
    max_body: int = 32 * 2**20
    max_queue: int = 1024
    max_replies: int = 1024
    request_seconds: float | None = None
    read_seconds: float = 30
    write_seconds: float = 60

    def __post_init__(self):
        for name in ("max_body", "max_queue", "max_replies", "request_seconds", "read_seconds", "write_seconds"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ShardlmError(f"{name}={value} must be above 0")
        if "" in (*self.model_names, *self.api_keys, *self.cors_origins):
            raise ShardlmError("model_names, api_keys and cors_origins must hold no empty text")
