"""Messages and tools of /api/chat in the words of a chat. Ollama's calls have no ids as a rule: a result belongs to the
first call of its tool that has none yet."""

from collections.abc import Sequence
from typing import Any

from shardlm.serve.api.errors import ApiError
from shardlm.serve.api.protocol import Json
from shardlm.vision.image_parts import SEEING


def chat_messages(messages: Sequence[Json], sees: bool = False) -> list[Json]:
    """`sees`: whether the model reads images. Raises ApiError."""
    found: list[Json] = []
    waiting: list[tuple[str, Any]] = []  # (id, name) of calls without a result
    for i, message in enumerate(messages):
        parts = image_parts(message.get("images"), f"messages[{i}].images", sees)
        own = {name: value for name, value in message.items() if name not in ("images", "tool_name", "tool_calls")}
        if parts:
            own["content"] = with_images(parts, message.get("content"))
        if message.get("tool_calls"):
            own["tool_calls"] = _calls(message["tool_calls"], i)
            waiting = [(call["id"], call["function"].get("name")) for call in own["tool_calls"]]
        if message.get("role") == "tool":
            name = message.get("tool_name") or message.get("name")
            id = message.get("tool_call_id") or _answered(waiting, name)
            waiting = [call for call in waiting if call[0] != id]
            own |= {key: value for key, value in (("name", name), ("tool_call_id", id)) if value is not None}
        found.append(own)
    return found


def goes_on(messages: Sequence[Json]) -> bool:
    """Whether the reply goes on with what the assistant said last, as Ollama's templates have it."""
    last = messages[-1]
    content = last.get("content")
    return last.get("role") == "assistant" and not last.get("tool_calls") and bool(content and str(content).strip())


def functions(tools: Sequence[Json] | None) -> list[Json] | None:
    """With their type, which clients may leave out."""
    return [tool if tool.get("type") is not None else {**tool, "type": "function"} for tool in tools or ()] or None


def image_parts(images: Any, param: str, sees: bool) -> list[Json]:
    """Files in base64 as a chat has them. Raises ApiError for what is none, and for any with a model that reads text
    alone."""
    if not images:
        return []
    if not sees:
        raise ApiError(f"{param}: this model reads text, and images are not supported: {SEEING}", param=param)
    if not isinstance(images, list) or not all(isinstance(one, str) for one in images):
        raise ApiError(f"{param} must be a list of files in base64", param=param)
    return [{"type": "image_url", "image_url": {"url": f"data:;base64,{one}"}} for one in images]


def with_images(parts: Sequence[Json], content: Any) -> list[Json]:
    """Images stand before what is said of them, as Ollama has it."""
    return [*parts, *([{"type": "text", "text": content}] if content else [])]


def _calls(calls: Any, i: int) -> list[Json]:
    """Raises ApiError for what is no list of objects; the rest is checked with the chat."""
    if not isinstance(calls, list) or not all(isinstance(one, dict) for one in calls):
        raise ApiError(f"messages[{i}].tool_calls must be a list of calls", param=f"messages[{i}].tool_calls")
    made = [{"id": f"call_{i}_{j}", "type": "function", **call} for j, call in enumerate(calls)]
    for j, call in enumerate(made):
        if not isinstance(call.get("function"), dict):
            param = f"messages[{i}].tool_calls[{j}].function"
            raise ApiError(f"{param} must be an object with name and arguments", param=param)
    return made


def _answered(waiting: Sequence[tuple[str, Any]], name: Any) -> str | None:
    """The id of the call that a result of this tool is of."""
    of_name = [id for id, own in waiting if own == name] if name is not None else [id for id, _ in waiting]
    return of_name[0] if of_name else None
