"""/v1/chat/completions."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

from shardlm.serve.api import conversation, logprobs
from shardlm.serve.api.endpoint import Events, events_of
from shardlm.serve.api.errors import ApiError
from shardlm.serve.api.progress import Usage
from shardlm.serve.api.protocol import ChatRequest
from shardlm.serve.api.reasoning.marks import Thought
from shardlm.serve.api.service import Call
from shardlm.serve.api.tools.reader import CallDelta
from shardlm.serve.api.turns import Asked, Part, Piece, Turn, begin
from shardlm.serve.outputs import CompletionOutput, RequestOutput


async def chat(call: Call, request: ChatRequest) -> dict[str, Any] | Events:
    if request.stream and request.prompt_logprobs is not None:
        raise ApiError("prompt_logprobs is not reported in a stream; ask without stream", param="prompt_logprobs")
    asked, replies = await begin(call, request)
    writer = _Writer(call, request, asked)
    if request.stream:
        return Events(events_of(writer.stream(replies)))
    async for output in replies:
        last = output
    return writer.whole(last)


class _Writer:
    """The shape of answers to one request."""

    def __init__(self, call: Call, request: ChatRequest, asked: Asked):
        self._call, self._request, self._asked = call, request, asked
        self._turns: dict[int, Turn] = {}
        self._usage = Usage()
        self._top = request.top_logprobs or 0
        model = request.model or call.service.names[0]
        self._head = {
            "id": f"chatcmpl-{request.request_id or call.id}",
            "created": call.created,
            "model": model,
            "system_fingerprint": None,
        }
        options = request.stream_options
        self._counts = bool(options and options.include_usage)
        self._always_counts = self._counts and bool(options.continuous_usage_stats)
        self._echo = _echoed(request)

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        self._usage.saw(0, output)
        body = {"object": "chat.completion", **self._head, "choices": [self._choice(one) for one in output.outputs]}
        body["usage"] = self._counted()
        if self._request.prompt_logprobs is not None:
            body["prompt_logprobs"] = logprobs.prompt(output.prompt_logprobs)
        if self._request.return_token_ids:
            body["prompt_token_ids"] = output.prompt_token_ids
        if self._request.return_prompt_text:
            body["prompt_text"] = self._asked.prompt
        return body

    def _choice(self, reply: CompletionOutput) -> dict[str, Any]:
        turn = self._turns[reply.index] = Turn(self._asked)
        part = turn.advance(reply)
        choice = {
            "index": reply.index,
            "message": self._message(reply.index, part.pieces),
            "logprobs": self._logprobs(part),
            "finish_reason": part.finish_reason,
            "stop_reason": reply.stop_reason,
        }
        if self._request.return_token_ids:
            choice["token_ids"] = [token.id for token in part.tokens]
        return choice

    def _message(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        content = self._echo + "".join(piece for piece in pieces if isinstance(piece, str))
        calls = [piece for piece in pieces if isinstance(piece, CallDelta)]
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self._asked.thinking:
            thoughts = "".join(piece.text for piece in pieces if isinstance(piece, Thought)) or None
            message |= _thought(thoughts)
            if thoughts:
                message["content"] = content or None
        if calls:
            message["content"] = content.strip() or None
            message["tool_calls"] = [
                {"id": self._call_id(index, i), "type": "function", "function": function}
                for i, function in joined(calls).items()
            ]
        return message

    async def stream(self, replies: AsyncIterator[RequestOutput]) -> AsyncIterator[dict[str, Any]]:
        async for output in replies:
            self._usage.saw(0, output)
            for reply in output.outputs:
                if reply.index not in self._turns:
                    self._turns[reply.index] = Turn(self._asked)
                    for chunk in self._beginning(reply.index, output):
                        yield self._with_usage(chunk)
                turn = self._turns[reply.index]
                if not turn.ended:
                    for chunk in self._chunks(reply, turn.advance(reply)):
                        yield self._with_usage(chunk)
        if self._counts:
            yield {"object": "chat.completion.chunk", **self._head, "choices": [], "usage": self._counted()}

    def _beginning(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        """What comes before a reply."""
        first = self._chunk(index, {"role": "assistant", "content": ""})
        if self._request.return_token_ids:
            first["prompt_token_ids"] = output.prompt_token_ids
        if self._request.return_prompt_text:
            first["prompt_text"] = self._asked.prompt
        return [first, self._chunk(index, {"content": self._echo})] if self._echo else [first]

    def _chunks(self, reply: CompletionOutput, part: Part) -> list[dict[str, Any]]:
        """One for each piece; what is told of tokens goes with the first, the reason with the last."""
        deltas = [self._delta(reply.index, piece) for piece in part.pieces]
        told: dict[str, Any] = {"logprobs": self._logprobs(part)} if part.places else {}
        if self._request.return_token_ids and part.tokens:
            told["token_ids"] = [token.id for token in part.tokens]
        if not deltas and (told or part.finish_reason):
            deltas = [{}]
        chunks = [self._chunk(reply.index, delta) for delta in deltas]
        if told:
            chunks[0]["choices"][0] |= told
        if part.finish_reason:
            chunks[-1]["choices"][0] |= {"finish_reason": part.finish_reason, "stop_reason": reply.stop_reason}
        return chunks

    def _delta(self, index: int, piece: Piece) -> dict[str, Any]:
        if isinstance(piece, str):
            return {"content": piece}
        if isinstance(piece, Thought):
            return _thought(piece.text)
        function = {"arguments": piece.arguments}
        call: dict[str, Any] = {"index": piece.index, "function": function}
        if piece.name is not None:
            function["name"] = piece.name
            call |= {"id": self._call_id(index, piece.index), "type": "function"}
        return {"tool_calls": [call]}

    def _chunk(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return {"object": "chat.completion.chunk", **self._head, "choices": [choice]}

    def _with_usage(self, chunk: dict[str, Any]) -> dict[str, Any]:
        """With what was counted so far or, where only the last chunk is to have it, with a null, as OpenAI's have."""
        return chunk | {"usage": self._counted() if self._always_counts else None} if self._counts else chunk

    def _counted(self) -> dict[str, Any]:
        return self._usage.body(sum(turn.thoughts for turn in self._turns.values()) if self._asked.thinking else None)

    def _logprobs(self, part: Part) -> dict[str, Any] | None:
        if not self._request.logprobs:
            return None
        named = logprobs.named(self._request.return_tokens_as_token_ids)
        return {"content": logprobs.chat(part.places, self._top, named), "refusal": None}

    def _call_id(self, reply: int, call: int) -> str:
        return f"call_{self._call.id}_{reply}_{call}"


def _thought(text: str | None) -> dict[str, Any]:
    """Under vLLM's name, and the older one that more clients read."""
    return {"reasoning": text, "reasoning_content": text}


def _echoed(request: ChatRequest) -> str:
    """What the client wants before the reply: the assistant's last message, if the last one is its."""
    last = request.messages[-1] if request.messages else {}
    return conversation.text_of(last) if request.echo and last.get("role") == "assistant" else ""


def joined(deltas: Sequence[CallDelta]) -> dict[int, dict[str, str]]:
    """{index of the call: {name, arguments}}."""
    calls: dict[int, dict[str, str]] = {}
    for delta in deltas:
        call = calls.setdefault(delta.index, {"name": delta.name or "", "arguments": ""})
        call["arguments"] += delta.arguments
    return calls
