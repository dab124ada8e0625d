"""Errors as OpenAI's clients read them: a status, and {"error": {"message", "type", "param", "code"}}. Anthropic's
and Ollama's have other forms (anthropic_errors, ollama/errors)."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from shardlm.errors import ShardlmError
from shardlm.serve.outputs import EngineError
from shardlm.serve.request import PromptTooLong

INVALID = "invalid_request_error"
NO_MODEL = "model_not_found"  # a code
_PARAM = re.compile(r"(\w+)(?:=|\[| has )")  # how messages about one value begin: "top_p=7 must be ..."


class ApiError(Exception):
    """`param`: the field of the request that is wrong. `headers`: further ones of the answer. `room`: of a prompt that
    is too long, its tokens and how many there may be, where they are known."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        type: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        room: tuple[int, int] | None = None,
    ):
        super().__init__(message)
        self.message, self.status, self.type, self.param, self.code = message, status, type, param, code
        self.headers, self.room = dict(headers or {}), room

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def as_api_error(error: Exception) -> ApiError | None:
    """What a client is told of an exception; None for one that nobody foresaw."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, PromptTooLong):
        # LiteLLM, which hands such requests on to models with room, knows them by these words alone.
        message = f"the prompt is longer than the model's context length: {error}"
        room = None if error.tokens is None else (error.tokens, error.most)
        return ApiError(message, code="context_length_exceeded", room=room)
    if isinstance(error, ShardlmError):
        named = _PARAM.match(str(error))
        return ApiError(str(error), param=named and named[1])
    if isinstance(error, EngineError):
        return ApiError(str(error), 500, type="server_error", code="engine_error")
    if isinstance(error, TimeoutError):
        message = "the request took longer than this server allows; ask for fewer tokens, or raise its limit"
        return ApiError(message, 504, type="server_error", code="timeout")
    return None


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """What is wrong with a chat, in the words of an endpoint that calls its fields otherwise: {a chat's: its own}."""
    name, end, rest = re.match(r"(\w*)(.?)(.*)", error.param or "", re.DOTALL).groups()
    if name in names and end in ("", "."):
        error.param = names[name] + end + rest
        error.message = error.message.replace(name, names[name], 1)
    return error


def no_model(name: str | None, here: Iterable[str]) -> ApiError:
    message = f"the model {name!r:.200} is not here; here is {', '.join(here)}"
    return ApiError(message, 404, param="model", code=NO_MODEL)


def unforeseen() -> ApiError:
    """Without the exception's text, which may hold what is no client's business."""
    return ApiError("the server failed at this request; its log says why", 500, type="server_error")


def unavailable(message: str) -> ApiError:
    return ApiError(message, 503, type="server_error", code="unavailable", headers={"retry-after": "1"})
