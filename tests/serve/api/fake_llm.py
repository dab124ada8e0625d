"""An AsyncLLM without a model. It replies with the text that a test wrote for it, token by token, under the rules that
a real one keeps: stop strings, lengths, grammars, errors before the first output, an end when nobody listens."""

import asyncio
import dataclasses
import functools
import pathlib

import numpy as np

from shardlm.chat import ChatTemplate
from shardlm.errors import ShardlmError
from shardlm.serve.detokenizer import Detokenizer
from shardlm.serve.facts import ModelFacts
from shardlm.serve.images import Images, given_with, with_images
from shardlm.serve.outputs import (
    CompletionOutput,
    EngineError,
    Place,
    RequestOutput,
    RequestTimes,
    Stats,
    TokenLogprob,
)
from shardlm.serve.pooling import Pooling
from shardlm.serve.reply_form import FormCompiler
from shardlm.serve.request import PromptTooLong, check_prompt
from shardlm.tokenizer import train_bpe

TEMPLATES = pathlib.Path(__file__).parents[2] / "chat_templates"


@functools.cache
def tokenizer():
    return train_bpe(["the quick brown fox jumps over the lazy dog, é日🙂 " * 8] * 4, 300)


@dataclasses.dataclass
class FakeLLM:
    """reply: what it writes, or a function of the prompt's text. delay: seconds before each token, which a test may end
    by setting it to less. chunk: tokens in an output. fail_at: the engine dies before this token."""

    reply: object = "the quick brown fox"
    delay: float = 0
    chunk: int = 1
    fail_at: int | None = None
    model_name: str = "fake"
    adapters: tuple = ()
    max_model_len: int = 4096
    max_num_seqs: int = 4
    ready: bool = True
    template_name: str = "qwen25"
    facts: ModelFacts = ModelFacts("qwen2", 494_032_768, 988_065_536, "BF16", "safetensors", True, 896, 24, 151_936)
    pooling: Pooling = Pooling(4)
    images: Images | None = None

    def __post_init__(self):
        self.tokenizer = tokenizer()
        source = (TEMPLATES / f"{self.template_name}.jinja").read_text() if self.template_name else ""
        self.template = ChatTemplate(source) if source else None
        self.seen = []  # (prompt as text, params, priority) of each request
        self.salts, self.adapted = [], []
        self.pictures = []  # Placed, of each request
        self.pooled = []  # (text, priority, salt) of each prompt that is read for its own sake
        self.running = set()
        self.aborted = []
        self.died = ""
        self._counts = [0, 0]
        self._end = self.tokenizer.end_of_document_id
        self.stop_ids = (self._end,)
        self._forms = FormCompiler(self.tokenizer, self.tokenizer.vocab_size, [self._end])

    async def generate(self, prompt, params, *, request_id, priority=0, salt="", lora_request=None):
        given = given_with(prompt)
        prompt = prompt["prompt_token_ids"] if given.media else prompt
        ids = self.tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else list(prompt)
        ids, pictures = with_images(self.images, ids, given, self.max_model_len)
        self.pictures.append(pictures)
        kept = ids[-(params.truncate_prompt_tokens or len(ids)) :]
        self._check(kept, params)
        text = self.tokenizer.decode(kept, skip_special=False)
        self.seen.append((text, params, priority))
        self.salts.append(salt)
        self.adapted.append(lora_request)
        output = RequestOutput(request_id, prompt if isinstance(prompt, str) else None, kept, None, [], False)
        output.truncated, output.num_cached_tokens, output.metrics = len(ids) - len(kept), 3, RequestTimes()
        output.metrics.scheduled()
        output.prompt_logprobs = self._prompt_logprobs(kept, params.prompt_logprobs)
        self._counts[0] += len(kept)
        self.running.add(request_id)
        try:
            async for outputs in self._replies(text, params, len(kept)):
                output.metrics.wrote(1)
                yield dataclasses.replace(
                    output, outputs=outputs, finished=all(reply.finish_reason for reply in outputs)
                )
        except GeneratorExit:
            self.aborted.append(request_id)
            raise
        except asyncio.CancelledError:
            self.aborted.append(request_id)
            raise
        finally:
            self.running.discard(request_id)

    async def _replies(self, text, params, used):
        written = self.reply(text) if callable(self.reply) else self.reply
        every = [_Reply(self, i, written, params, self.max_model_len - used) for i in range(params.n)]
        count = 0
        while any(not one.output.finish_reason for one in every):
            await self._pause()
            count += self.chunk
            if self.fail_at is not None and count > self.fail_at:
                self.died = "the device is lost"
                raise EngineError(self.died)
            for one in every:
                self._counts[1] += one.advance(self.chunk)
            yield [dataclasses.replace(one.output) for one in every]

    async def _pause(self):
        now = asyncio.get_running_loop().time
        begun = now()
        while (left := begun + self.delay - now()) > 0:
            await asyncio.sleep(min(left, 0.02))
        await asyncio.sleep(0)

    def _check(self, ids, params):
        if not ids:
            raise ShardlmError("the prompt has no tokens; give at least one")
        check_prompt(ids, self.tokenizer.vocab_size)
        params.check_vocabulary(self.tokenizer.vocab_size)
        if len(ids) > self.max_model_len:
            raise PromptTooLong(
                f"the prompt has {len(ids)} tokens, above the model's {self.max_model_len}; shorten it",
                len(ids),
                self.max_model_len,
            )
        if (wish := params.structured_outputs) is not None:
            return self._forms.wanted(wish)
        return None

    def _prompt_logprobs(self, ids, top):
        return top if top is None else [None, *(self.places(t, top, i) for i, t in enumerate(ids[1:], 1))]

    def places(self, token, top, place):
        """The token stands at rank 2 of every odd place, at rank 1 else."""
        others = [TokenLogprob(t, -1.0 - t / 1000, None, self._text(t)) for t in range(60, 60 + top)]
        rank = 1 + place % 2
        own = TokenLogprob(token, -0.5 * rank**3, rank, self._text(token))
        return Place.make([own, *(other for other in others if other.token_id != token)])

    def _text(self, token):
        return self.tokenizer.decode([token], skip_special=False)

    async def pool(self, token_ids, lora_request=None, *, priority=0, salt=""):
        await asyncio.sleep(0)
        if (given := given_with(token_ids)).media:
            token_ids, pictures = with_images(self.images, token_ids["prompt_token_ids"], given, self.max_model_len)
            self.pictures.append(pictures)
        self.pooled.append((self.tokenizer.decode(token_ids, skip_special=False), priority, salt))
        return np.array([3.0 * len(token_ids), 0.0, -4.0 * len(token_ids), 0.0], np.float32)

    async def update_weights(self, weights, draft=None):
        raise ShardlmError(f"there is no folder {weights}")

    async def reset_prefix_cache(self, reset_running_requests=False):
        self.check_health()
        return reset_running_requests or not self.running

    async def load_adapter(self, request):
        raise ShardlmError(f"there is no folder {request.lora_path}")

    async def abort(self, request_id):
        self.running.discard(request_id)

    def check_health(self):
        if self.died:
            raise EngineError(self.died)

    def stats(self):
        counted = (len(self.running), 0, len(self.running) / 8, 40, 10, 0, self._counts[1], self._counts[0])
        return Stats(*counted, num_pages=64, page_size=16)

    def shutdown(self):
        pass

    async def drain(self):
        while self.running:
            await asyncio.sleep(0.01)


