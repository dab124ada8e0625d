"""Calls that a model made earlier in a conversation, as its chat template reads them: their arguments as objects or as
text, and the ids by which results are told apart. No jax."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]
_NINE = re.compile(r"[a-zA-Z0-9]{9}")
INVALID_JSON = "INVALID_JSON"  # the member with arguments that are no object, as Anthropic's guide has them sent back


def forms(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """The conversation as templates may want it, the usual way first: arguments are objects, and text where the model
    wrote no object; objects everywhere, for templates that go through their members (Qwen3-Coder, GLM); text
    everywhere, and contents that are text too, for those that join them to other texts (DeepSeek V3)."""
    yield messages
    written = [call["function"]["arguments"] for one in messages for call in one.get("tool_calls") or ()]
    objects = [isinstance(arguments, Mapping) for arguments in written]
    if not all(objects):
        yield [_changed(one, lambda call: _with(call, _as_object)) for one in messages]
    if written:
        yield [_as_texts(one) for one in messages]


def named(messages: Sequence[Message], source: str) -> Sequence[Message]:
    """With ids of calls as models write them whose template has this source; clients choose others, and conversations
    change their model. Mistral's have 9 letters and digits, or its templates refuse them; Kimi's are the function's
    name and the call's number in the conversation, its only name there
    (https://huggingface.co/moonshotai/Kimi-K2-Instruct/blob/main/docs/tool_call_guidance.md)."""
    if "<|tool_call_argument_begin|>" in source:
        return _renamed(messages, lambda call, number: f"functions.{call['function']['name']}:{number}")
    return _renamed(messages, _nine) if "[TOOL_CALLS]" in source else messages


def _renamed(messages: Sequence[Message], id_of: Callable[[Message, int], str]) -> list[Message]:
    now: dict[Any, str] = {}  # by the client's ids, the last call of one
    number, renamed = 0, []
    for message in messages:
        if calls := message.get("tool_calls"):
            ids = [id_of(call, number + i) for i, call in enumerate(calls)]
            now |= {str(call.get("id")): id for call, id in zip(calls, ids, strict=True)}
            number += len(calls)
            message = {**message, "tool_calls": [{**call, "id": id} for call, id in zip(calls, ids, strict=True)]}
        elif (own := message.get("tool_call_id")) is not None and str(own) in now:
            message = {**message, "tool_call_id": now[str(own)]}
        renamed.append(message)
    return renamed


def _nine(call: Message, number: int) -> str:
    id = str(call.get("id", number))
    return id if _NINE.fullmatch(id) else hashlib.sha256(id.encode(errors="replace")).hexdigest()[:9]


def _changed(message: Message, change: Callable[[Message], Message]) -> Message:
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [change(call) for call in calls]} if calls else message


def _with(call: Message, form: Callable[[Any], Any]) -> Message:
    function = call["function"]
    return {**call, "function": {**function, "arguments": form(function["arguments"])}}


def _as_object(arguments: Any) -> Any:
    return arguments if isinstance(arguments, Mapping) else {INVALID_JSON: arguments}


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _as_texts(message: Message) -> Message:
    changed = _changed(message, lambda call: _with(call, _as_text))
    return changed if changed is message else {**changed, "content": message.get("content") or ""}
