"""Errors as Anthropic's clients read them, {"type": "error", "error": {"type", "message"}, "request_id"}, and which
requests are answered so (https://docs.anthropic.com/en/api/errors)."""

from collections.abc import Mapping
from typing import Any

from starlette.types import Scope

from shardlm.serve.api.errors import INVALID, ApiError

MESSAGES = "/v1/messages"
OVERLOADED = 529  # their status for what others answer 503
_VERSION = b"anthropic-version"  # a header that all requests of their clients have
_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def is_anthropics(scope: Scope) -> bool:
    """Whether who asks reads Anthropic's form."""
    path = scope["path"]
    return path == MESSAGES or path.startswith(f"{MESSAGES}/") or any(name == _VERSION for name, _ in scope["headers"])


def request_id(id: str) -> str:
    return f"req_{id}"


def status_of(error: ApiError) -> int:
    return OVERLOADED if error.status == 503 else error.status


def body(error: ApiError, id: str) -> dict[str, Any]:
    """`id`: of the request."""
    message = error.message
    if error.room:  # by these words agents know that they have to make their conversation shorter
        message = "prompt is too long: {} tokens > {} maximum; {}".format(*error.room, message)
    kind = _TYPES.get(error.status, INVALID if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id(id)}
