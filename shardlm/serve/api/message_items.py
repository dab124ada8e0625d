"""From a /v1/messages request of Anthropic's clients to a chat: the same conversation in the words of
/v1/chat/completions."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardlm.serve.api.conversation import THINKING
from shardlm.serve.api.errors import ApiError
from shardlm.serve.api.message_images import Said, image_part, joined
from shardlm.serve.api.message_tools import chat_choice, functions, parallel
from shardlm.serve.api.protocol import EXTRAS, ChatRequest, CountTokensRequest, is_billing
from shardlm.serve.past_calls import INVALID_JSON
from shardlm.vision.image_parts import SEEING

Block = Mapping[str, Any]
Chat = list[dict[str, Any]]
# Of a chat, and what they are called here.
NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "thinking_token_budget": "thinking.budget_tokens",
}
_THOUGHTS = "reasoning_content"  # of a message, as templates know them
_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}


def chat_request(
    request: CountTokensRequest, later_system: bool, bounds_thoughts: bool, sees: bool = False
) -> ChatRequest:
    """
    Args:
      later_system: whether the chat template shows a message of role system that is not the first; else users say it.
      bounds_thoughts: whether the length of thoughts can be bounded; else budget_tokens is what a template makes of it.
      sees: whether the model reads images.

    Raises: ApiError.
    """
    messages = _messages(request, later_system, sees)
    kind, budget = _thinking(request.thinking)
    options = {} if kind is None else dict.fromkeys(THINKING, kind != "disabled")
    given = {name: getattr(request, name) for name in EXTRAS}
    given["chat_template_kwargs"] = options | (request.chat_template_kwargs or {}) or None
    if bounds_thoughts and given["thinking_token_budget"] is None:
        given["thinking_token_budget"] = budget
    output = request.output_config or {}
    hidden = kind == "disabled" or (request.thinking or {}).get("display") == "omitted"
    return ChatRequest(
        messages=messages,
        continue_final_message=messages[-1:] != [] and messages[-1]["role"] == "assistant",
        tools=functions(request.tools) or None,
        tool_choice=chat_choice(request.tools, request.tool_choice),
        parallel_tool_calls=parallel(request.tool_choice),
        response_format=_form(output.get("format"), request.output_format),
        reasoning_effort=_effort(output.get("effort")),
        include_reasoning=not hidden,
        max_tokens=getattr(request, "max_tokens", None),
        stop=getattr(request, "stop_sequences", None),
        **given,
    )


def _messages(request: CountTokensRequest, later_system: bool, sees: bool) -> Chat:
    """Turns of one role that follow each other are one. What the assistant said last is a beginning that it goes on
    with, unless it said nothing."""
    found: Chat = []
    if request.system is not None:
        _append(found, "system", _system_text(request.system))
    for i, message in enumerate(request.messages):
        role, content, param = message.get("role"), message.get("content"), f"messages[{i}]"
        if role == "system":
            text = _text(content, f"{param}.content")
            begun = any(one["role"] != "system" for one in found)
            _append(found, "user" if begun and not later_system else "system", text)
        elif role == "user":
            _read_user(found, content, f"{param}.content", sees)
        elif role == "assistant":
            _read_assistant(found, content, f"{param}.content")
        else:
            raise ApiError(f"{param}.role={role!r:.100} must be user, assistant or system", param=f"{param}.role")
    last = found[-1] if found else {}
    if last.get("role") == "assistant":
        if "tool_calls" in last:
            message = "messages ends with a tool_use, which the assistant cannot go on with; add its tool_result"
            raise ApiError(message, param="messages")
        if not last["content"].strip():
            found.pop()
    return found


def _system_text(system: str | Sequence[Block]) -> str:
    """Without what changes with every request and would make all that follows new to the prefix cache."""
    if isinstance(system, str):
        return system
    return _text([block for block in system if not is_billing(block)], "system")


def _append(chat: Chat, role: str, said: Said) -> None:
    """To the last message, if it is of this role too."""
    if chat and chat[-1]["role"] == role:
        chat[-1]["content"] = joined(chat[-1]["content"], said)
    elif role != "system" or said:
        chat.append({"role": role, "content": said})


def _read_user(chat: Chat, content: Any, param: str, sees: bool) -> None:
    for block, where in _blocks(content, param):
        if block["type"] == "tool_result":
            id = _named(block, "tool_use_id", where)
            said = "" if block.get("content") is None else _result(block["content"], f"{where}.content", sees)
            if block.get("is_error") and not (isinstance(said, str) and "error" in said[:40].lower()):
                said = (
                    f"Error: {said}" if isinstance(said, str) else joined("Error:", said)
                )  # a chat has no other place
            chat.append({"role": "tool", "tool_call_id": id, "content": said})
        else:
            _append(chat, "user", _said(block, where, sees))
    if not content:
        _append(chat, "user", "")


def _result(content: Any, param: str, sees: bool) -> Said:
    """Of a tool."""
    if not sees or not any(block["type"] == "image" for block, _ in _blocks(content, param)):
        return _text(content, param)
    said: Said = ""
    for block, where in _blocks(content, param):
        said = joined(said, _said(block, where, sees))
    return said


def _said(block: Block, param: str, sees: bool) -> Said:
    """A text, or an image as chats have it. Raises ApiError."""
    return [image_part(block, param)] if sees and block["type"] == "image" else _text_of(block, param)


def _read_assistant(chat: Chat, content: Any, param: str) -> None:
    _append(chat, "assistant", "")
    said = chat[-1]
    for block, where in _blocks(content, param):
        if block["type"] == "tool_use":
            given = block.get("input")
            if not isinstance(given, Mapping):
                raise ApiError(f"{where}.input={given!r:.100} must be an object", param=f"{where}.input")
            if given.keys() == {INVALID_JSON} and isinstance(given[INVALID_JSON], str):
                given = given[INVALID_JSON]
            function = {"name": _named(block, "name", where), "arguments": given}
            call = {"id": _named(block, "id", where), "type": "function", "function": function}
            said.setdefault("tool_calls", []).append(call)
        elif block["type"] == "thinking":
            said[_THOUGHTS] = said.get(_THOUGHTS, "") + _named(block, "thinking", where)
        elif block["type"] != "redacted_thinking":  # which is another model's
            _append(chat, "assistant", _text_of(block, where))


def _blocks(content: Any, param: str) -> Iterator[tuple[Block, str]]:
    """(block, where it stands). Raises ApiError for what is no list of blocks."""
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise ApiError(f"{param} is a {type(content).__name__}; it is a text or a list of blocks", param=param)
    for i, block in enumerate(content):
        if not isinstance(block, Mapping) or not isinstance(block.get("type"), str):
            raise ApiError(f"{param}[{i}]={block!r:.100} is no block, an object with a type", param=f"{param}[{i}]")
        yield block, f"{param}[{i}]"


def _named(block: Block, name: str, param: str) -> str:
    if not isinstance(block.get(name), str):
        raise ApiError(f"{param}.{name}={block.get(name)!r:.100} must be a text", param=f"{param}.{name}")
    return block[name]


def _text(content: Any, param: str) -> str:
    return "\n".join(_text_of(block, where) for block, where in _blocks(content, param))


def _text_of(block: Block, param: str) -> str:
    """Of a block of text, or of a document or a search result as text. Raises ApiError for other ones."""
    kind = block["type"]
    if kind == "text":
        return _named(block, "text", param)
    if kind == "tool_reference":
        return _named(block, "tool_name", param)
    source = block.get("source")
    if kind == "search_result":
        return _headed(block, ("title", "source"), _text(block.get("content"), f"{param}.content"))
    if kind == "document" and isinstance(source, Mapping) and source.get("type") in ("text", "content"):
        part = "data" if source["type"] == "text" else "content"
        return _headed(block, ("title", "context"), _text(source.get(part), f"{param}.source.{part}"))
    what = f"{kind} of source {source.get('type')!r:.50}" if isinstance(source, Mapping) else kind
    hint = f": {SEEING}" if kind == "image" else ""
    message = f"{param} is of type {what:.100}; this model reads text{hint}"
    raise ApiError(message, param=param)


def _headed(block: Block, names: Sequence[str], text: str) -> str:
    return "\n".join([*(block[name] for name in names if isinstance(block.get(name), str)), text])


def _thinking(wish: Block | None) -> tuple[str | None, int | None]:
    """(type, budget_tokens). Raises ApiError."""
    if wish is None:
        return None, None
    kind, budget = wish.get("type"), wish.get("budget_tokens")
    if kind not in ("enabled", "disabled", "adaptive", "between_tools"):
        message = f"thinking.type={kind!r:.100} must be enabled, disabled, adaptive or between_tools"
        raise ApiError(message, param="thinking.type")
    if budget is not None and (not isinstance(budget, int) or isinstance(budget, bool) or budget < 0):
        message = f"thinking.budget_tokens={budget!r:.100} must be an integer of at least 0"
        raise ApiError(message, param="thinking.budget_tokens")
    return kind, {"enabled": budget, "disabled": 0}.get(kind)


def _form(wish: Any, older: Any) -> Block | None:
    """In which the text is to be. Raises ApiError."""
    if wish is not None and older is not None:
        raise ApiError("output_config.format and output_format each say the same; give one", param="output_format")
    found = older if wish is None else wish
    if found is not None and not isinstance(found, Mapping):
        message = f"output_config.format={found!r:.100} must be an object with type and schema"
        raise ApiError(message, param="output_config.format")
    return found


def _effort(wish: Any) -> str | None:
    """As templates know it, which have three. Raises ApiError."""
    if wish is not None and (not isinstance(wish, str) or wish not in _EFFORTS):
        message = f"output_config.effort={wish!r:.100} must be one of {', '.join(_EFFORTS)}"
        raise ApiError(message, param="output_config.effort")
    return _EFFORTS.get(wish)
