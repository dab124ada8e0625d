"""/v1/completions: text that goes on, with the log-probabilities that evaluations read."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

from shardlm.serve.api import logprobs
from shardlm.serve.api.conversation import tokens
from shardlm.serve.api.endpoint import Events, events_of
from shardlm.serve.api.errors import ApiError
from shardlm.serve.api.progress import Progress, Usage
from shardlm.serve.api.protocol import CompletionRequest, prompts_of
from shardlm.serve.api.sampling import beam_params, sampling_params
from shardlm.serve.api.service import Call
from shardlm.serve.outputs import CompletionOutput, Place, RequestOutput
from shardlm.serve.sampling_params import SamplingParams


async def completions(call: Call, request: CompletionRequest) -> dict[str, Any] | Events:
    blank = request.add_special_tokens is not False and any(call.service.llm.tokenizer.ends)
    prompts = prompts_of(request.prompt, "prompt", blank)
    params = _params(call, request)
    writer = _Writer(call, request, params.n, prompts)
    given = prompts if request.add_special_tokens is not False else await _plain(call, prompts, params)
    replies = await call.replies(
        given, params, request.priority or 0, request.cache_salt or "", beam_params(request, params)
    )
    if request.stream:
        return Events(events_of(writer.stream(replies)))
    last: dict[int, RequestOutput] = {}
    async for i, output in replies:
        last[i] = output
    choices = [writer.choice(i, last[i], reply) for i in sorted(last) for reply in last[i].outputs]
    return writer.body(choices, Usage(last).body())


def _params(call: Call, request: CompletionRequest) -> SamplingParams:
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise ApiError(f"best_of={request.best_of} is not supported; ask for n replies and choose", param="best_of")
    if request.suffix:
        raise ApiError("suffix is not supported; write it into the prompt as the model's own format", param="suffix")
    given = {"logprobs": request.logprobs}
    if request.echo and request.logprobs is not None:
        given["prompt_logprobs"] = max(request.logprobs, request.prompt_logprobs or 0)
    if request.max_tokens is not None:
        given["max_tokens"] = request.max_tokens
    return sampling_params(request, call.service.llm.max_model_len, call.service.settings.sampling, **given)


async def _plain(call: Call, prompts: Sequence[str | list[int]], params: SamplingParams) -> list[list[int]]:
    """Without what the tokenizer puts at the ends of a text."""
    llm, truncates = call.service.llm, params.truncate_prompt_tokens is not None
    encode = llm.tokenizer.encode
    return [await tokens(call.service, one, encode, truncates) if isinstance(one, str) else one for one in prompts]


class _Writer:
    """The shape of answers to one request."""

    def __init__(self, call: Call, request: CompletionRequest, n: int, prompts: Sequence[str | list[int]]):
        self._request, self._n, self._prompts = request, n, prompts
        self._tokenizer = call.service.llm.tokenizer
        self._offsets: dict[int, logprobs.Offsets] = {}  # of choices
        model = request.model or call.service.names[0]
        id = f"cmpl-{request.request_id or call.id}"
        self._head = {"id": id, "object": "text_completion", "created": call.created, "model": model}

    def body(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        return {**self._head, "choices": choices, "usage": usage}

    def choice(self, i: int, output: RequestOutput, reply: CompletionOutput) -> dict[str, Any]:
        """A whole reply to prompt i."""
        progress = Progress()
        text, places = progress.advance(reply)
        return self._part(i, output, reply, text, places, True)

    async def stream(self, replies: AsyncIterator[tuple[int, RequestOutput]]):
        options = self._request.stream_options
        wants_usage = bool(options and options.include_usage)
        always = wants_usage and bool(options.continuous_usage_stats)
        progress: dict[int, Progress] = {}
        begun: set[int] = set()  # choices of which something was sent
        usage = Usage()
        async for i, output in replies:
            usage.saw(i, output)
            for reply in output.outputs:
                index = i * self._n + reply.index
                first = index not in begun
                one = progress.setdefault(index, Progress())
                if one.ended:
                    continue
                text, places = one.advance(reply)
                new = len(reply.token_ids) > one.ids if self._request.return_token_ids else False
                if text or places or new or one.ended or (first and self._request.echo):
                    part = self._part(i, output, reply, text, places, first, one.ids)
                    one.ids = len(reply.token_ids)
                    begun.add(index)
                    yield self.body([part], usage.body() if always else None)
        if wants_usage:
            yield self.body([], usage.body())

    def _part(
        self,
        i: int,
        output: RequestOutput,
        reply: CompletionOutput,
        text: str,
        places: Sequence[Place],
        first: bool,
        sent: int = 0,
    ) -> dict[str, Any]:
        """`sent`: tokens that were, where they are asked for."""
        index = i * self._n + reply.index
        echoed = self._prompt_text(i, output) if first and self._request.echo else ""
        scores = None
        if self._request.logprobs is not None:
            if first:
                stream = self._tokenizer.stream(skip_special=self._request.skip_special_tokens is not False)
                self._offsets[index] = logprobs.Offsets(stream, len(echoed))
            scores = self._scores(places, self._offsets[index])
            if first and self._request.echo:
                prompt = self._prompt_scores(output, echoed)
                scores = {name: prompt[name] + values for name, values in scores.items()}
        choice = {
            "index": index,
            "text": echoed + text,
            "logprobs": scores,
            "finish_reason": reply.finish_reason,
            "stop_reason": reply.stop_reason,
        }
        if first and self._request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = logprobs.prompt(output.prompt_logprobs)
        if self._request.return_token_ids:
            choice["token_ids"] = reply.token_ids[sent:]
            if first:
                choice["prompt_token_ids"] = output.prompt_token_ids
        return choice

    def _scores(self, places: Sequence[Place], offsets: logprobs.Offsets) -> dict[str, list]:
        texts, ids = [place.chosen.decoded_token for place in places], [place.chosen.token_id for place in places]
        return self._legacy(places, texts, ids, offsets.push(ids))

    def _prompt_scores(self, output: RequestOutput, text: str) -> dict[str, list]:
        """Offsets count from the end of the prompt's text, as the tokenizer may put something before it."""
        ids = output.prompt_token_ids
        places = output.prompt_logprobs or [None] * len(ids)
        texts = self._tokenizer.texts(ids)
        before = len(text) - len(self._tokenizer.decode(ids, skip_special=False))
        begins = logprobs.Offsets(self._tokenizer.stream(skip_special=False), before).push(ids)
        return self._legacy(places, texts, ids, [max(0, begin) for begin in begins])

    def _legacy(self, places: Sequence[Place | None], texts, ids: Sequence[int], begins: Sequence[int]):
        names = ids if self._request.return_tokens_as_token_ids else ()
        return logprobs.legacy(places, self._request.logprobs, texts, begins, names)

    def _prompt_text(self, i: int, output: RequestOutput) -> str:
        prompt = self._prompts[i]
        if isinstance(prompt, str) and not output.truncated:
            return prompt
        return self._tokenizer.decode(output.prompt_token_ids, skip_special=False)
