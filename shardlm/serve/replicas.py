"""Data-parallel replicas in one process: engines of the same weights on devices of their own, behind what looks like
one engine. Owns which replica a request goes to; everything else is engine.py's. One thread calls it."""

import contextlib
import dataclasses
import functools
from array import array
from collections.abc import Sequence
from typing import Any

import jax

from shardlm.serve.engine import Engine
from shardlm.serve.grammar import Grammar
from shardlm.serve.outputs import RequestOutput, SpeculationStats, Stats
from shardlm.serve.page_table import extend_hashes
from shardlm.serve.runner import Started
from shardlm.serve.sampling_params import SamplingParams

# What a reply under way weighs, in tokens of prompts to be read, when the replica with the least to do is sought: equal
# beginnings of 640 tokens keep requests together until one replica runs ten more replies than another.
REPLY_WEIGHT = 64


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a request is, and what it weighs there."""

    replica: int
    weight: int


class EngineGroup:
    """Engines with pages and schedulers of their own. `runner` and `scheduler` are the first one's, from whose
    parameters `update_weights` takes its form."""

    def __init__(self, engines: Sequence[Engine]):
        self.engines = tuple(engines)
        first = self.engines[0]
        self.runner, self.scheduler = first.runner, first.scheduler
        self.tokenizer, self.stop_ids, self.max_model_len = first.tokenizer, first.stop_ids, first.max_model_len
        self._places: dict[str, _Place] = {}
        self._weights = [0] * len(self.engines)

    @property
    def has_unfinished(self) -> bool:
        return any(engine.has_unfinished for engine in self.engines)

    # Requests.

    def add(self, id: str, prompt: Sequence[int], params: SamplingParams, *, salt: str = "", **options: Any) -> None:
        """As Engine.add, to the replica that `route` chooses."""
        replica, missing = self.route(prompt, params, salt) if id not in self._places else (self._places[id].replica, 0)
        self.engines[replica].add(id, prompt, params, salt=salt, **options)
        self._places[id] = _Place(replica, missing + REPLY_WEIGHT * params.n)
        self._weights[replica] += self._places[id].weight

    def route(self, prompt: Sequence[int], params: SamplingParams, salt: str = "") -> tuple[int, int]:
        """(the replica that has the least to do with this prompt in it, tokens of the prompt that it lacks)."""
        cut = max(0, len(prompt) - (params.truncate_prompt_tokens or len(prompt)))
        hashes: list[bytes] = []
        if params.prompt_logprobs is None:
            with contextlib.suppress(TypeError, OverflowError):  # a prompt that Engine.add refuses
                own = array("i", prompt[cut:])
                extend_hashes(hashes, own, len(own) - 1, self.scheduler.pages.page_size, salt)
        found = [engine.scheduler.pages for engine in self.engines]
        missing = [len(prompt) - cut - pages.find(hashes) * pages.page_size for pages in found]
        best = min(range(len(self.engines)), key=lambda i: (missing[i] + self._weights[i], i))
        return best, missing[best]

    def compile_grammar(self, params: SamplingParams) -> Grammar | None:
        """As Engine.compile_grammar; a grammar serves any replica."""
        return self.engines[0].compile_grammar(params)

    def abort(self, id: str) -> RequestOutput | None:
        """As Engine.abort."""
        if id not in self._places:
            return None
        return self.engines[self._leave(id)].abort(id)

    def _leave(self, id: str) -> int:
        place = self._places.pop(id)
        self._weights[place.replica] -= place.weight
        return place.replica

    def update_weights(self, params: Any) -> None:
        """As Engine.update_weights, for all replicas, with parameters at the places of the first one's."""
        for engine in self.engines:
            own = jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), params, engine.runner.params)
            engine.update_weights(own)

    def stats(self) -> Stats:
        """Of all together: sums, and the mean share of pages in use, as the pools are equal."""
        each = tuple(engine.stats() for engine in self.engines)
        plain = [f.name for f in dataclasses.fields(Stats) if f.name not in ("speculation", "replicas")]
        sums = {name: sum(getattr(one, name) for one in each) for name in plain}
        drafts = [one.speculation for one in each if one.speculation]
        speculation = functools.reduce(SpeculationStats.plus, drafts) if drafts else None
        return Stats(**sums | {"kv_usage": sums["kv_usage"] / len(each)}, speculation=speculation, replicas=each)

    # Steps.

    def step(self) -> list[RequestOutput]:
        """Starts what can run on every replica before it waits for any; returns the requests that batches which have
        ended moved on, of at least one replica."""
        for engine in self.engines:
            engine.dispatch()
        busy = [engine for engine in self.engines if engine.oldest is not None]
        # None has ended: the first in turn is waited for, and the others have a batch more to run meanwhile.
        ended = [engine for engine in busy if _ended(engine.oldest)] or busy[:1]
        moved = [output for engine in ended for output in engine.collect()]
        for output in moved:
            if output.finished and output.request_id in self._places:
                self._leave(output.request_id)
        return moved


def _ended(started: Started) -> bool:
    """Whether a batch has run."""
    return all(call.sampled.token.is_ready() for call in started.calls)
