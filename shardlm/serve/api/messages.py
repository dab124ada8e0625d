"""/v1/messages and /v1/messages/count_tokens, as Anthropic's clients ask and are answered
(https://docs.anthropic.com/en/api/messages): text, images, thoughts and calls of tools. Nothing is signed, and no tool
run."""

from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
from typing import Any

from shardlm.errors import ShardlmError
from shardlm.serve.api import conversation
from shardlm.serve.api import message_items as items
from shardlm.serve.api.blocks import Block, Blocks, Kind, Step, arguments_of
from shardlm.serve.api.endpoint import Events, named
from shardlm.serve.api.errors import ApiError, as_api_error, renamed
from shardlm.serve.api.http import encode
from shardlm.serve.api.message_tools import eager, left_out
from shardlm.serve.api.progress import Usage
from shardlm.serve.api.protocol import ChatRequest, CountTokensRequest, MessagesRequest
from shardlm.serve.api.service import Call
from shardlm.serve.api.turns import Asked, Turn, begin, prompt_length
from shardlm.serve.outputs import CompletionOutput, RequestOutput

Event = dict[str, Any]
_PING: Event = {"type": "ping"}
_SIGNATURE = "unsigned"  # of thoughts: clients send back those alone that have one
_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens", "abort": "max_tokens"}


async def messages(call: Call, request: MessagesRequest) -> dict[str, Any] | Events:
    chat = _chat(call, request)
    try:
        asked, replies = await begin(call, chat)
    except (ApiError, ShardlmError) as error:
        raise renamed(as_api_error(error), items.NAMES) from None
    call.service.leave_out(left_out(request.tools))
    writer = _Writer(call, request)
    events = writer.events(replies, asked)
    if request.stream:
        return Events(_named(events))
    async for _ in events:
        pass
    return writer.message()


async def count_tokens(call: Call, request: CountTokensRequest) -> dict[str, Any]:
    return {"input_tokens": await prompt_length(call, _chat(call, request), any_length=True)}


def _chat(call: Call, request: CountTokensRequest) -> ChatRequest:
    service = call.service
    if service.shows_later_system is None:
        service.shows_later_system = conversation.shows_later_system(service.llm.template)
    bounds = service.reasoning is not None and service.reasoning.ends_by_mark
    return items.chat_request(request, service.shows_later_system, bounds, service.sees)


async def _named(events: AsyncIterator[Event]) -> AsyncGenerator[bytes, None]:
    """By name, and without [DONE]: the last event tells."""
    async for event in events:
        yield named(event)


class _Writer:
    """One message, the last block of whose content may still grow."""

    def __init__(self, call: Call, request: MessagesRequest):
        self._call, self._most = call, request.max_tokens
        self._model = request.model or call.service.names[0]
        self._eager = eager(request.tools)
        self._blocks = Blocks(trims=True)
        self._content: list[dict[str, Any]] = []  # blocks that are done
        self._usage, self._thoughts = Usage(), 0
        self._end: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}

    async def events(self, replies: AsyncIterator[RequestOutput], asked: Asked) -> AsyncIterator[Event]:
        """Of the whole message, which has come to its end with them."""
        turn, begun = Turn(asked), False
        async for output in replies:
            self._usage.saw(0, output)
            if not begun:
                yield {"type": "message_start", "message": self.message()}
                yield _PING
                begun = True
            reply = output.outputs[0]
            part = turn.advance(reply)
            self._thoughts = turn.thoughts
            for event in self._steps(self._blocks.push(part.pieces)):
                yield event
        for event in self._steps(self._blocks.end()):
            yield event
        self._end = self._ending(reply, part.finish_reason)
        yield {"type": "message_delta", "delta": self._end, "usage": self._counted()}
        yield {"type": "message_stop"}

    def message(self) -> dict[str, Any]:
        """The whole, as far as it has come."""
        return {
            "id": f"msg_{self._call.id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": list(self._content),
            **self._end,
            "usage": self._counted(),
        }

    def _steps(self, steps: Iterable[Step]) -> Iterator[Event]:
        for step in steps:
            where = {"index": step.block.index}
            if step.what == "begins":
                yield {"type": "content_block_start", **where, "content_block": self._begun(step.block)}
            elif step.what == "grows" and self._waits(step.block):
                yield _PING
            elif step.what == "grows":
                yield {"type": "content_block_delta", **where, "delta": _delta(step.block.kind, step.new)}
            else:
                whole = self._whole(step.block)
                if step.block.kind == "thought":
                    signed = {"type": "signature_delta", "signature": _SIGNATURE}
                    yield {"type": "content_block_delta", **where, "delta": signed}
                elif self._waits(step.block):
                    arguments = encode(whole["input"]).decode()
                    yield {"type": "content_block_delta", **where, "delta": _delta("call", arguments)}
                yield {"type": "content_block_stop", **where}
                self._content.append(whole)

    def _waits(self, block: Block) -> bool:
        """Whether it is told when it is whole: clients parse arguments as they come and give up a reply at the first
        character that is not JSON, as models may write. Those of eager tools take that upon themselves."""
        return block.kind == "call" and block.name not in self._eager

    def _begun(self, block: Block) -> dict[str, Any]:
        """What is to grow."""
        if block.kind == "text":
            return {"type": "text", "text": ""}
        if block.kind == "thought":
            return {"type": "thinking", "thinking": "", "signature": ""}
        return {"type": "tool_use", "id": f"toolu_{self._call.id}_{block.index}", "name": block.name, "input": {}}

    def _whole(self, block: Block) -> dict[str, Any]:
        if block.kind == "text":
            return {"type": "text", "text": block.text}
        if block.kind == "thought":
            return {"type": "thinking", "thinking": block.text, "signature": _SIGNATURE}
        return self._begun(block) | {"input": arguments_of(block.text)}

    def _ending(self, reply: CompletionOutput, finish_reason: str | None) -> dict[str, Any]:
        reason, sequence = _REASONS[finish_reason], None
        if finish_reason == "length" and len(reply.token_ids) < self._most:
            reason = "model_context_window_exceeded"
        elif isinstance(reply.stop_reason, str):
            reason, sequence = "stop_sequence", reply.stop_reason
        elif reason == "end_turn" and any(block["type"] == "tool_use" for block in self._content):
            reason = "tool_use"  # that the client chose
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _counted(self) -> dict[str, Any]:
        prompt, cached, generated = self._usage.counts()
        return {
            "input_tokens": prompt - cached,
            "cache_creation_input_tokens": 0,  # none are paid for
            "cache_read_input_tokens": cached,
            "output_tokens": generated,
            "output_tokens_details": {"thinking_tokens": self._thoughts},
        }


def _delta(kind: Kind, new: str) -> dict[str, Any]:
    if kind == "text":
        return {"type": "text_delta", "text": new}
    if kind == "thought":
        return {"type": "thinking_delta", "thinking": new}
    return {"type": "input_json_delta", "partial_json": new}
