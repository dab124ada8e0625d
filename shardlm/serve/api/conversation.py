"""From the messages of a request to the text of a prompt: contents as plain texts, calls as objects, then the model's
chat template."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from shardlm.errors import ShardlmError
from shardlm.serve.api.errors import ApiError

Message = Mapping[str, Any]
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}  # type of part -> field


async def prompt(
    llm,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    add_generation_prompt: bool = True,
    options: Mapping[str, Any] | None = None,
) -> str:
    """The text that the model is given. `options` are the template's own. Raises ApiError for what it refuses."""
    if llm.template is None:
        raise ApiError("this model has no chat template; it continues plain text at /v1/completions", param="messages")
    if not messages:
        raise ApiError("messages is empty; give at least one, such as one from the user", param="messages")
    developer = "developer" in llm.template.source
    plain = [_message(one, f"messages[{i}]", developer) for i, one in enumerate(messages)]
    options = dict(options or {})
    if taken := options.keys() & {"messages", "tools", "add_generation_prompt", "self"}:
        message = f"chat_template_kwargs has {min(taken)}, which means something else here; leave it out"
        raise ApiError(message, param="chat_template_kwargs")
    try:
        # Long conversations take a while: the event loop stays free for the streams.
        return await asyncio.to_thread(
            llm.template.render, plain, tools or None, add_generation_prompt=add_generation_prompt, **options
        )
    except ShardlmError as error:
        raise ApiError(str(error), param="messages") from None


def _message(message: Message, param: str, developer: bool) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ApiError(f"{param}.role={role!r} must be a text, such as user", param=f"{param}.role")
    if role == "developer" and not developer:
        role = "system"  # its older name, which templates know
    known = {**message, "role": role, "content": text_of(message.get("content"), f"{param}.content")}
    if calls := message.get("tool_calls"):
        known["tool_calls"] = _calls(calls, f"{param}.tool_calls")
    return known


def text_of(content: Any, param: str) -> str | None:
    """The text of a message's content. Raises ApiError for parts that are not text."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(f"{param} is a {type(content).__name__}; it is a text or a list of parts", param=param)
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        text = part.get(_TEXTS[kind]) if isinstance(part, Mapping) and kind in _TEXTS else None
        if not isinstance(text, str):
            raise ApiError(f"{param}[{i}] is of type {kind!r}; this model reads text", param=f"{param}[{i}]")
        texts.append(text)
    return "\n".join(texts)


def _calls(calls: Any, param: str) -> list[dict[str, Any]]:
    """Calls that the model made earlier. Clients send their arguments as text, templates write them from an object."""
    try:
        found = []
        for call in calls:
            function = dict(call["function"])
            arguments = function.get("arguments") or {}
            function["arguments"] = json.loads(arguments) if isinstance(arguments, str) else arguments
            found.append({**call, "function": function})
        return found
    except (TypeError, KeyError, ValueError, RecursionError) as error:
        message = f"{param} must be a list of calls, each with a function of name and arguments in JSON: {error!r}"
        raise ApiError(message, param=param) from None
