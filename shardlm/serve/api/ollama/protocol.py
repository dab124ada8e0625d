"""The bodies of Ollama's requests. Every field may be null, which is as good as left out; fields that are not here are
ignored and counted."""

from typing import Any

import msgspec

from shardlm.serve.api.protocol import Json


class Named(msgspec.Struct, kw_only=True):
    """name: what model was called before."""

    model: str | None = None
    name: str | None = None


class OllamaShowRequest(Named, kw_only=True):
    verbose: bool | None = None


class OllamaPullRequest(Named, kw_only=True):
    insecure: bool | None = None
    stream: bool | None = None


class Written(Named, kw_only=True):
    """What chats and prompts have in common. options: options.py. keep_alive: models here stay. truncate: null is
    false, as against Ollama's true."""

    stream: bool | None = None
    format: str | Json | None = None
    options: Json | None = None
    keep_alive: float | str | None = None
    think: bool | str | None = None
    truncate: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class OllamaChatRequest(Written, kw_only=True):
    messages: list[Json] | None = None
    tools: list[Json] | None = None


class OllamaGenerateRequest(Written, kw_only=True):
    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    context: list[int] | None = None
    images: list[Any] | None = None  # files in base64
    # Refused: an answer without them is not what was asked for.
    suffix: str | None = None
    template: str | None = None


class OllamaEmbedRequest(Named, kw_only=True):
    input: str | list[str] | None = None
    truncate: bool | None = None
    dimensions: int | None = None
    options: Json | None = None
    keep_alive: float | str | None = None


class OllamaEmbeddingsRequest(Named, kw_only=True):
    """Of the older address."""

    prompt: str | None = None
    options: Json | None = None
    keep_alive: float | str | None = None
