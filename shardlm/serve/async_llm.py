"""A model for many clients at once: replies stream from one engine on a thread of its own, to any number of coroutines
of one event loop."""

import asyncio
import copy
import functools
import logging
import numbers
import os
import queue
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from shardlm.chat import ChatTemplate
from shardlm.errors import ShardlmError
from shardlm.mesh import MeshSpec
from shardlm.opened import describe
from shardlm.serve import adapters
from shardlm.serve.adapter_table import Adapter, LoRARequest
from shardlm.serve.build import build, facts_of
from shardlm.serve.engine import Engine
from shardlm.serve.facts import ModelFacts
from shardlm.serve.images import Given, check_cut, given_with, of_engine, with_images
from shardlm.serve.live_encoder import new_encoder
from shardlm.serve.live_weights import new_draft, new_weights
from shardlm.serve.long_texts import LongTexts
from shardlm.serve.option_types import check_model
from shardlm.serve.options import config_of
from shardlm.serve.outputs import EngineError, RequestOutput, Stats
from shardlm.serve.pooling import Pooling
from shardlm.serve.prompts import Prompt, check_length, check_salt, read, salt_of
from shardlm.serve.request import check_room
from shardlm.serve.sampling_params import SamplingParams
from shardlm.serve.streams import Command, Stream
from shardlm.tokenizer import Tokenizer
from shardlm.vision.picture import Placed

log = logging.getLogger(__name__)

T = TypeVar("T")

SHORT = 4096  # characters, tokenized in about as long as a thread takes to be asked


