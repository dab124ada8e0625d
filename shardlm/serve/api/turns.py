"""The model's turn in a conversation, without its shape in an answer: what chat and responses have in common."""

import asyncio
import dataclasses
import functools
from collections.abc import AsyncIterator, Sequence

from shardlm.serve.api import conversation
from shardlm.serve.api.errors import ApiError
from shardlm.serve.api.images import pictures_of
from shardlm.serve.api.progress import Progress
from shardlm.serve.api.protocol import ChatRequest
from shardlm.serve.api.reasoning.choose import HARMONY, Reasoning, Thinking, bounded
from shardlm.serve.api.reasoning.marks import Thought
from shardlm.serve.api.reasoning.tokens import Said, ThoughtTokens
from shardlm.serve.api.sampling import beam_params, sampling_params
from shardlm.serve.api.service import Call
from shardlm.serve.api.tools.choose import PlainParser, Tools, choose, style_of
from shardlm.serve.api.tools.reader import CallDelta
from shardlm.serve.images import check_cut
from shardlm.serve.outputs import CompletionOutput, Place, RequestOutput
from shardlm.serve.sampling_params import SamplingParams
from shardlm.tokenizer import Tokenizer
from shardlm.vision.image_parts import has_media
from shardlm.vision.image_places import encoded, shown

Piece = str | Thought | CallDelta


