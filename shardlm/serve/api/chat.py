"""/v1/chat/completions."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

from shardlm.serve.api import logprobs
from shardlm.serve.api.endpoint import Events, events_of
from shardlm.serve.api.errors import ApiError
from shardlm.serve.api.progress import Usage
from shardlm.serve.api.protocol import ChatRequest
from shardlm.serve.api.service import Call
from shardlm.serve.api.tools.choose import Tools
from shardlm.serve.api.tools.reader import CallDelta
from shardlm.serve.api.turns import Part, Turn, begin
from shardlm.serve.outputs import CompletionOutput, RequestOutput


async def chat(call: Call, request: ChatRequest) -> dict[str, Any] | Events:
    if request.stream and request.prompt_logprobs is not None:
        raise ApiError("prompt_logprobs is not reported in a stream; ask without stream", param="prompt_logprobs")
    tools, replies = await begin(call, request)
    writer = _Writer(call, request, tools)
    if request.stream:
        return Events(events_of(writer.stream(replies)))
    async for output in replies:
        last = output
    return writer.whole(last)


class _Writer:
    """The shape of answers to one request."""

    def __init__(self, call: Call, request: ChatRequest, tools: Tools):
        self._call, self._request, self._tools = call, request, tools
        self._top = request.top_logprobs or 0
        model = request.model or call.service.names[0]
        self._head = {"id": f"chatcmpl-{call.id}", "created": call.created, "model": model, "system_fingerprint": None}

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        body = {"object": "chat.completion", **self._head, "choices": [self._choice(one) for one in output.outputs]}
        body["usage"] = Usage({0: output}).body()
        if self._request.prompt_logprobs is not None:
            body["prompt_logprobs"] = logprobs.prompt(output.prompt_logprobs)
        return body

    def _choice(self, reply: CompletionOutput) -> dict[str, Any]:
        part = Turn(self._tools).advance(reply)
        content = "".join(piece for piece in part.pieces if isinstance(piece, str))
        calls = [piece for piece in part.pieces if isinstance(piece, CallDelta)]
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["content"] = content.strip() or None
            message["tool_calls"] = [
                {"id": self._call_id(reply.index, i), "type": "function", "function": function}
                for i, function in joined(calls).items()
            ]
        return {
            "index": reply.index,
            "message": message,
            "logprobs": self._logprobs(part),
            "finish_reason": part.finish_reason,
            "stop_reason": reply.stop_reason,
        }

    async def stream(self, replies: AsyncIterator[RequestOutput]) -> AsyncIterator[dict[str, Any]]:
        turns: dict[int, Turn] = {}
        usage = Usage()
        async for output in replies:
            usage.saw(0, output)
            for reply in output.outputs:
                if reply.index not in turns:
                    turns[reply.index] = Turn(self._tools)
                    yield self._chunk(reply.index, {"role": "assistant", "content": ""})
                turn = turns[reply.index]
                if not turn.ended:
                    for chunk in self._chunks(reply, turn.advance(reply)):
                        yield chunk
        options = self._request.stream_options
        if options and options.include_usage:
            yield {"object": "chat.completion.chunk", **self._head, "choices": [], "usage": usage.body()}

    def _chunks(self, reply: CompletionOutput, part: Part) -> list[dict[str, Any]]:
        """One for each piece; the log-probabilities go with the first, the reason with the last."""
        deltas = [self._delta(reply.index, piece) for piece in part.pieces]
        scores = self._logprobs(part) if part.places else None
        if not deltas and (scores or part.finish_reason):
            deltas = [{}]
        chunks = [self._chunk(reply.index, delta) for delta in deltas]
        if scores:
            chunks[0]["choices"][0]["logprobs"] = scores
        if part.finish_reason:
            chunks[-1]["choices"][0] |= {"finish_reason": part.finish_reason, "stop_reason": reply.stop_reason}
        return chunks

    def _delta(self, index: int, piece: str | CallDelta) -> dict[str, Any]:
        if isinstance(piece, str):
            return {"content": piece}
        function = {"arguments": piece.arguments}
        call: dict[str, Any] = {"index": piece.index, "function": function}
        if piece.name is not None:
            function["name"] = piece.name
            call |= {"id": self._call_id(index, piece.index), "type": "function"}
        return {"tool_calls": [call]}

    def _chunk(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return {"object": "chat.completion.chunk", **self._head, "choices": [choice]}

    def _logprobs(self, part: Part) -> dict[str, Any] | None:
        if not self._request.logprobs:
            return None
        return {"content": logprobs.chat(part.places, self._top), "refusal": None}

    def _call_id(self, reply: int, call: int) -> str:
        return f"call_{self._call.id}_{reply}_{call}"


def joined(deltas: Sequence[CallDelta]) -> dict[int, dict[str, str]]:
    """{index of the call: {name, arguments}}."""
    calls: dict[int, dict[str, str]] = {}
    for delta in deltas:
        call = calls.setdefault(delta.index, {"name": delta.name or "", "arguments": ""})
        call["arguments"] += delta.arguments
    return calls