class AsyncLLM:
    """`async for output in llm.generate(prompt, params, request_id=...)`: each output has all text so far.

    Attributes:
      model_name, max_model_len, tokenizer, stop_ids, template (None without one), pooling: of what is served.
      images: how it reads some; None: it does not see.
      ready: whether requests are taken.
    """

    @classmethod
    def from_model(
        cls,
        model: str | os.PathLike,
        *,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        data_parallel_size: int = 1,
        mesh: MeshSpec | None = None,
        **options,
    ) -> "AsyncLLM":
        """Loads a Hugging Face folder, a file of llama.cpp, adapters or a run, as LLM does and with its arguments."""
        check_model(model)
        sizes = MeshSpec(tensor=tensor_parallel_size, pipeline=pipeline_parallel_size, data=data_parallel_size)
        config = config_of(sizes, mesh, options)
        template = ChatTemplate.find(describe(model).folder)  # refused before minutes go into weights and programs
        engine, _ = build(model, config)
        limits = options.get("limit_mm_per_prompt")
        return cls(engine, model_name=str(model), template=template, limit_mm_per_prompt=limits)

    def __init__(
        self,
        engine: Engine,
        *,
        model_name: str,
        template: ChatTemplate | None,
        limit_mm_per_prompt: Mapping[str, int] | None = None,
        paced: bool = True,
    ):
        """Takes the engine over and starts its thread; call in the event loop that asks for replies, or before it.
        `paced`: somebody waits for parts of replies; else batches are as LLM's, for the most tokens a second."""
        self._engine = engine
        if paced:
            engine.keep_pace()
        self.model_name, self.template = model_name, template
        self.max_model_len = engine.max_model_len
        self.pooling: Pooling = engine.pooling
        self.tokenizer: Tokenizer = engine.tokenizer
        self.stop_ids = engine.stop_ids
        self.images = of_engine(engine, limit_mm_per_prompt)
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._streams: dict[str, Stream] = {}
        self._long_texts = LongTexts()
        self._dead: BaseException | None = None
        self._closed = False  # by shutdown
        self._idle = threading.Event()
        self._idle.set()
        self._over = False  # nobody takes commands any more
        self._asking = threading.Lock()  # of the three above
        self.ready = True
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        embed: bool = False,
        salt: str = "",
        lora_request: LoRARequest | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yields the replies as they grow, the last time with `finished`. Leaving the loop early aborts the request.

        Only requests of equal `salt`, or cache_salt of the prompt, share what is computed. `lora_request`: the adapter,
        which is loaded where it is not and a path says where it is.

        Raises ShardlmError before the first output for what cannot be served, and EngineError where the engine died.
        """
        self.check_health()
        params = sampling_params
        _check("request_id", request_id, str, "a text")
        _check("sampling_params", params, SamplingParams, "SamplingParams")
        _check("priority", priority, numbers.Integral, "an integer")
        _check("salt", salt, str, "a text")
        salt = check_salt(salt) or salt_of(prompt)
        tokens, text = await self._read(prompt, params.truncate_prompt_tokens is not None)
        tokens, pictures = await self._see(tokens, given_with(prompt), params)
        if params.truncate_prompt_tokens is None:  # the engine's thread would look at each token first
            check_room(len(tokens), params.max_tokens, self.max_model_len)
        form = None
        # A large grammar takes a second: not on the engine's thread.
        if params.structured_outputs or params.thinking_token_budget is not None:
            form = await asyncio.to_thread(self._engine.compile_form, params)
        stream = Stream(asyncio.get_running_loop())
        adapter = await self._adapter_of(lora_request)
        options = {"text": text, "priority": priority, "embed": embed, "form": form, "salt": salt, "adapter": adapter}
        options["pictures"] = pictures
        self._do(lambda: self._add(request_id, tokens, params, options, stream), stream)
        finished = False
        try:
            while not finished:
                output = await stream.next()
                finished = output.finished
                yield output
        finally:
            if not finished:
                self._do(lambda: self._leave(request_id, stream))

    async def embed(self, token_ids: Sequence[int], lora_request: LoRARequest | None = None) -> list[float]:
        """A vector of length 1: what the model makes of the last token. Raises as `generate` does."""
        return self.pooling.vector(await self.pool(token_ids, lora_request))

    async def pool(
        self, token_ids: Prompt, lora_request: LoRARequest | None = None, *, priority: int = 0, salt: str = ""
    ) -> np.ndarray:
        """float32 [D]: what the model makes of a prompt's last token, of whatever length. Raises as `generate` does."""
        name, params = f"embed-{uuid.uuid4().hex}", SamplingParams(max_tokens=0)
        options = {"lora_request": lora_request, "priority": priority, "salt": salt}
        outputs = self.generate(token_ids, params, request_id=name, embed=True, **options)
        return [one async for one in outputs][-1].hidden

    async def abort(self, request_id: str) -> None:
        """Ends a request; its stream ends with what there is. Raises ShardlmError for a name that cannot be one."""
        _check("request_id", request_id, str, "a text")
        self._do(lambda: self._abort(request_id))

    async def update_weights(self, weights: Any, draft: Any = None) -> int:
        """New weights, of the draft model too where given, as `LLM.update_weights` takes them, between two batches:
        what runs goes on with them from the tokens it has. They are read beside the engine's thread. Returns how many
        replies go on.

        Raises: ShardlmError for what does not fit, EngineError where the engine died.
        """
        self.check_health()
        runner = self._engine.runner
        drafts = await asyncio.to_thread(new_draft, draft, runner)
        params = await asyncio.to_thread(new_weights, weights, runner)
        encoder = await asyncio.to_thread(new_encoder, weights, runner)

        def swap() -> int:
            self._engine.update_weights(params, drafts, encoder)
            now = self._engine.stats()
            return now.num_running + now.num_waiting  # which all wait, to be computed anew

        return await self._run_there(swap)

    @property
    def max_num_seqs(self) -> int:
        """Replies that run at once, on all replicas that have not ended."""
        return self._engine.scheduler.config.max_rows * len(self._engine.runners)

    @functools.cached_property
    def facts(self) -> ModelFacts:
        return facts_of(self._engine)

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Between two batches, as Engine.reset_prefix_cache. Raises EngineError where the engine died."""
        return await self._run_there(lambda: self._engine.reset_prefix_cache(reset_running_requests))

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """Those that are loaded, in the order in which they came."""
        return self._engine.adapters.loaded

    async def load_adapter(self, request: LoRARequest) -> None:
        """An adapter from its path, in place of the one of its name where there is one. It is read and brought to the
        devices beside the engine's thread. Raises ShardlmError for what does not fit or has no room, EngineError where
        the engine died."""
        self.check_health()
        engine, path = self._engine, request.lora_path
        made = await asyncio.to_thread(adapters.ready, path, engine)
        await self._run_there(lambda: engine.load_adapter(request.lora_name, path, made))

    async def unload_adapter(self, name: str) -> None:
        """Requests that run go on with it. Raises ShardlmError for one that is not loaded, EngineError as above."""
        await self._run_there(lambda: self._engine.adapters.leave(name))

    async def _adapter_of(self, request: LoRARequest | None) -> str:
        """Its name, once it is loaded."""
        if request is None:
            return ""
        here = next((one.path for one in self.adapters if one.name == request.lora_name), None)
        if request.lora_path and request.lora_path != here:
            await self.load_adapter(request)
        return request.lora_name

    async def _run_there(self, command: Callable[[], T]) -> T:
        """What it gives on the engine's thread. Raises ShardlmError as it does, and EngineError where it breaks or the
        engine died."""
        self.check_health()
        done, found = Stream(asyncio.get_running_loop()), []

        def run() -> None:
            try:
                found.append(command())
            except Exception as error:
                done.put(error if isinstance(error, ShardlmError) else EngineError(f"{type(error).__name__}: {error}"))
                return
            done.put(None)

        self._do(run, done)
        await done.next()
        return found[0]

    def check_health(self) -> None:
        """Raises EngineError where the engine died or was shut down."""
        if self._dead is not None or self._closed:
            raise self._end() from self._dead

    def stats(self) -> Stats:
        """Read beside the engine's thread: each number is right, and they may be a step apart."""
        return self._engine.stats()

    async def drain(self) -> None:
        """Returns when all requests have ended."""
        while self._streams or not self._idle.is_set():
            await asyncio.sleep(0.02)

    def shutdown(self) -> None:
        """Ends the thread; requests that run end with an error."""
        self.ready, self._closed = False, True
        self._commands.put(None)
        self._thread.join()

    async def _read(self, prompt: Prompt, truncates: bool) -> tuple[Sequence[int], str | None]:
        """A long text takes a while: the event loop stays free for the streams."""
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        if isinstance(text, str) and len(text) > SHORT:
            await asyncio.to_thread(check_length, text, self.tokenizer, self.max_model_len, truncates)
            return await self._long_texts.run(len(text) * truncates, read, prompt, self.tokenizer)
        return read(prompt, self.tokenizer)

    async def _see(
        self, tokens: Sequence[int], given: Given, params: SamplingParams
    ) -> tuple[Sequence[int], Sequence[Placed]]:
        """With the images of a prompt, which are prepared beside the event loop."""
        if not given.media:
            return with_images(self.images, tokens, given, self.max_model_len)
        check_cut(params)
        read = functools.partial(with_images, self.images, tokens, given, self.max_model_len)
        threads = self.images.threads if self.images else None
        return await asyncio.get_running_loop().run_in_executor(threads, read)

    def _do(self, command: Callable[[], None], stream: Stream | None = None) -> None:
        """Has the engine's thread run it. `stream` hears of it where that ends before, or has ended."""
        with self._asking:
            if not self._over:
                self._idle.clear()
                self._commands.put(Command(command, stream))
                return
        if stream is not None:
            stream.put(self._end())

    def _end(self) -> EngineError:
        return EngineError(f"the engine stopped: {self._dead or 'it was shut down'}")

    # On the engine's thread.

    def _run(self) -> None:
        try:
            while self._take_commands():
                for output in self._engine.step():
                    self._send(output)
        except BaseException as error:
            log.exception("the engine stopped")
            self._dead, self.ready = error, False
        with self._asking:
            self._over = True
        for stream in [*self._streams.values(), *self._unheard()]:
            stream.put(self._end())
        self._streams.clear()
        self._idle.set()

    def _unheard(self) -> list[Stream]:
        """Who waits for a command that nobody will run."""
        found = []
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None and command.stream is not None:
                found.append(command.stream)
        return found

    def _take_commands(self) -> bool:
        """Runs what was asked for, waiting where there is nothing else to do; False at the end."""
        while True:
            busy = self._engine.has_unfinished
            with self._asking:
                if not busy and self._commands.empty():
                    self._idle.set()
            try:
                command = self._commands.get(block=not busy)
            except queue.Empty:
                return True
            if command is None:
                return False
            command.run()

    def _add(self, id: str, tokens, params: SamplingParams, options: dict[str, Any], stream: Stream) -> None:
        try:
            self._engine.add(id, tokens, params, **options)
        except Exception as error:  # this request's own, the others go on
            stream.put(error if isinstance(error, ShardlmError) else EngineError(f"{type(error).__name__}: {error}"))
            return
        self._streams[id] = stream

    def _leave(self, id: str, stream: Stream) -> None:
        """Its client has gone; where another client's request has the name, that one goes on."""
        if self._streams.get(id) is stream:
            self._abort(id)

    def _abort(self, id: str) -> None:
        output = self._engine.abort(id)
        if output is not None:
            self._send(output)

    def _send(self, output: RequestOutput) -> None:
        stream = self._streams.pop(output.request_id, None) if output.finished else self._streams.get(output.request_id)
        if stream is None:
            return
        if not stream.put(EngineError(output.error) if output.error else _copied(output)) and not output.finished:
            self._abort(output.request_id)


def _check(name: str, value: Any, kind: type, what: str) -> None:
    """Raises ShardlmError for a value of another kind: on the engine's thread it could end the engine, for all."""
    if not isinstance(value, kind):
        raise ShardlmError(f"{name} is a {type(value).__name__}; give {what}")


def _copied(output: RequestOutput) -> RequestOutput:
    """As it is now: the engine goes on writing to its own."""
    own = copy.copy(output)
    own.outputs = [copy.copy(one) for one in output.outputs]
    for one in own.outputs:
        one.token_ids = list(one.token_ids)
        one.logprobs = None if one.logprobs is None else list(one.logprobs)
    return own
