"""Ollama's `options`, and the wishes beside them, in the words of a chat
(https://github.com/ollama/ollama/blob/main/docs/modelfile.mdx#valid-parameters-and-values)."""

from collections.abc import Mapping
from typing import Any

import msgspec

from shardlm.serve.api.conversation import THINKING
from shardlm.serve.api.errors import ApiError, as_api_error, renamed
from shardlm.serve.api.ollama.protocol import Written
from shardlm.serve.api.protocol import Json, converted
from shardlm.serve.api.service import Service
from shardlm.serve.sampling_params import MAX_LOGPROBS

# Of a chat, and what they are called here.
NAMES = {
    "repetition_penalty": "repeat_penalty",
    "max_tokens": "num_predict",
    "response_format": "format",
    "reasoning_effort": "think",
}
_ENDLESS = (-2, -1, 0)  # of num_predict: -2 fills the context, the others Ollama's runner takes for no limit
_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "max": "high"}
_AT_START = "the server's command line says it, for all requests"
_NOT_HERE = "Ollama's newer versions leave it out as well; top_k, top_p and min_p cut what is unlikely"
# Options that decide nothing here, and why; the log says so once.
TOLD = {
    "num_ctx": "a request has as much as --max_model_len gives it",
    "repeat_last_n": "penalties are of the whole prompt and reply",
    "num_keep": "nothing of a prompt is cut unless truncate asks for it",
    "keep_alive": "the model stays as long as the server",
    **dict.fromkeys(("tfs_z", "typical_p", "mirostat", "mirostat_tau", "mirostat_eta", "penalize_newline"), _NOT_HERE),
    **dict.fromkeys(
        (
            *("numa", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all", "vocab_only"),
            *("use_mmap", "use_mlock", "embedding_only", "num_thread", "draft_num_predict"),
        ),
        _AT_START,
    ),
}


class OllamaOptions(msgspec.Struct, kw_only=True):
    """Those that say how tokens are chosen."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    num_predict: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


def sampled(service: Service, request: Written) -> dict[str, Any]:
    """Fields of ChatRequest and CompletionRequest. Raises ApiError."""
    options, _ = converted(request.options or {}, OllamaOptions, "options.")
    tell(service, {**(request.options or {}), "keep_alive": request.keep_alive})
    given = {name: value for name, value in msgspec.structs.asdict(options).items() if value is not None}
    most = given.pop("num_predict", -1)
    if most < min(_ENDLESS):
        message = f"num_predict={most} must be at least 1, or -1 or -2 for as many as there is room for"
        raise ApiError(message, param="num_predict")
    if "repeat_penalty" in given:
        given["repetition_penalty"] = given.pop("repeat_penalty")
    if request.truncate:
        given["truncate_prompt_tokens"] = -1
    return {**given, "max_tokens": None if most in _ENDLESS else most, "response_format": _format(request.format)}


def in_own_words(error: Exception) -> ApiError:
    """What is wrong with a chat or a completion, by Ollama's names."""
    own = renamed(as_api_error(error), NAMES)
    own.message = own.message.replace("truncate_prompt_tokens", "truncate")
    return own


def tell(service: Service, given: Mapping[str, Any]) -> None:
    """Those of the options that decide nothing here are counted, and each is named once in the log."""
    known = OllamaOptions.__struct_fields__
    for name, value in given.items():
        if value is not None and name in TOLD:
            service.leave_out([name], f"Ollama's %.50r decides nothing here: {TOLD[name]}")
        elif value is not None and name not in known:
            service.metrics.ignored_fields += 1


def top_logprobs(request: Written) -> int | None:
    """None: none are asked for. Raises ApiError."""
    top = request.top_logprobs or 0
    if not 0 <= top <= MAX_LOGPROBS:
        raise ApiError(f"top_logprobs={top} must be between 0 and {MAX_LOGPROBS}", param="top_logprobs")
    return top if request.logprobs else None


def thinking(service: Service, request: Written) -> dict[str, Any]:
    """Fields of ChatRequest: what the template is told, under the names that templates know. Raises ApiError for a
    level that is none, and where a model is to think that does not."""
    think = request.think
    if think is None:
        return {}
    if isinstance(think, str) and think not in _EFFORTS:
        message = f'invalid think value: {think!r:.100} (must be "high", "medium", "low", "max", true, or false)'
        raise ApiError(message, param="think")
    if think and service.reasoning is None:
        raise ApiError(f'"{request.model}" does not support thinking', param="think")
    effort = _EFFORTS[think] if isinstance(think, str) else None
    options = dict.fromkeys(THINKING, bool(think))
    return {"chat_template_kwargs": options, "reasoning_effort": effort, "include_reasoning": bool(think)}


def _format(wish: str | Json | None) -> Json | None:
    """As response_format. Raises ApiError."""
    if not wish and not isinstance(wish, dict):
        return None
    if isinstance(wish, dict):
        return {"type": "json_schema", "json_schema": {"schema": wish}}
    if wish != "json":
        raise ApiError(f'invalid format: {wish!r:.100}; expected "json" or a valid JSON Schema object', param="format")
    return {"type": "json_object"}
