"""The model's turn in a conversation, without its shape in an answer: what chat and responses have in common."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence

from shardlm.serve.api import conversation
from shardlm.serve.api.errors import ApiError
from shardlm.serve.api.progress import Progress
from shardlm.serve.api.protocol import ChatRequest
from shardlm.serve.api.sampling import sampling_params
from shardlm.serve.api.service import Call
from shardlm.serve.api.tools.choose import Tools, choose, style_of
from shardlm.serve.api.tools.reader import CallDelta
from shardlm.serve.outputs import CompletionOutput, Place, RequestOutput


@dataclasses.dataclass
class Part:
    """What is new of one reply. pieces: texts, and parts of calls. finish_reason: with the last part."""

    pieces: list[str | CallDelta]
    places: Sequence[Place]
    finish_reason: str | None


class Turn:
    """One reply, part by part. The pieces of all parts, joined, do not depend on how the reply was cut into parts."""

    def __init__(self, tools: Tools):
        self._tools = tools
        self._parser = tools.parser()
        self._progress = Progress()

    @property
    def ended(self) -> bool:
        return self._progress.ended

    def advance(self, reply: CompletionOutput) -> Part:
        text, places = self._progress.advance(reply)
        pieces = self._parser.push(text)
        reason = reply.finish_reason
        if self.ended:
            pieces += self._parser.finish()
            if reason == "stop" and self._parser.calls and not self._tools.named:
                reason = "tool_calls"
        most = self._tools.most
        if most is not None:
            pieces = [piece for piece in pieces if isinstance(piece, str) or piece.index < most]
        return Part(pieces, places, reason)


async def begin(call: Call, request: ChatRequest) -> tuple[Tools, AsyncIterator[RequestOutput]]:
    """(what the tools mean, the replies as they come). Raises ApiError, ShardlmError, EngineError."""
    for name in ("chat_template", "functions", "function_call"):
        if getattr(request, name) is not None:
            instead = {"chat_template": "the model's own is used"}.get(name, "give tools and tool_choice")
            raise ApiError(f"{name} is not supported; {instead}", param=name)
    if set(request.modalities or ()) - {"text"}:
        raise ApiError(f"modalities={request.modalities} must be text alone", param="modalities")
    llm = call.service.llm
    style = style_of(llm.template.source if llm.template else "", call.service.settings.tool_style)
    tools = choose(request.tools, request.tool_choice, style, request.parallel_tool_calls)
    if request.top_logprobs is not None and not request.logprobs:
        raise ApiError(f"top_logprobs={request.top_logprobs} needs logprobs=true", param="top_logprobs")
    most = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    params = sampling_params(
        request,
        llm.max_model_len,
        call.service.settings.sampling,
        structured=tools.structured,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        max_tokens=most,
    )
    options = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        options.setdefault("reasoning_effort", request.reasoning_effort)
    form = conversation.form_of(request)
    text = await conversation.prompt(llm, request.messages, tools.shown, options=options, **form)
    # Templates write what stands at the beginning, such as <|begin_of_text|>: it must not come twice.
    tokens = await asyncio.to_thread(llm.tokenizer.encode, text)
    replies = await call.replies([tokens], params, request.priority or 0)
    return tools, (output async for _, output in replies)
