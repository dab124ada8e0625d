"""What whoever runs the server decides, as against those who call it."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

from shardlm.errors import ShardlmError
from shardlm.serve.media import MediaRules

ToolStyle = Literal[
    "auto", "hermes", "llama", "qwen3_coder", "glm45", "minimax_m2", "mistral", "deepseek_v3", "kimi_k2", "lfm2"
]


@dataclasses.dataclass(frozen=True)
class HttpSettings:
    """
    api_keys         one of them is asked for (Authorization: Bearer KEY, or x-api-key: KEY); (): none
    admin_keys       one of them is asked for to change what is served, or a router's replicas; (): nobody may
    cors_origins     origins whose pages may call the server; "*" for all
    max_body         bytes of a request's body
    read_seconds     its body must have come after so long
    write_seconds    a client that takes nothing off its stream for so long is given up
    """

    api_keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_body: int = 32 * 2**20
    read_seconds: float = 30
    write_seconds: float = 60

    def __post_init__(self):
        above_zero(self, "max_body", "read_seconds", "write_seconds")
        no_empty_text(self, "api_keys", "admin_keys", "cors_origins")


@dataclasses.dataclass(frozen=True)
class Settings(HttpSettings):
    """
    model_names      what clients may call the model, the first for answers; (): the engine's name
    tool_style       how the model writes its calls of tools; auto: what its chat template tells
    reasoning_parser how replies mark their thoughts, by vLLM's names; auto: what its chat template tells, if it does
    max_queue        requests without their first token at which further ones are refused (429)
    max_replies      prompts times n, of one request
    request_seconds  a request is ended after so long; None: never
    sampling         fields of SamplingParams, for requests that leave them open (serve/defaults.py)
    media            where images may come from that are sent by their address
    batch_dir        a folder for /v1/files and /v1/batches; "": there are none
    """

    model_names: tuple[str, ...] = ()
    tool_style: ToolStyle = "auto"
    reasoning_parser: str = "auto"
    max_queue: int = 1024
    max_replies: int = 1024
    request_seconds: float | None = None
    sampling: Mapping[str, float] = dataclasses.field(default_factory=dict)
    media: MediaRules = MediaRules()
    batch_dir: str = ""

    def __post_init__(self):
        super().__post_init__()
        above_zero(self, "max_queue", "max_replies", "request_seconds")
        no_empty_text(self, "model_names")


def above_zero(settings: HttpSettings, *names: str) -> None:
    """Raises ShardlmError for the first that is not; None is no number and passes."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and value <= 0:
            raise ShardlmError(f"{name}={value} must be above 0")


def no_empty_text(settings: HttpSettings, *names: str) -> None:
    """Raises ShardlmError for the first of these tuples with one."""
    for name in names:
        if "" in getattr(settings, name):
            raise ShardlmError(f"{name} must hold no empty text")
