"""/v1/models in one form, which OpenAI's, Anthropic's and vLLM's clients read: each has names of its own."""

import datetime
from collections.abc import Sequence
from typing import Any

Model = dict[str, Any]


def told(name: str, created: int, max_model_len: int, sees: bool = False) -> Model:
    """`created`: seconds since 1970. `sees`: the model reads images, as Mistral's clients and Anthropic's find it."""
    able = {"capabilities": {"vision": True, "image_input": {"supported": True}}} if sees else {}
    return able | {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "shardlm",
        "max_model_len": max_model_len,
        "type": "model",
        "display_name": name,
        "created_at": datetime.datetime.fromtimestamp(created, datetime.UTC).isoformat(),
        "max_input_tokens": max_model_len,
        "max_tokens": max_model_len,
        "lifecycle": "active",
    }


def listed(models: Sequence[Model]) -> Model:
    """All of them, on one page."""
    ids = [model["id"] for model in models] or [None]
    return {"object": "list", "data": list(models), "has_more": False, "first_id": ids[0], "last_id": ids[-1]}
