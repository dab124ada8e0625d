"""Beam search as vLLM has it, over requests for one token each: the beams of a step share what is cached of their
beginnings, so that a step reads the tokens of their last pages again. Owns which beams go on; who asks is LLM or the
HTTP server. No jax.

In every step each beam is followed by twice as many tokens as there are beams (as transformers had it: some may end),
the best of all go on, and those that end are kept. At the end the best of both are given, by the sum of the
log-probabilities over (tokens, the prompt's too)**length_penalty."""

import asyncio
import contextlib
import dataclasses
import numbers
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from typing import Any

from shardlm.errors import ShardlmError
from shardlm.serve.adapter_table import LoRARequest
from shardlm.serve.other_names import BEAMS, knows_others
from shardlm.serve.outputs import CompletionOutput, Place, RequestOutput
from shardlm.serve.request import check_room
from shardlm.serve.sampling_params import MAX_LOGPROBS, SamplingParams
from shardlm.tokenizer import Tokenizer
from shardlm.vision.sight import Sight


@knows_others("BeamSearchParams", BEAMS)
@dataclasses.dataclass(frozen=True)
class BeamSearchParams:
    """vLLM's names. max_tokens: None to the end of the model's length. ignore_eos: beams end with max_tokens alone.
    temperature: taken and not used: the model's own log-probabilities count, as in vLLM. length_penalty: above 0 it
    favours long replies, 0 is the sum itself. include_stop_str_in_output: the end is part of the text.

    Raises: ShardlmError for a value of a wrong type or out of its range.
    """

    beam_width: int
    max_tokens: int | None
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self):
        most = MAX_LOGPROBS // 2
        if type(self.beam_width) is not int or not 1 <= self.beam_width <= most:
            raise ShardlmError(
                f"beam_width={self.beam_width!r} must be an integer from 1 to {most}: each beam is followed by twice "
                f"as many tokens, of the {MAX_LOGPROBS} likeliest that are told"
            )
        if self.max_tokens is not None and (type(self.max_tokens) is not int or self.max_tokens < 1):
            raise ShardlmError(f"max_tokens={self.max_tokens!r} must be an integer of at least 1, or None")
        for name in ("temperature", "length_penalty"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Real) or not -1e3 <= value <= 1e3:
                raise ShardlmError(f"{name}={value!r} must be a number")
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise ShardlmError(f"{name}={getattr(self, name)!r} must be True or False")


@dataclasses.dataclass
class BeamSearchSequence:
    """One beam. tokens: with the prompt's. logprobs: of each token of the reply, with what else was likely. text: of
    all tokens, once the search is over. finish_reason: "stop" where stop_reason, a token, ended it, else "length"."""

    tokens: list[int]
    logprobs: list[Place]
    lora_request: LoRARequest | None = None
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None

    def score(self, length_penalty: float) -> float:
        length = len(self.tokens) - (self.stop_reason is not None)
        return self.cum_logprob / length**length_penalty

    def followed(self, place: Place, token: int, ends: bool) -> "BeamSearchSequence":
        reason = {"finish_reason": "stop", "stop_reason": token} if ends else {}
        own = Place.make([place[token], *(other for other in place.values() if other.token_id != token)])
        total = self.cum_logprob + place[token].logprob
        return BeamSearchSequence([*self.tokens, token], [*self.logprobs, own], self.lora_request, total, **reason)


@dataclasses.dataclass
class BeamSearchOutput:
    """What became of a prompt: beam_width sequences, the best first."""

    sequences: list[BeamSearchSequence]


