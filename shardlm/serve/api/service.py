"""What all requests share, and what one request starts in the engine and leaves there when it ends."""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from typing import Any

from shardlm.errors import ShardlmError
from shardlm.serve import beam_search
from shardlm.serve.adapter_table import Adapter, LoRARequest
from shardlm.serve.api.errors import ApiError, no_model
from shardlm.serve.api.http import Serving
from shardlm.serve.api.metrics import Clock, Metrics
from shardlm.serve.api.ollama.names import listed_as
from shardlm.serve.api.reasoning.choose import bounded, choose
from shardlm.serve.api.settings import Settings
from shardlm.serve.beam_search import BeamSearchParams
from shardlm.serve.images import Prepared
from shardlm.serve.long_texts import LongTexts
from shardlm.serve.outputs import RequestOutput
from shardlm.serve.prompts import Prompt
from shardlm.serve.request import check_prompt
from shardlm.serve.sampling_params import SamplingParams

KINDS = 32
FILES = 64  # of images by their address that all requests hold at once: 2 GiB of the largest
VIDEOS = 8  # the same of videos: 1 GiB
_TOOLS = "tools of type %.50r are not run here, and models are not told of them"
Outputs = AsyncGenerator[tuple[int, RequestOutput], None]  # which prompt, and its replies so far


class Service(Serving):
    """The engine, the settings and the counts. `llm` is an AsyncLLM."""

    def __init__(self, llm, settings: Settings):
        super().__init__()
        self.llm, self.settings = llm, settings
        self.names = settings.model_names or (llm.model_name,)
        if twice := set(self.names) & set(self.adapters):
            raise ShardlmError(f"the adapter {min(twice)!r} has the model's own name; choose another (--model_names)")
        self.reasoning = choose(settings.reasoning_parser, llm.template, llm.tokenizer)
        self.root = llm.model_name  # where the weights are from
        self.metrics = Metrics(self.names[0])
        self.created = int(time.time())
        self.load = 0  # requests under way that have, or wait for, the devices
        self.unanswered = 0  # prompts in the engine, or with images still to come, that have had no output yet
        self.files = asyncio.Semaphore(FILES)
        self.videos = asyncio.Semaphore(VIDEOS)
        self.long_texts = LongTexts()
        self._left_out: set[str] = set()  # what the log says of kinds of tools, or of options, that are
        self.shows_later_system: bool | None = None  # of the chat template; None: not looked at yet
        self.updating: asyncio.Future | None = None  # the last reading of other weights
        self.leaving: list[Callable[[], object]] = []  # ends, when nothing new is taken, what nobody waits for

    async def drain(self) -> None:
        for leave in self.leaving:
            leave()
        await super().drain()
        await self.llm.drain()

    @property
    def sees(self) -> bool:
        """Whether the model reads images."""
        return self.llm.images is not None

    @property
    def adapters(self) -> dict[str, Adapter]:
        """Those that are loaded, by name."""
        return {adapter.name: adapter for adapter in self.llm.adapters}

    def adapter_of(self, name: str | None) -> LoRARequest | None:
        """The adapter of a model's name, if it is one's; none named is the model itself. Raises ApiError for a model
        that is not here."""
        own = None if name is None else self.known(name)
        if own is None or own in self.names:
            return None
        if own in self.adapters:
            return LoRARequest(own)
        raise no_model(name, [*self.names, *self.adapters])

    def known(self, name: str) -> str:
        """The model's name, or an adapter's, where a client calls it as Ollama lists it."""
        return listed_as(name, [*self.names, *self.adapters])

    def leave_out(self, kinds: Sequence[str], said: str = _TOOLS) -> None:
        """Tools of these kinds were offered and the model is not told of them, or what `said` says of such a kind: they
        are counted, and the log names each once, up to KINDS of what any client may make up."""
        self.metrics.ignored_fields += len(kinds)
        for line in dict.fromkeys(said % kind for kind in kinds):
            if line not in self._left_out and len(self._left_out) < KINDS:
                self._left_out.add(line)
                logging.warning("%s", line)

    def admit(self, prompts: int, n: int) -> None:
        """Raises ApiError where a request asks for too much, or too many wait."""
        most = self.settings.max_replies
        if prompts * n > most:
            raise ApiError(f"{prompts} prompts with n={n} are above the {most} replies of one request", param="n")
        if self.unanswered >= self.settings.max_queue:
            raise ApiError(
                f"{self.unanswered} requests wait for their first token; try again later",
                429,
                type="rate_limit_error",
                code="rate_limit_exceeded",
                headers={"retry-after": "1"},
            )


