"""From the items of a /v1/responses request to a chat: the same conversation in the words of /v1/chat/completions."""

from collections.abc import Mapping, Sequence
from typing import Any

from shardlm.serve.api.errors import ApiError
from shardlm.serve.api.protocol import EXTRAS, ChatRequest, ResponsesRequest
from shardlm.serve.api.response_tools import ADDED, Offered, arguments_of, chat_choice, input_of, offered, told_name
from shardlm.serve.messages import read_arguments
from shardlm.vision.image_parts import BadMessage, is_image, is_video, plain_text, sent

LOGPROBS = "message.output_text.logprobs"
_THOUGHTS = "reasoning_content"  # of a message, as templates know them
_NO_WORDS = {"type": "text", "text": ""}
_RESULTS = ("function_call_output", "custom_tool_call_output")
_STATEFUL = ("previous_response_id", "background", "conversation", "prompt")
# Of a chat, and what they are called here.
NAMES = {"messages": "input", "max_completion_tokens": "max_output_tokens", "response_format": "text.format"}


def chat_request(request: ResponsesRequest, sees: bool = False) -> ChatRequest:
    """`sees`: whether the model reads images. Raises ApiError for what needs a server that remembers, and for items
    that the model cannot read."""
    for name in _STATEFUL:
        if getattr(request, name):
            raise ApiError(f"{name} is not supported: this server remembers nothing; send the whole input", param=name)
    text_format = request.text.format if request.text else None
    logprobs, tools = LOGPROBS in (request.include or ()), offered(request)
    return ChatRequest(
        messages=_messages(request, sees),
        tools=[{"type": "function", "function": tool.function} for tool in tools.values()] or None,
        tool_choice=chat_choice(request, tools),
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=text_format,
        logprobs=logprobs,
        top_logprobs=request.top_logprobs if logprobs else None,
        max_completion_tokens=request.max_output_tokens,
        reasoning_effort=request.reasoning and request.reasoning.effort,
        stop=request.stop,
        **{name: getattr(request, name) for name in EXTRAS},
    )


def _messages(request: ResponsesRequest, sees: bool) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": request.instructions}] if request.instructions else []
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    for i, item in enumerate(request.input):
        _append(messages, item, f"input[{i}]", sees)
    return messages


def _append(messages: list[dict[str, Any]], item: Mapping[str, Any], param: str, sees: bool) -> None:
    kind = item.get("type", "message")
    for name in ("content", "output") if kind in ("message", *_RESULTS) else ():
        _check_content(item.get(name), f"{param}.{name}", sees)
    if kind == "message":
        last = messages[-1] if messages else {}
        if item.get("role") == "assistant" and _only_thought(last):
            last["content"] = item.get("content")
        else:
            messages.append({"role": item.get("role"), "content": item.get("content")})
    elif kind in ("function_call", "custom_tool_call"):
        function = {"name": item.get("name"), "arguments": _arguments(item, param)}
        _check_call(function, param)
        function["name"] = told_name(function["name"], _namespace(item, param))
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        _assistant(messages).setdefault("tool_calls", []).append(call)
    elif kind in _RESULTS:
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
    elif kind == "reasoning":
        _think(messages, item, param)
    elif kind == "item_reference":
        message = f"{param} refers to an item of before, and this server remembers nothing; send it whole (store=false)"
        raise ApiError(message, param=param)
    elif kind != ADDED:  # which `offered` reads
        raise ApiError(
            f"{param}.type={kind!r} must be one of message, function_call, function_call_output, custom_tool_call, "
            f"custom_tool_call_output, reasoning and {ADDED}",
            param=f"{param}.type",
        )


def _arguments(item: Mapping[str, Any], param: str) -> Any:
    if item["type"] == "function_call":
        return item.get("arguments")
    if not isinstance(item.get("input"), str):
        raise ApiError(f"{param}.input={item.get('input')!r:.100} must be a text", param=f"{param}.input")
    return arguments_of(item["input"])