class Beams:
    """The search of one prompt. While any are `running`, each of them is asked for one token as `ask` says, and `take`
    has what came."""

    def __init__(
        self,
        prompt: Sequence[int],
        params: BeamSearchParams,
        stop_ids: Collection[int],
        max_model_len: int,
        told: int = 0,
        lora_request: LoRARequest | None = None,
    ):
        """`told`: of how many tokens of a place the log-probability is wanted. Raises PromptTooLong."""
        check_room(len(prompt), params.max_tokens, max_model_len)
        self._params, self._stop_ids = params, frozenset(() if params.ignore_eos else stop_ids)
        self._count, room = 2 * params.beam_width, max_model_len - len(prompt)
        self._left = room if params.max_tokens is None else min(room, params.max_tokens)
        self._ended: list[BeamSearchSequence] = []
        self.running = [BeamSearchSequence(list(prompt), [], lora_request)]
        told = max(self._count, told)
        # With a seed, so that none is drawn for it.
        self.ask = SamplingParams(max_tokens=1, temperature=0, logprobs=told, detokenize=False, ignore_eos=True, seed=0)

    def take(self, places: Sequence[Place]) -> None:
        """What may follow each of those that run."""
        new: list[BeamSearchSequence] = []
        for beam, place in zip(self.running, places, strict=True):
            for one in place.likeliest(self._count):
                ends = one.token_id in self._stop_ids
                (self._ended if ends else new).append(beam.followed(place, one.token_id, ends))
        self._left -= 1
        self.running = self._best(new)
        if not self._left:
            for beam in self.running:
                beam.finish_reason = "length"
            self._ended += self.running
            self.running = []

    def found(self) -> list[BeamSearchSequence]:
        """The best, once none runs."""
        return self._best(self._ended)

    def _best(self, beams: list[BeamSearchSequence]) -> list[BeamSearchSequence]:
        penalty = self._params.length_penalty
        return sorted(beams, key=lambda beam: beam.score(penalty), reverse=True)[: self._params.beam_width]


def check_order(sight: Sight | None) -> None:
    """Raises ShardlmError for a model of whose prompts all tokens see each other: beams are asked for as prompts, and
    what was written would see what was written after it."""
    if sight is not None and sight.prefix:
        raise ShardlmError(
            "beams are not searched with this model: all tokens of a prompt see each other, and those of a beam would "
            "be among them; sample replies, n of them with logprobs"
        )


def search(
    every: Sequence[Beams], ask: Callable[[list[tuple[int, BeamSearchSequence]]], Sequence[RequestOutput]]
) -> None:
    """Runs the searches of several prompts together, a step at a time. `ask` has (which prompt, a beam of it) and gives
    what came of each."""
    while running := [(number, beam) for number, beams in enumerate(every) for beam in beams.running]:
        places = iter([output.outputs[0].logprobs[0] for output in ask(running)])
        for beams in [beams for beams in every if beams.running]:
            beams.take([next(places) for _ in beams.running])


async def replies(
    llm: Any, prompt: str | Sequence[int], params: SamplingParams, beams: BeamSearchParams, id: str, **options: Any
) -> AsyncIterator[RequestOutput]:
    """As AsyncLLM.generate, of a search: it yields once, at the end. `params`: what of the replies is told, and how
    their texts are read."""
    check_order(llm.images and llm.images.sight)
    tokenizer: Tokenizer = llm.tokenizer
    ids = tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else list(prompt)
    kept = ids[-(params.truncate_prompt_tokens or len(ids)) :]
    found = Beams(kept, beams, llm.stop_ids, llm.max_model_len, params.logprobs or 0)
    cached = step = 0
    while found.running:
        asked = [_one(llm, beam, found.ask, f"{id}-{step}-{n}", options) for n, beam in enumerate(found.running)]
        tasks = [asyncio.ensure_future(one) for one in asked]
        try:
            outputs = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        cached, step = outputs[0].num_cached_tokens if not step else cached, step + 1
        found.take([output.outputs[0].logprobs[0] for output in outputs])
    each = [_reply(i, beam, len(kept), params, beams, tokenizer) for i, beam in enumerate(found.found())]
    text = prompt if isinstance(prompt, str) else None
    yield RequestOutput(id, text, kept, None, each, True, num_cached_tokens=cached, truncated=len(ids) - len(kept))


async def _one(llm, beam: BeamSearchSequence, ask: SamplingParams, id: str, options: dict) -> RequestOutput:
    async with contextlib.aclosing(llm.generate(beam.tokens, ask, request_id=id, **options)) as outputs:
        return [output async for output in outputs][-1]


def _reply(
    index: int,
    beam: BeamSearchSequence,
    begins: int,
    params: SamplingParams,
    beams: BeamSearchParams,
    tokenizer: Tokenizer,
) -> CompletionOutput:
    ids = beam.tokens[begins:]
    shown = ids[:-1] if beam.stop_reason is not None and not beams.include_stop_str_in_output else ids
    text = tokenizer.decode(shown, skip_special=params.skip_special_tokens)
    told = None
    if params.logprobs is not None:
        told = [Place.make([place.chosen, *place.likeliest(params.logprobs)]) for place in beam.logprobs]
    return CompletionOutput(index, text, ids, beam.cum_logprob, told, beam.finish_reason, None)