@dataclasses.dataclass
class Part:
    """What is new of one reply. pieces: contents, thoughts, and parts of calls. tokens: of which it is known whether
    they are thought. finish_reason: with the last part."""

    pieces: list[Piece]
    tokens: Sequence[Said]
    finish_reason: str | None

    @property
    def places(self) -> list[Place]:
        """Of the tokens, where log-probabilities are asked for."""
        return [token.place for token in self.tokens if token.place is not None]


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a request's replies mean. thinking: how their thoughts are told apart; None: they are not. skip_special:
    their texts are without special tokens. prompt: the text they follow. shows_thoughts: whether the client wants
    thoughts."""

    tools: Tools
    thinking: Thinking | None
    tokenizer: Tokenizer
    skip_special: bool
    prompt: str
    shows_thoughts: bool = True


class Turn:
    """One reply, part by part. The pieces of all parts, joined, do not depend on how the reply was cut into parts."""

    def __init__(self, asked: Asked):
        self._asked, self._tools = asked, asked.tools
        self._parser = asked.tools.parser()
        make = asked.thinking.splitter if asked.thinking else lambda: None
        self._splitter = make()
        self._tokens = ThoughtTokens(make(), asked.tokenizer, asked.skip_special)
        self._progress = Progress()
        self._seen = 0  # tokens

    @property
    def ended(self) -> bool:
        return self._progress.ended

    @property
    def thoughts(self) -> int:
        """Tokens of thought so far."""
        return self._tokens.thoughts

    def advance(self, reply: CompletionOutput) -> Part:
        text, places = self._progress.advance(reply)
        new = reply.token_ids[self._seen :]
        self._seen += len(new)
        tokens = self._tokens.push(new, places, self.ended)
        pieces = self._read(self._splitter.push(text) if self._splitter else [text])
        reason = reply.finish_reason
        if self.ended:
            pieces += self._read(self._splitter.finish() if self._splitter else [])
            pieces += self._numbered(self._parser.finish())
            if reason == "stop" and self._calls and not self._tools.named:
                reason = "tool_calls"
        most = self._tools.most
        if most is not None:
            pieces = [piece for piece in pieces if not isinstance(piece, CallDelta) or piece.index < most]
        if not self._asked.shows_thoughts:
            pieces = [piece for piece in pieces if not isinstance(piece, Thought)]
            tokens = [token for token in tokens if not token.thought]
        return Part(pieces, tokens, reason)

    @property
    def _calls(self) -> int:
        return self._parser.calls + (self._splitter.calls if self._splitter else 0)

    def _read(self, split: Sequence[Piece]) -> list[Piece]:
        """Contents may be calls of tools."""
        found: list[Piece] = []
        for piece in split:
            found += self._numbered(self._parser.push(piece)) if isinstance(piece, str) else [piece]
        return found

    def _numbered(self, pieces: Sequence[str | CallDelta]) -> list[Piece]:
        """After the calls that stood elsewhere than in contents."""
        before = self._splitter.calls if self._splitter else 0
        return [
            dataclasses.replace(piece, index=piece.index + before) if isinstance(piece, CallDelta) else piece
            for piece in pieces
        ]


async def begin(
    call: Call, request: ChatRequest, before: Sequence[int] = ()
) -> tuple[Asked, AsyncIterator[RequestOutput]]:
    """(what the replies mean, the replies as they come). `before`: tokens that the conversation follows. Raises
    ApiError, ShardlmError, EngineError."""
    _check(request)
    service, llm, tools = call.service, call.service.llm, _tools(call, request)
    params = _params(call, request, tools)
    rendered = await _text(call, request, tools)
    text, thinking = shown(rendered, **conversation.marks_of(llm)), None
    if service.reasoning is None:
        bounded(None, params, lambda _: None)
    else:
        begun = conversation.text_of(request.messages[-1]) if request.continue_final_message else None
        names = {tool["function"]["name"] for tool in tools.shown}
        thinking = service.reasoning.of(text, begun, names)
        params = _with_thoughts(params, thinking, service.reasoning)
    tokens = await _encoded(call, request, rendered, params.truncate_prompt_tokens is not None)
    beams = beam_params(request, params)
    prompt: list[int] | dict = [*before, *tokens]
    if any(map(has_media, request.messages)):
        check_cut(params)
        if beams:
            raise ApiError("use_beam_search is of texts alone; leave it out, or the images", param="use_beam_search")
        media = await pictures_of(call, request.messages, request.mm_processor_kwargs)
        prompt = {"prompt_token_ids": prompt, "multi_modal_data": media}
    replies = await call.replies([prompt], params, request.priority or 0, request.cache_salt or "", beams)
    shows = request.include_reasoning is not False
    asked = Asked(tools, thinking, llm.tokenizer, params.skip_special_tokens, text, shows)
    return asked, (output async for _, output in replies)


async def prompt_length(call: Call, request: ChatRequest, any_length: bool = False) -> int:
    """Tokens of a request's prompt. Raises ApiError, and unless it is to be counted at `any_length` PromptTooLong where
    it is too long for sure."""
    tokens = await _encoded(call, request, await _text(call, request, _tools(call, request)), any_length)
    if media := await pictures_of(call, request.messages, request.mm_processor_kwargs):
        both = media.get("image", ()), media.get("video", ())
        tokens, _ = await asyncio.to_thread(call.service.llm.images.placed, tokens, *both)
    return len(tokens)


def _tools(call: Call, request: ChatRequest) -> Tools:
    service, llm = call.service, call.service.llm
    style = style_of(llm.template.source if llm.template else "", service.settings.tool_style)
    tools = choose(request.tools, request.tool_choice, style, request.parallel_tool_calls)
    if service.reasoning is not None and service.reasoning.style is HARMONY and tools.structured is None:
        # Calls are on a channel of their own.
        return dataclasses.replace(tools, parser=PlainParser, begins=(), marks=())
    return tools


async def _text(call: Call, request: ChatRequest, tools: Tools) -> str:
    form = conversation.form_of(request)
    form |= {"options": _options(request), "sees": True}
    return await conversation.prompt(call.service.llm, request.messages, tools.shown, **form)


async def _encoded(call: Call, request: ChatRequest, text: str, truncates: bool) -> list[int]:
    # Templates write what stands at the beginning, such as <|begin_of_text|>: it must not come twice.
    tokenizer = call.service.llm.tokenizer
    encode = tokenizer.encode_prompt if request.add_special_tokens else tokenizer.encode
    own = {"tokenizer": tokenizer, "encode": encode, **conversation.marks_of(call.service.llm)}
    return await conversation.tokens(call.service, text, functools.partial(encoded, **own), truncates)


def _check(request: ChatRequest) -> None:
    """Raises ApiError for wishes that are not supported, or need others."""
    for name in ("chat_template", "functions", "function_call"):
        if getattr(request, name) is not None:
            instead = {"chat_template": "the model's own is used"}.get(name, "give tools and tool_choice")
            raise ApiError(f"{name} is not supported; {instead}", param=name)
    if set(request.modalities or ()) - {"text"}:
        raise ApiError(f"modalities={request.modalities} must be text alone", param="modalities")
    if request.top_logprobs and not request.logprobs:  # 0, which some clients always send, asks for nothing
        raise ApiError(f"top_logprobs={request.top_logprobs} needs logprobs=true", param="top_logprobs")


def _params(call: Call, request: ChatRequest, tools: Tools) -> SamplingParams:
    given = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    most = getattr(request, given)
    params = sampling_params(
        request,
        call.service.llm.max_model_len,
        call.service.settings.sampling,
        structured=tools.structured,
        instead=tools.begins,
        names={"logprobs": "top_logprobs", "max_tokens": given},
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        max_tokens=most,
    )
    sees = any(map(call.service.llm.tokenizer.is_special, tools.marks))  # which texts leave out unless told
    return dataclasses.replace(params, skip_special_tokens=False) if sees else params


def _options(request: ChatRequest) -> dict:
    """What goes to the template. An effort turns thinking on, and "none" off, as in vLLM: some templates know no
    efforts, and some think only where they are told to."""
    options = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None and not options.keys() & set(conversation.THINKING):
        options |= dict.fromkeys(conversation.THINKING, request.reasoning_effort != "none")
    for name in ("reasoning_effort", "documents"):
        if (value := getattr(request, name)) is not None:
            options.setdefault(name, value)
    return options


def _with_thoughts(params: SamplingParams, thinking: Thinking, reasoning: Reasoning) -> SamplingParams:
    """The answer's form does not hold for the thoughts before it, marks are to be seen, and a budget knows them."""
    params = bounded(reasoning, params, lambda _: thinking.thoughts)
    structured = thinking.hold(params.structured_outputs)
    skips = params.skip_special_tokens and not reasoning.special
    return dataclasses.replace(params, structured_outputs=structured, skip_special_tokens=skips)