def _namespace(item: Mapping[str, Any], param: str) -> str | None:
    found = item.get("namespace")
    if not isinstance(found, str | None):
        raise ApiError(f"{param}.namespace={found!r:.100} must be a text", param=f"{param}.namespace")
    return found


def _check_content(content: Any, param: str, sees: bool) -> None:
    try:
        if sees and isinstance(content, list):
            content = [_words(part, f"{param}[{i}]") for i, part in enumerate(content)]
        plain_text(content, param)
    except BadMessage as error:
        raise ApiError(str(error), param=error.param) from None


def _words(part: Any, param: str) -> Any:
    """The part, or for an image that is one nothing said. Raises BadMessage."""
    if is_video(part):
        raise BadMessage(f"{param} is a video; they are read in chats and embeddings", param)
    return _NO_WORDS if is_image(part) and sent(part, param) else part


def _check_call(function: Mapping[str, Any], param: str) -> None:
    arguments = read_arguments(function["arguments"] or {})
    if not isinstance(function["name"], str) or not isinstance(arguments, Mapping | str):
        raise ApiError(
            f"{param} is a call {function!r:.200}; it has the name of a function and its arguments, the text of a JSON "
            "object",
            param=param,
        )


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The last message, if it is the assistant's, or a new one of its."""
    if not messages or messages[-1].get("role") != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _think(messages: list[dict[str, Any]], item: Mapping[str, Any], param: str) -> None:
    """What the assistant thought before what follows. Summaries and what is encrypted are another model's."""
    parts = item.get("content") or []
    if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
        raise ApiError(f"{param}.content is a list of parts, each of type reasoning_text", param=f"{param}.content")
    texts = [part.get("text") for part in parts if part.get("type") == "reasoning_text"]
    if any(not isinstance(text, str) for text in texts):
        raise ApiError(f"{param}.content has a reasoning_text without text", param=f"{param}.content")
    if texts and messages and _only_thought(messages[-1]):
        messages[-1][_THOUGHTS] += "".join(texts)
    elif texts:
        messages.append({"role": "assistant", "content": "", _THOUGHTS: "".join(texts)})


def _only_thought(message: Mapping[str, Any]) -> bool:
    """Of the assistant, with nothing else so far."""
    return _THOUGHTS in message and message["content"] == "" and "tool_calls" not in message


def usage(counts: tuple[int, int, int], thoughts: int) -> dict[str, Any]:
    """`counts`: tokens of the prompt, those of them found in the cache, tokens of the reply, `thoughts` among them."""
    prompt, cached, generated = counts
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},  # none are paid for
        "output_tokens": generated,
        "output_tokens_details": {"reasoning_tokens": thoughts},
        "total_tokens": prompt + generated,
    }


def message(id: str, text: str, logprobs: Sequence[Any], status: str) -> dict[str, Any]:
    return {
        "type": "message",
        "id": id,
        "status": status,
        "role": "assistant",
        "content": [] if status == "in_progress" else [text_part(text, logprobs)],
    }


def text_part(text: str, logprobs: Sequence[Any]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def reasoning(id: str, text: str, status: str) -> dict[str, Any]:
    content = [] if status == "in_progress" else [thought_part(text)]
    return {"type": "reasoning", "id": id, "status": status, "summary": [], "content": content}


def thought_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def call(id: str, name: str, arguments: str, status: str, tools: Mapping[str, Offered]) -> dict[str, Any]:
    """A call of what the model knows as `name`, in the client's words."""
    tool = tools.get(name)
    custom = tool is not None and tool.custom
    item = {
        "type": "custom_tool_call" if custom else "function_call",
        "id": f"{'ctc' if custom else 'fc'}_{id}",
        "call_id": f"call_{id}",
        "name": tool.name if tool else name,
        "status": status,
    }
    item |= {"input": input_of(arguments) if arguments else ""} if custom else {"arguments": arguments}
    return item | ({"namespace": tool.namespace} if tool and tool.namespace else {})
