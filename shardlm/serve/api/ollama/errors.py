"""Errors as Ollama's clients read them, {"error": message}, and which requests are answered so. Their streams are lines
of JSON."""

from typing import Any

from shardlm.serve.api.errors import NO_MODEL, ApiError

NDJSON = b"application/x-ndjson"
PING = b" "  # a sign of life: space before a line, which every parser of JSON passes over; they know no empty lines


def is_ollamas(path: str) -> bool:
    """Whether who asks for this reads Ollama's form."""
    return path.startswith("/api/")


def body(error: ApiError) -> dict[str, Any]:
    message = error.message
    if error.code == NO_MODEL:  # by these words clients know that a model is to be pulled
        message = message.replace("the model", "model", 1).replace("is not here", "not found", 1)
    return {"error": message}
