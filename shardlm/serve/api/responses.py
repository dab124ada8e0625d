"""/v1/responses, as far as a server that remembers nothing can answer it: text, thoughts and calls of functions.

The answer is a list of items. Streamed, each is announced, grows, and is told again when it is done.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any

from shardlm.serve.api import logprobs
from shardlm.serve.api import response_items as items
from shardlm.serve.api.endpoint import Events, encode
from shardlm.serve.api.errors import ApiError
from shardlm.serve.api.progress import Usage
from shardlm.serve.api.protocol import ResponsesRequest
from shardlm.serve.api.reasoning.marks import Thought
from shardlm.serve.api.response_tools import left_out, offered, shown
from shardlm.serve.api.service import Call
from shardlm.serve.api.tools.reader import CallDelta
from shardlm.serve.api.truncation import fitting
from shardlm.serve.api.turns import Asked, Part, Turn, begin
from shardlm.serve.outputs import RequestOutput

Event = dict[str, Any]


async def responses(call: Call, request: ResponsesRequest) -> dict[str, Any] | Events:
    try:
        asked, replies = await begin(call, items.chat_request(await fitting(call, request)))
    except ApiError as error:
        raise items.renamed(error) from None
    call.service.leave_out(left_out(request))
    writer = _Writer(call, request)
    turn = _turn(writer, replies, asked)
    if request.stream:
        return _Events(turn)
    async for event in turn:
        last = event
    return last["response"]


async def _turn(writer: "_Writer", replies: AsyncIterator[RequestOutput], asked: Asked) -> AsyncIterator[Event]:
    """All events of one response; the last holds the whole."""
    yield {"type": "response.created", "response": writer.response("in_progress")}
    yield {"type": "response.in_progress", "response": writer.response("in_progress")}
    turn = Turn(asked)
    async for output in replies:
        writer.usage.saw(0, output)
        part = turn.advance(output.outputs[0])
        writer.thoughts = turn.thoughts
        for event in writer.part(part):
            yield event
    status = "incomplete" if part.finish_reason in ("length", "abort") else "completed"
    for event in writer.close(status):
        yield event
    yield {"type": f"response.{status}", "response": writer.response(status)}


class _Events(Events):
    """With names and numbers, and without [DONE]: the last event tells."""

    def __init__(self, events: AsyncIterator[Event]):
        super().__init__(self._encoded(events))
        self._count = 0

    async def _encoded(self, events: AsyncIterator[Event]) -> AsyncGenerator[bytes, None]:
        async for event in events:
            yield self._one(event)

    def _one(self, event: Event) -> bytes:
        numbered = encode({**event, "sequence_number": self._count})
        self._count += 1
        return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), numbered)

    def error(self, error: ApiError) -> bytes:
        about = {"code": error.code or error.type, "message": error.message, "param": error.param}
        return self._one({"type": "error", **about})


class _Writer:
    """The items of one response, the last of which may still grow."""

    def __init__(self, call: Call, request: ResponsesRequest):
        self._call, self._request = call, request
        self._model = request.model or call.service.names[0]
        self._top = request.top_logprobs or 0
        self._scored = items.LOGPROBS in (request.include or ())
        self._tools = offered(request)
        self._items: list[dict[str, Any]] = []  # those that are done
        self._open: CallDelta | None = None  # the call that grows
        self._text: str | None = None  # the message that grows
        self._thought: str | None = None  # the thought that grows
        self._space = ""  # of a message that may begin
        self._scores: list[dict[str, Any]] = []  # of the message
        self._told = 0  # of these
        self.usage, self.thoughts = Usage(), 0

    def part(self, part: Part) -> Iterator[Event]:
        """What is new of the reply."""
        if self._scored:
            answer = [token.place for token in part.tokens if token.place is not None and not token.thought]
            self._scores += logprobs.chat(answer, self._top)
        for piece in part.pieces:
            if isinstance(piece, CallDelta):
                yield from self._call_grows(piece)
            elif isinstance(piece, Thought):
                yield from self._thought_grows(piece.text)
            else:
                yield from self._text_grows(piece)

    def close(self, status: str = "completed") -> Iterator[Event]:
        """The item that grew is done."""
        if self._text is not None:
            where = self._where("msg") | {"content_index": 0}
            item = items.message(where["item_id"], self._text, self._scores, status)
            done = {"text": self._text, "logprobs": self._scores}
            yield {"type": "response.output_text.done", **where, **done}
            yield {"type": "response.content_part.done", **where, "part": item["content"][0]}
            self._scores, self._told = [], 0
        elif self._thought is not None:
            where = self._where("rs") | {"content_index": 0}
            item = items.reasoning(where["item_id"], self._thought, status)
            yield {"type": "response.reasoning_text.done", **where, "text": self._thought}
            yield {"type": "response.content_part.done", **where, "part": item["content"][0]}
        elif self._open is not None:
            item = self._call_item(self._open, status)
            where = {"item_id": item["id"], "output_index": len(self._items)}
            if (text := item.get("input")) is not None:  # which is read when the arguments are whole
                yield {"type": "response.custom_tool_call_input.delta", **where, "delta": text}
                yield {"type": "response.custom_tool_call_input.done", **where, "input": text}
            else:
                done = {"name": item["name"], "arguments": item["arguments"]}
                yield {"type": "response.function_call_arguments.done", **where, **done}
        else:
            return
        yield {"type": "response.output_item.done", "output_index": len(self._items), "item": item}
        self._items.append(item)
        self._text = self._open = self._thought = None

    def _text_grows(self, text: str) -> Iterator[Event]:
        begins = self._text is None
        text = self._space + text
        self._space = text if begins and (self._items or self._growing) and not text.strip() else ""
        if self._space:
            return  # between two calls, or before a message
        if begins:
            yield from self.close()
            self._text = ""
        where = self._where("msg") | {"content_index": 0}
        if begins:
            item = items.message(where["item_id"], "", (), "in_progress")
            yield {"type": "response.output_item.added", "output_index": where["output_index"], "item": item}
            yield {"type": "response.content_part.added", **where, "part": items.text_part("", ())}
        self._text += text
        new, self._told = self._scores[self._told :], len(self._scores)
        yield {"type": "response.output_text.delta", **where, "delta": text, "logprobs": new}

    def _thought_grows(self, text: str) -> Iterator[Event]:
        begins = self._thought is None
        if begins:
            yield from self.close()
            self._thought = ""
        where = self._where("rs") | {"content_index": 0}
        if begins:
            item = items.reasoning(where["item_id"], "", "in_progress")
            yield {"type": "response.output_item.added", "output_index": where["output_index"], "item": item}
            yield {"type": "response.content_part.added", **where, "part": items.thought_part("")}
        self._thought += text
        yield {"type": "response.reasoning_text.delta", **where, "delta": text}

    def _call_grows(self, piece: CallDelta) -> Iterator[Event]:
        if piece.name is not None:
            yield from self.close()
            self._space, self._scores, self._told = "", [], 0
            self._open = CallDelta(piece.index, piece.name, "")
            item = self._call_item(self._open, "in_progress")
            yield {"type": "response.output_item.added", "output_index": len(self._items), "item": item}
        self._open.arguments += piece.arguments
        tool = self._tools.get(self._open.name)
        if not (tool and tool.custom):
            where = self._where("fc")
            yield {"type": "response.function_call_arguments.delta", **where, "delta": piece.arguments}

    def _call_item(self, call: CallDelta, status: str) -> dict[str, Any]:
        return items.call(self._number(), call.name, call.arguments, status, self._tools)

    @property
    def _growing(self) -> bool:
        return self._open is not None or self._thought is not None

    def _number(self) -> str:
        return f"{self._call.id}_{len(self._items)}"

    def _where(self, kind: str) -> dict[str, Any]:
        """The item that grows."""
        return {"item_id": f"{kind}_{self._number()}", "output_index": len(self._items)}

    def response(self, status: str) -> dict[str, Any]:
        """The whole, as far as it has come."""
        request, going = self._request, status == "in_progress"
        return {
            "id": f"resp_{self._call.id}",
            "object": "response",
            "created_at": self._call.created,
            "status": status,
            "model": self._model,
            "output": list(self._items),
            "usage": None if going else items.usage(self.usage.counts(), self.thoughts),
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": request.temperature,
            "text": {"format": (request.text and request.text.format) or {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": shown(request),
            "top_p": request.top_p,
            "truncation": request.truncation or "disabled",
        }
