"""/v1/responses and /v1/responses/input_tokens, as far as a server that remembers nothing can answer them: text,
thoughts and calls of functions.

The answer is a list of items. Streamed, each is announced, grows, and is told again when it is done.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any

from shardlm.serve.api import logprobs
from shardlm.serve.api import response_items as items
from shardlm.serve.api.blocks import Block, Blocks, Step
from shardlm.serve.api.endpoint import Events, about, named
from shardlm.serve.api.errors import ApiError, renamed
from shardlm.serve.api.progress import Usage
from shardlm.serve.api.protocol import ResponsesRequest
from shardlm.serve.api.response_tools import left_out, offered, shown
from shardlm.serve.api.service import Call
from shardlm.serve.api.truncation import fitting
from shardlm.serve.api.turns import Asked, Part, Turn, begin, prompt_length
from shardlm.serve.outputs import RequestOutput

Event = dict[str, Any]


async def responses(call: Call, request: ResponsesRequest) -> dict[str, Any] | Events:
    try:
        asked, replies = await begin(call, items.chat_request(await fitting(call, request), call.service.sees))
    except ApiError as error:
        raise renamed(error, items.NAMES) from None
    call.service.leave_out(left_out(request))
    writer = _Writer(call, request)
    turn = _turn(writer, replies, asked)
    if request.stream:
        return _Events(turn)
    async for event in turn:
        last = event
    return last["response"]


async def input_tokens(call: Call, request: ResponsesRequest) -> dict[str, Any]:
    """As OpenAI's /v1/responses/input_tokens: of the whole prompt, however long it is."""
    try:
        count = await prompt_length(call, items.chat_request(request, call.service.sees), any_length=True)
    except ApiError as error:
        raise renamed(error, items.NAMES) from None
    return {"object": "response.input_tokens", "input_tokens": count}


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
        numbered = {**event, "sequence_number": self._count}
        self._count += 1
        return named(numbered)

    def error(self, error: ApiError) -> bytes:
        return self._one({"type": "error", **about(error)})


class _Writer:
    """The items of one response, the last of which may still grow."""

    def __init__(self, call: Call, request: ResponsesRequest):
        self._call, self._request = call, request
        self._model = request.model or call.service.names[0]
        self._top = request.top_logprobs or 0
        self._scored = items.LOGPROBS in (request.include or ())
        self._tools = offered(request)
        self._blocks = Blocks()
        self._items: list[dict[str, Any]] = []  # those that are done
        self._scores: list[dict[str, Any]] = []  # of the message
        self._told = 0  # of these
        self.usage, self.thoughts = Usage(), 0

    def part(self, part: Part) -> Iterator[Event]:
        """What is new of the reply."""
        if self._scored:
            answer = [token.place for token in part.tokens if token.place is not None and not token.thought]
            self._scores += logprobs.chat(answer, self._top)
        for step in self._blocks.push(part.pieces):
            yield from self._events(step)

    def close(self, status: str = "completed") -> Iterator[Event]:
        """Nothing follows, and the item that grew is done."""
        for step in self._blocks.end():
            yield from self._events(step, status)

    def _events(self, step: Step, status: str = "completed") -> Iterator[Event]:
        block = step.block
        if step.what == "begins":
            yield from self._begins(block)
        elif step.what == "ends":
            yield from self._ends(block, status)
        elif block.kind == "text":
            new, self._told = self._scores[self._told :], len(self._scores)
            yield {"type": "response.output_text.delta", **self._where(block), "delta": step.new, "logprobs": new}
        elif block.kind == "thought":
            yield {"type": "response.reasoning_text.delta", **self._where(block), "delta": step.new}
        elif step.new and not self._is_custom(block):  # LiteLLM's reader ends at one that brings nothing
            yield {"type": "response.function_call_arguments.delta", **self._where(block), "delta": step.new}

    def _begins(self, block: Block) -> Iterator[Event]:
        if block.kind == "call":
            self._scores, self._told = [], 0
        item = self._item(block, "in_progress")
        yield {"type": "response.output_item.added", "output_index": block.index, "item": item}
        if block.kind != "call":
            part = items.text_part("", ()) if block.kind == "text" else items.thought_part("")
            yield {"type": "response.content_part.added", **self._where(block), "part": part}

    def _ends(self, block: Block, status: str) -> Iterator[Event]:
        item, where = self._item(block, status), self._where(block)
        if block.kind == "text":
            yield {"type": "response.output_text.done", **where, "text": block.text, "logprobs": self._scores}
            self._scores, self._told = [], 0
        elif block.kind == "thought":
            yield {"type": "response.reasoning_text.done", **where, "text": block.text}
        elif self._is_custom(block):  # whose input is read when the arguments are whole
            yield {"type": "response.custom_tool_call_input.delta", **where, "delta": item["input"]}
            yield {"type": "response.custom_tool_call_input.done", **where, "input": item["input"]}
        else:
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield {"type": "response.function_call_arguments.done", **where, **done}
        if block.kind != "call":
            yield {"type": "response.content_part.done", **where, "part": item["content"][0]}
        yield {"type": "response.output_item.done", "output_index": block.index, "item": item}
        self._items.append(item)

    def _is_custom(self, block: Block) -> bool:
        tool = self._tools.get(block.name)
        return tool is not None and tool.custom

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        number = f"{self._call.id}_{block.index}"
        if block.kind == "text":
            return items.message(f"msg_{number}", block.text, self._scores, status)
        if block.kind == "thought":
            return items.reasoning(f"rs_{number}", block.text, status)
        return items.call(number, block.name, block.text, status, self._tools)

    def _where(self, block: Block) -> dict[str, Any]:
        """The item, and which part of it grows, if it has parts."""
        where = {"item_id": self._item(block, "in_progress")["id"], "output_index": block.index}
        return where if block.kind == "call" else where | {"content_index": 0}

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
