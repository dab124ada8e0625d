"""Data-parallel replicas in one process: engines of the same weights on devices of their own, behind what looks like
one engine. Owns which replica a request goes to; everything else is engine.py's. One thread calls it.

A replica that ends, as nothing runs on it any more, is taken out: its requests go on elsewhere with the tokens they
have. It returns once what its programs keep can be made anew and a request of its own runs, which is tried after longer
and longer pauses; after an error that CUDA keeps for the life of a process it never does. The last one's end is
everybody's.
"""

import contextlib
import dataclasses
import functools
import logging
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax.traverse_util import flatten_dict, unflatten_dict

from shardlm.serve.adapters import Ready, load
from shardlm.serve.engine import Engine
from shardlm.serve.outputs import EngineError, RequestOutput, SpeculationStats, Stats
from shardlm.serve.page_table import extend_hashes
from shardlm.serve.reply_form import ReplyForm
from shardlm.serve.runner import Runner
from shardlm.serve.sampling_params import SamplingParams
from shardlm.serve.started import Started
from shardlm.vision.picture import Placed

log = logging.getLogger(__name__)

# What a reply under way weighs, in tokens of prompts to be read, when the replica with the least to do is sought: equal
# beginnings of 640 tokens keep requests together until one replica runs ten more replies than another.
REPLY_WEIGHT = 64
RETRY = 1.0, 60.0  # seconds until a replica that was taken out is tried again: at first, doubled each time, at most


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a request is, and what it weighs there."""

    replica: int
    weight: int


@dataclasses.dataclass
class _Out:
    """Of a replica that was taken out: when it is tried again, after which pause, and whether it missed new weights."""

    at: float
    pause: float
    missed: bool = False


class EngineGroup:
    """Engines with pages and schedulers of their own."""

    def __init__(self, engines: Sequence[Engine]):
        self.engines = tuple(engines)
        first = self.engines[0]
        self.scheduler, self.adapters = first.scheduler, first.adapters
        self.tokenizer, self.stop_ids, self.max_model_len = first.tokenizer, first.stop_ids, first.max_model_len
        self.pooling, self.sight = first.pooling, first.sight
        self._places: dict[str, _Place] = {}
        self._weights = [0] * len(self.engines)
        self._out: dict[int, _Out] = {}

    @property
    def _up(self) -> list[int]:
        """The replicas that have not ended."""
        return [number for number, engine in enumerate(self.engines) if engine.ended is None]

    @property
    def runner(self) -> Runner:
        """Of one of them: `update_weights` takes the form of its parameters."""
        return self.engines[(self._up or [0])[0]].runner

    @property
    def has_unfinished(self) -> bool:
        return any(engine.has_unfinished for engine in self.engines)

    # Requests.

    def add(
        self,
        id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        salt: str = "",
        adapter: str = "",
        pictures: Sequence[Placed] = (),
        **options: Any,
    ) -> None:
        """As Engine.add, to the replica that `route` chooses."""
        if id in self._places:
            replica, missing = self._places[id].replica, 0
        else:
            replica, missing = self.route(prompt, params, self.adapters.salted(salt, adapter), pictures)
        options |= {"salt": salt, "adapter": adapter, "pictures": pictures}
        self.engines[replica].add(id, prompt, params, **options)
        self._enter(id, replica, missing + REPLY_WEIGHT * params.n)

    def _enter(self, id: str, replica: int, weight: int) -> None:
        self._places[id] = _Place(replica, weight)
        self._weights[replica] += weight

    def route(
        self, prompt: Sequence[int], params: SamplingParams, salt: str = "", pictures: Sequence[Placed] = ()
    ) -> tuple[int, int]:
        """(the replica that has the least to do with this prompt in it, tokens of the prompt that it lacks)."""
        cut = max(0, len(prompt) - (params.truncate_prompt_tokens or len(prompt)))
        hashes: list[bytes] = []
        if params.prompt_logprobs is None:
            with contextlib.suppress(TypeError, OverflowError):  # a prompt that Engine.add refuses
                own = array("i", prompt[cut:])
                extend_hashes(hashes, own, len(own) - 1, self.scheduler.pages.page_size, salt, pictures)
        found = [engine.scheduler.pages for engine in self.engines]
        missing = [len(prompt) - cut - pages.find(hashes) * pages.page_size for pages in found]
        best = min(self._up or [0], key=lambda i: (missing[i] + self._weights[i], i))
        return best, missing[best]

    def compile_form(self, params: SamplingParams) -> ReplyForm | None:
        """As Engine.compile_form; a form serves any replica."""
        return self.engines[0].compile_form(params)

    def abort(self, id: str) -> RequestOutput | None:
        """As Engine.abort."""
        if id not in self._places:
            return None
        return self.engines[self._leave(id)].abort(id)

    def _leave(self, id: str) -> int:
        place = self._places.pop(id)
        self._weights[place.replica] -= place.weight
        return place.replica

    def update_weights(self, params: Any, draft: Any = None, encoder: Any = None) -> None:
        """As Engine.update_weights, for all replicas, with parameters at the places of the first one's. Where one has
        no room for them, all keep the old ones."""
        engines = [self.engines[number] for number in self._up]
        for engine, new in zip(engines, [_own(engine, params, draft, encoder) for engine in engines], strict=True):
            engine.update_weights(*new)
        for out in self._out.values():
            out.missed = True

    @property
    def holds_pages(self) -> bool:
        """As Engine.holds_pages, of any replica."""
        return any(engine.holds_pages for engine in self.engines)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """As Engine.reset_prefix_cache, of all replicas or of none."""
        if self.holds_pages and not reset_running_requests:
            return False
        for engine in self.engines:
            engine.reset_prefix_cache(reset_running_requests)
        return True

    @property
    def runners(self) -> list[Runner]:
        """Of the replicas that have not ended."""
        return [self.engines[number].runner for number in self._up]

    def load_adapter(self, name: str, path: str, made: Ready) -> None:
        """As Engine.load_adapter, for all replicas."""
        used = set().union(*(engine.used_adapters for engine in self.engines))
        load(self.adapters, name, path, made, self.runners, used)
        for out in self._out.values():
            out.missed = True

    def stats(self) -> Stats:
        """Of all together: sums, and the mean share of pages in use, as the pools are equal."""
        each = tuple(engine.stats() for engine in self.engines)
        plain = [f.name for f in dataclasses.fields(Stats) if f.name not in ("speculation", "replicas")]
        sums = {name: sum(getattr(one, name) for one in each) for name in plain}
        drafts = [one.speculation for one in each if one.speculation]
        speculation = functools.reduce(SpeculationStats.plus, drafts) if drafts else None
        same = {"kv_usage": sums["kv_usage"] / len(each), "page_size": each[0].page_size}
        return Stats(**sums | same, speculation=speculation, replicas=each)

    def renew(self) -> None:
        """As Engine.renew, of all replicas."""
        self._places.clear()
        self._weights = [0] * len(self.engines)
        for engine in self.engines:
            engine.renew()

    # Steps.

    def keep_pace(self) -> None:
        """As Engine.keep_pace."""
        for engine in self.engines:
            engine.keep_pace()

    def step(self) -> list[RequestOutput]:
        """Starts what can run on every replica before it waits for any; returns the requests that batches which have
        ended moved on, of at least one replica, or that failed. Raises EngineError where no replica is left."""
        for number in [number for number, out in self._out.items() if out.at <= time.monotonic()]:
            self._try_again(number)
        for number in self._up:
            self.engines[number].dispatch()
        busy = [number for number in self._up if self.engines[number].waits]
        # None has ended: the first in turn is waited for, and the others have a batch more to run meanwhile.
        ended = [number for number in busy if _ended(self.engines[number].oldest)] or busy[:1]
        moved = self._of(ended, Engine.collect)
        for output in moved:
            if output.finished and output.request_id in self._places:
                self._leave(output.request_id)
        return moved

    def _of(self, replicas: Sequence[int], act: Callable[[Engine], list[RequestOutput]]) -> list[RequestOutput]:
        """What these replicas say; one that ends at it hands its requests over."""
        found = []
        for number in replicas:
            try:
                found += act(self.engines[number])
            except EngineError:
                if not self._up:
                    raise
                log.exception("replica %d of %d is taken out", number, len(self.engines))
                self._hand_over(number)
                self._out[number] = _Out(time.monotonic() + RETRY[0], RETRY[0])
        return found

    def _try_again(self, number: int) -> None:
        engine, out = self.engines[number], self._out[number]
        try:
            if out.missed:
                self.runner.settled()
                other, sees = self.runner, self.runner.image_encoder
                encoder = sees.params if sees else None
                engine.update_weights(*_own(engine, other.params, other.proposer_params, encoder))
            engine.restart()
        except Exception as error:
            out.pause = min(2 * out.pause, RETRY[1])
            out.at = time.monotonic() + out.pause
            reason = f"{type(error).__name__}: {error}"
            log.warning("replica %d stays out, and is tried again in %.0f s: %s", number, out.pause, reason)
            return
        del self._out[number]
        log.warning("replica %d is back", number)

    def _hand_over(self, number: int) -> None:
        for group in self.engines[number].hand_over():
            request = group.replies[0].request
            self._leave(group.output.request_id)
            replica, missing = self.route(request.tokens[: request.prompt_len], request.params, request.salt)
            self.engines[replica].take_over(group)
            self._enter(group.output.request_id, replica, missing + REPLY_WEIGHT * request.params.n)


def _own(engine: Engine, params: Any, draft: Any, encoder: Any) -> tuple[Any, Any, Any]:
    """What its update_weights takes, on its devices."""
    runner = engine.runner
    own = _beside(draft, runner.proposer_params) if draft else draft
    sees = _beside(encoder, runner.image_encoder.params) if encoder else encoder
    return jax.block_until_ready((_placed(params, runner.params), own, sees))


def _beside(new: Any, old: Any) -> Any:
    """The same tree, where the old one is."""
    return jax.tree.map(lambda a, b: jax.device_put(a, b.sharding), new, old)


def _placed(new: Any, old: Any) -> Any:
    """New parameters, some or all, where the old ones are."""
    at = flatten_dict(old)
    return unflatten_dict({path: jax.device_put(a, at[path].sharding) for path, a in flatten_dict(new).items()})


def _ended(started: Started | None) -> bool:
    """Whether a batch has run, or failed, which `collect` finds; None: it could not be started."""
    try:
        return started is None or all(call.made.done() and call.sampled.token.is_ready() for call in started.calls)
    except Exception:
        return True
