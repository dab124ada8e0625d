"""One reply as Ollama writes it: lines of JSON that each have what is new, the last one with counts and times, or one
object with all of it."""

import dataclasses
import datetime
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

from shardlm.serve.api import logprobs
from shardlm.serve.api.blocks import Block, Blocks, Step, arguments_of
from shardlm.serve.api.endpoint import Events
from shardlm.serve.api.http import encode
from shardlm.serve.api.protocol import Json
from shardlm.serve.api.service import Call
from shardlm.serve.api.turns import Asked, Turn
from shardlm.serve.outputs import CompletionOutput, Place, RequestOutput

_NANO = 1_000_000_000


def lines_of(values: AsyncIterator[Any]) -> Events:
    async def chunks() -> AsyncGenerator[bytes, None]:
        async for value in values:
            yield encode(value) + b"\n"

    return Events(chunks())


def head(model: str) -> Json:
    """What every line begins with."""
    now = datetime.datetime.now(datetime.UTC)
    return {"model": model, "created_at": now.isoformat().replace("+00:00", "Z")}


@dataclasses.dataclass
class Said:
    """A part of a reply, or all of it."""

    text: str = ""
    thinking: str = ""
    calls: list[Json] = dataclasses.field(default_factory=list)
    places: list[Place] = dataclasses.field(default_factory=list)

    def add(self, more: "Said") -> None:
        self.text += more.text
        self.thinking += more.thinking
        self.calls += more.calls
        self.places += more.places


Shape = Callable[[Said], Json]


def as_message(said: Said) -> Json:
    """Of /api/chat."""
    message: Json = {"role": "assistant", "content": said.text}
    if said.thinking:
        message["thinking"] = said.thinking
    if said.calls:
        message["tool_calls"] = said.calls
    return {"message": message}


def as_response(said: Said) -> Json:
    """Of /api/generate."""
    return {"response": said.text, **({"thinking": said.thinking} if said.thinking else {})}


@dataclasses.dataclass
class Reply:
    """top: likeliest tokens that are told of each place; None: nothing is. keeps: the answer has `context`."""

    call: Call
    model: str
    asked: Asked
    shape: Shape
    top: int | None
    keeps: bool = False
    _calls: int = dataclasses.field(default=0, init=False)

    async def answer(self, outputs: AsyncIterator[RequestOutput], stream: bool) -> Json | Events:
        lines = self._lines(outputs)
        if stream:
            return lines_of(self._line(said, end) async for said, end in lines)
        whole, last = Said(), None
        async for said, end in lines:
            whole.add(said)
            last = end
        return self._line(whole, last)

    async def _lines(self, outputs: AsyncIterator[RequestOutput]) -> AsyncIterator[tuple[Said, Json | None]]:
        """(what is new, with the last the end)."""
        turn, blocks = Turn(self.asked), Blocks()
        async for output in outputs:
            reply = output.outputs[0]
            part = turn.advance(reply)
            new = [said for step in blocks.push(part.pieces) if (said := self._said(step))]
            if turn.ended:
                new += [said for step in blocks.end() if (said := self._said(step))]
            if part.places and self.top is not None:
                new = new or [Said()]
                new[0].places = part.places
            for said in new:
                yield said, None
        yield Said(), self._end(output, reply, part.finish_reason)

    def _said(self, step: Step) -> Said | None:
        """A call is told when it is whole, as its arguments are an object. Texts after thoughts begin with words."""
        if step.what == "grows" and step.block.kind == "thought":
            return Said(thinking=step.new)
        if step.what == "grows" and step.block.kind == "text":
            begins = step.block.index > 0 and step.block.text == step.new
            return Said(step.new.lstrip() if begins else step.new)
        if step.what == "ends" and step.block.kind == "call":
            return Said(calls=[self._called(step.block)])
        return None

    def _called(self, block: Block) -> Json:
        index, self._calls = self._calls, self._calls + 1
        function = {"index": index, "name": block.name, "arguments": arguments_of(block.text)}
        return {"id": f"call_{self.call.id}_{index}", "function": function}

    def _line(self, said: Said, end: Json | None) -> Json:
        line = head(self.model) | self.shape(said)
        if said.places:
            line["logprobs"] = logprobs.chat(said.places, self.top or 0)
        return line | ({"done": False} if end is None else {"done": True, **end})

    def _end(self, output: RequestOutput, reply: CompletionOutput, reason: str | None) -> Json:
        """Times are in nanoseconds. The model was there: nothing was loaded."""
        times = output.metrics
        read = written = 0.0
        if times is not None and times.first_token_ts:
            read, written = times.first_token_ts - times.scheduled_ts, times.last_token_ts - times.first_token_ts
        end: Json = {"done_reason": "length" if reason in ("length", "abort") else "stop"}
        if self.keeps:
            end["context"] = [*output.prompt_token_ids, *reply.token_ids]
        return end | {
            "total_duration": round((time.perf_counter() - self.call.began) * _NANO),
            "load_duration": 0,
            "prompt_eval_count": len(output.prompt_token_ids),
            "prompt_eval_duration": _at_least_one(read),
            "eval_count": len(reply.token_ids),
            "eval_duration": _at_least_one(written),  # by which clients divide
        }


def _at_least_one(seconds: float) -> int:
    return max(1, round(seconds * _NANO))
