"""/openapi.json: the requests that are taken, from the types that parse them (https://spec.openapis.org/oas/v3.1.0)."""

from collections.abc import Mapping
from typing import Any

import msgspec

from shardlm.serve.api.anthropic_errors import MESSAGES
from shardlm.serve.api.ollama.errors import is_ollamas

_JSON = "application/json"
_TOLD = {
    "message": {"type": "string"},
    "type": {"type": "string"},
    "param": {"type": ["string", "null"]},
    "code": {"type": ["string", "null"]},
}
_ERROR = {
    "type": "object",
    "properties": {"error": {"type": "object", "properties": _TOLD, "required": list(_TOLD)}},
    "required": ["error"],
}
_ANTHROPICS = {
    "type": "object",
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
            "required": ["type", "message"],
        },
        "request_id": {"type": "string"},
    },
    "required": ["type", "error", "request_id"],
}
_OLLAMAS = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}
_STATUSES = {
    400: "The request cannot be served as it is",
    401: "No key that this server knows",
    403: "Not allowed on this server",
    404: "No such model or path",
    408: "The body did not come in time",
    409: "Something else is under way",
    413: "The body is too large",
    415: "The body is compressed",
    429: "Too many requests wait; try again after Retry-After seconds",
    500: "The server failed at this request",
    503: "Not ready, or about to end",
    504: "The request took too long",
    529: "Not ready, or about to end, as Anthropic's clients know it",
}
_GETS = {
    "/v1/models": "The models that are here.",
    "/v1/models/{model}": "One of them.",
    "/tokenizer_info": "Special tokens and the chat template.",
    "/health": "200 while the engine lives.",
    "/ping": "The same, for Amazon SageMaker, which may POST it too.",
    "/ready": "200 while requests are taken.",
    "/version": "Of the server.",
    "/metrics": "Counts and times, for Prometheus.",
    "/api/tags": "As Ollama's /api/tags.",
    "/api/ps": "As Ollama's /api/ps.",
    "/api/version": "Of the Ollama whose interface this is.",
    "/load": "How many requests have, or wait for, the devices.",
}


_PAGE = {"limit": {"type": "integer", "minimum": 1}, "after": {"type": "string"}}
_FILE = {
    "type": "object",
    "properties": {"purpose": {"const": "batch"}, "file": {"type": "string", "format": "binary"}},
    "required": ["purpose", "file"],
}
# {path: {method: (what it is for, what may stand in its address)}}, where the server keeps files and batches.
_OF_BATCHES = {
    "/v1/files": {
        "get": ("Files of requests and of answers, the newest first.", _PAGE | {"purpose": {"type": "string"}}),
        "post": ("Sends a file of requests.", {}),
    },
    "/v1/files/{id}": {"get": ("One of them.", {}), "delete": ("Deletes it.", {})},
    "/v1/files/{id}/content": {"get": ("What it holds.", {})},
    "/v1/batches": {"get": ("Batches, the newest first.", _PAGE), "post": ("Begins to answer a file.", {})},
    "/v1/batches/{id}": {"get": ("How far one is.", {})},
    "/v1/batches/{id}/cancel": {"post": ("Ends it; what was answered is kept.", {})},
}


def document(
    posts: Mapping[str, type[msgspec.Struct]],
    addressed: Mapping[str, type[msgspec.Struct]],
    batch: type[msgspec.Struct] | None = None,
) -> dict[str, Any]:
    """`posts`: {path: the type of its body}. `addressed`: {path: the type of what stands in its address}. `batch`: the
    type of what begins a batch, where the server keeps files and batches."""
    posts = {**posts, **({"/v1/batches": batch} if batch else {})}
    schemas, components = msgspec.json.schema_components(
        list(posts.values()), ref_template="#/components/schemas/{name}"
    )
    paths: dict[str, Any] = {path: {"get": _operation(path, meaning)} for path, meaning in _GETS.items()}
    paths["/ping"]["post"] = _operation("/ping", _GETS["/ping"])
    for path, schema in zip(posts, schemas, strict=True):
        body = {"required": True, "content": {_JSON: {"schema": schema}}}
        paths[path] = {"post": {**_operation(path, f"As {_whose(path)} {path}."), "requestBody": body}}
    for path, model in addressed.items():
        paths[path] = {"post": {**_operation(path, f"As vLLM's {path}."), "parameters": _parameters(model)}}
    if batch:
        _add_batches(paths)
    return {
        "openapi": "3.1.0",
        "info": {"title": "shardlm", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": _ERROR, "AnthropicError": _ANTHROPICS, "OllamaError": _OLLAMAS},
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"key": []}, {"x-api-key": []}],
    }


def _add_batches(paths: dict[str, Any]) -> None:
    """To those that are there, with the body of what begins a batch."""
    for path, methods in _OF_BATCHES.items():
        known = paths.setdefault(path, {})
        for method, (summary, asked) in methods.items():
            operation = _operation(path, summary)
            operation["parameters"] = [*operation.get("parameters", ()), *_in_query(asked)]
            known[method] = known.get(method, {}) | operation
    body = {"required": True, "content": {"multipart/form-data": {"schema": _FILE}}}
    paths["/v1/files"]["post"]["requestBody"] = body


def _parameters(model: type[msgspec.Struct]) -> list[dict[str, Any]]:
    (_, components) = msgspec.json.schema_components([model])
    return _in_query(components[model.__name__]["properties"])


def _in_query(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"name": name, "in": "query", "required": False, "schema": schema} for name, schema in fields.items()]


def _whose(path: str) -> str:
    if is_ollamas(path):
        return "Ollama's"
    return "Anthropic's" if path.startswith(MESSAGES) else "OpenAI's or vLLM's"


def _error_of(path: str) -> str:
    """The name of the form of its errors."""
    if is_ollamas(path):
        return "OllamaError"
    return "AnthropicError" if path.startswith(MESSAGES) else "Error"


def _operation(path: str, summary: str) -> dict[str, Any]:
    body = {_JSON: {"schema": {"$ref": f"#/components/schemas/{_error_of(path)}"}}}
    errors = {str(status): {"description": meaning, "content": body} for status, meaning in _STATUSES.items()}
    operation: dict[str, Any] = {"summary": summary, "responses": {"200": {"description": "OK"}, **errors}}
    if named := [name for name in ("model", "id") if f"{{{name}}}" in path]:
        one = {"in": "path", "required": True, "schema": {"type": "string"}}
        operation["parameters"] = [{"name": name, **one} for name in named]
    return operation