class _Reply:
    """One reply; the text is held to the grammar as a sampler's mask would hold it."""

    def __init__(self, llm, index, text, params, space):
        self._llm, self._params = llm, params
        self._ids = llm.tokenizer.encode(text, parse_special=False)
        if form := llm._check([0], params):
            read = 0
            while read < len(self._ids):
                read += form.read(self._ids[read:], map(llm._text, self._ids[read:]))
            whole = form.grammar.may_stop if form.grammar else params.structured_outputs.instead
            assert whole, f"{text!r} is no whole text of the form"
        self._most = min(space, space if params.max_tokens is None else params.max_tokens)
        self._detokenizer = Detokenizer(
            llm.tokenizer,
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )
        scores = None if params.logprobs is None else []
        self.output = CompletionOutput(index, "", [], None, scores)

    def advance(self, count):
        """Writes up to `count` tokens; how many it did."""
        output, before = self.output, len(self.output.token_ids)
        output.token_ids = list(output.token_ids)
        for _ in range(count):
            if output.finish_reason is None:
                self._one(output)
        return len(output.token_ids) - before

    def _one(self, output):
        at = len(output.token_ids)
        if at >= min(self._most, len(self._ids)):
            output.text += self._detokenizer.finish()
            output.finish_reason = "length" if at >= self._most else "stop"
            return
        token = self._ids[at]
        output.token_ids.append(token)
        output.text += self._detokenizer.push([token])
        if output.logprobs is not None:
            output.logprobs = [*output.logprobs, self._llm.places(token, self._params.logprobs, at)]
        if self._detokenizer.stopped is not None:
            output.finish_reason, output.stop_reason = "stop", self._detokenizer.stopped
