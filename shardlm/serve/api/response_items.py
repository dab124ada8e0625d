"""From the items of a /v1/responses request to a chat: the same conversation in the words of /v1/chat/completions."""

from collections.abc import Mapping, Sequence
from typing import Any

from shardlm.serve.api.errors import ApiError
from shardlm.serve.api.protocol import ChatRequest, ResponsesRequest

LOGPROBS = "message.output_text.logprobs"
_STATEFUL = ("previous_response_id", "background", "conversation", "prompt")


def chat_request(request: ResponsesRequest) -> ChatRequest:
    """Raises ApiError for what needs a server that remembers, and for items that a text model cannot read."""
    for name in _STATEFUL:
        if getattr(request, name):
            raise ApiError(f"{name} is not supported: this server remembers nothing; send the whole input", param=name)
    text_format = request.text.format if request.text else None
    logprobs = LOGPROBS in (request.include or ())
    return ChatRequest(
        messages=_messages(request),
        tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools or ())] or None,
        tool_choice=_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=text_format,
        logprobs=logprobs,
        top_logprobs=request.top_logprobs if logprobs else None,
        max_completion_tokens=request.max_output_tokens,
        reasoning_effort=request.reasoning and request.reasoning.effort,
        temperature=request.temperature,
        top_p=request.top_p,
    )


def _messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": request.instructions}] if request.instructions else []
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    for i, item in enumerate(request.input):
        _append(messages, item, f"input[{i}]")
    return messages


def _append(messages: list[dict[str, Any]], item: Mapping[str, Any], param: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        messages.append({"role": item.get("role"), "content": item.get("content")})
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        last = messages[-1] if messages else {}
        if last.get("role") != "assistant":
            messages.append(last := {"role": "assistant", "content": ""})
        last.setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
    elif kind != "reasoning":  # another model's thoughts are not shown to this one
        raise ApiError(
            f"{param}.type={kind!r} must be one of message, function_call, function_call_output and reasoning",
            param=f"{param}.type",
        )


def _tool(tool: Mapping[str, Any], param: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise ApiError(f"{param}.type={tool.get('type')!r} must be function", param=f"{param}.type")
    function = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
    return {"type": "function", "function": function}


def _choice(choice: Any) -> Any:
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        tools = choice.get("tools")
        named = [_choice(one) for one in tools] if isinstance(tools, list) else tools
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": named}}
    if isinstance(choice, Mapping) and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


def usage(counts: tuple[int, int, int]) -> dict[str, Any]:
    """`counts`: tokens of the prompt, those of them found in the cache, tokens of the reply."""
    prompt, cached, generated = counts
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": generated,
        "output_tokens_details": {"reasoning_tokens": 0},
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


def function_call(id: str, name: str, arguments: str, status: str) -> dict[str, Any]:
    return {
        "type": "function_call",
        "id": f"fc_{id}",
        "call_id": f"call_{id}",
        "name": name,
        "arguments": arguments,
        "status": status,
    }