class Call:
    """One request. What it starts ends with `stack`, whichever way it ends. `adapter`: the one that it asks for.
    `pictures`: of its images and videos by (whether it is a video, its address), which are fetched once however often
    it is looked at."""

    def __init__(self, service: Service):
        self.service = service
        self.id = uuid.uuid4().hex
        self.created, self.began = int(time.time()), time.perf_counter()
        self.stack = contextlib.AsyncExitStack()
        self.adapter: LoRARequest | None = None
        self.pictures: dict[tuple[bool, str], Prepared] = {}

    async def replies(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        priority: int = 0,
        salt: str = "",
        beams: BeamSearchParams | None = None,
    ) -> AsyncIterator[tuple[int, RequestOutput]]:
        """(index of the prompt, its replies so far), as they come. Returns when the first is there, so that what the
        engine refuses can still be answered with a status. `priority` and `salt`: as AsyncLLM's. `beams`: replies are
        the best of a search, which come all at the end.

        Raises: ApiError, ShardlmError, EngineError.
        """
        self.service.admit(len(prompts), params.n)
        waiting = set(range(len(prompts)))
        self.service.unanswered += len(waiting)
        self.stack.callback(lambda: self._forget(waiting))
        options = {"priority": priority, "salt": salt, "lora_request": self.adapter}
        streams = [self._one(i, prompt, params, beams, options, waiting) for i, prompt in enumerate(prompts)]
        outputs = _merged(streams)
        self.stack.push_async_callback(outputs.aclose)
        return _chained(await anext(outputs), outputs)

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """Inside what a prompt needs is still to come, and it is one of those that wait. Raises ApiError where too many
        do."""
        self.service.admit(1, 1)
        self.service.unanswered += 1
        try:
            yield
        finally:
            self.service.unanswered -= 1

    def _forget(self, waiting: set[int]) -> None:
        self.service.unanswered -= len(waiting)

    async def _bounded(self, prompt: Prompt, params: SamplingParams) -> SamplingParams:
        """With what a budget of thoughts must know of the prompt, where a chat has not said so."""
        if params.thinking_token_budget is None or params.thoughts:
            return params
        decode, reasoning = self.service.llm.tokenizer.decode, self.service.reasoning
        if not isinstance(prompt, str) and reasoning:
            check_prompt(prompt, self.service.llm.tokenizer.vocab_size)
            prompt = await asyncio.to_thread(decode, prompt, skip_special=False)
        return bounded(reasoning, params, lambda own: own.of_text(prompt))

    async def _one(
        self,
        i: int,
        prompt: Prompt,
        params: SamplingParams,
        beams: BeamSearchParams | None,
        options: dict[str, Any],
        waiting: set[int],
    ) -> Outputs:
        clock = Clock(self.service.metrics, time.perf_counter(), params.max_tokens)
        reason = "abort"
        params = await self._bounded(prompt, params)
        llm, id = self.service.llm, f"{self.id}-{i}"
        if beams:
            stream = beam_search.replies(llm, prompt, params, beams, id, **options)
        else:
            stream = llm.generate(prompt, params, request_id=id, **options)
        try:
            async with contextlib.aclosing(stream):
                async for output in stream:
                    if i in waiting:
                        waiting.remove(i)
                        self.service.unanswered -= 1
                    clock.saw(output, time.perf_counter())
                    yield i, output
            reason = ""
        except Exception:
            reason = "error"
            raise
        finally:
            if reason:
                clock.broke_off(params.n, reason)


async def _chained(first: tuple[int, RequestOutput], rest: Outputs) -> Outputs:
    yield first
    async for item in rest:
        yield item


async def _merged(streams: Sequence[Outputs]) -> Outputs:
    """Items of all streams as they come; the first error ends them all."""
    if len(streams) == 1:
        async with contextlib.aclosing(streams[0]) as only:
            async for item in only:
                yield item
        return
    queue: asyncio.Queue = asyncio.Queue(len(streams))  # a consumer that is slow holds them back
    tasks = [asyncio.create_task(_pump(stream, queue)) for stream in streams]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(stream: Outputs, queue: asyncio.Queue) -> None:
    """Puts the items of a stream, and at its end None or its error."""
    end: Exception | None = None
    async with contextlib.aclosing(stream):
        try:
            async for item in stream:
                await queue.put(item)
        except Exception as error:
            end = error
    await queue.put(end)
