"""The tools of a /v1/messages request in the words of a chat. Tools with a schema are functions; those that Anthropic's
servers run (web_search_20250305, ...) or its models know without one (bash_20250124, ...) are left out."""

from collections.abc import Mapping, Sequence
from typing import Any

from shardlm.serve.api.errors import ApiError

Tool = Mapping[str, Any]
_CUSTOM = "custom"
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def functions(tools: Sequence[Tool] | None) -> list[dict[str, Any]]:
    """Raises ApiError for tools of a wrong shape."""
    return [_function(tool, f"tools[{i}]") for i, tool in enumerate(tools or ()) if _is_custom(tool, f"tools[{i}]")]


def left_out(tools: Sequence[Tool] | None) -> list[str]:
    """Types of the tools that the model is not told of."""
    return [tool["type"] for i, tool in enumerate(tools or ()) if not _is_custom(tool, f"tools[{i}]")]


def eager(tools: Sequence[Tool] | None) -> set[str]:
    """Names of those whose input is to come as it is written, JSON or not."""
    found = [tool.get("name") for tool in tools or () if tool.get("eager_input_streaming") is True]
    return {name for name in found if isinstance(name, str)}


def chat_choice(tools: Sequence[Tool] | None, choice: Tool | None) -> Any:
    """tool_choice in the words of a chat. Raises ApiError for one of a wrong shape, and where a tool must be called of
    which the model is not told."""
    if choice is None:
        return None
    kind = choice.get("type")
    out = [tool.get("name") for tool in tools or () if tool.get("type") not in (None, _CUSTOM)]
    name = choice.get("name")
    if (kind == "tool" and name in out) or (kind == "any" and out and len(out) == len(tools)):
        message = f"tool_choice={choice!r:.200} asks for tools that this server does not run; it has those with schemas"
        raise ApiError(message, param="tool_choice")
    if kind == "tool" and isinstance(name, str):
        return {"type": "function", "function": {"name": name}}
    if not isinstance(kind, str) or kind not in _CHOICES:
        message = f'tool_choice={choice!r:.200} must be of type auto, any or none, or {{"type": "tool", "name": ...}}'
        raise ApiError(message, param="tool_choice")
    return _CHOICES[kind]


def parallel(choice: Tool | None) -> bool:
    """Whether a reply may call several tools. Raises ApiError."""
    single = (choice or {}).get("disable_parallel_tool_use")
    if not isinstance(single, bool | None):
        message = f"tool_choice.disable_parallel_tool_use={single!r:.100} must be true or false"
        raise ApiError(message, param="tool_choice.disable_parallel_tool_use")
    return not single


def _is_custom(tool: Tool, param: str) -> bool:
    kind = tool.get("type")
    if not isinstance(kind, str | None):
        raise ApiError(f"{param}.type={kind!r:.100} must be a text", param=f"{param}.type")
    return kind in (None, _CUSTOM)


def _function(tool: Tool, param: str) -> dict[str, Any]:
    if not isinstance(tool.get("name"), str) or not tool["name"]:
        raise ApiError(f"{param} has no name", param=f"{param}.name")
    if not isinstance(tool.get("input_schema"), Mapping):
        message = f"{param}.input_schema is no JSON schema, which is an object"
        raise ApiError(message, param=f"{param}.input_schema")
    function = {"name": tool["name"], "parameters": tool["input_schema"]}
    if isinstance(tool.get("description"), str):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}
