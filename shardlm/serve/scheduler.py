"""Which tokens of which requests run next: continuous batching, chunked prefill, preemption, the end of requests.

Owns the requests while they live, and who gets slots and pages when. Leaves what they hold to `holdings`, pages to
`page_table`, the programs to the runner, text (and so stop texts) to the engine.

The host runs ahead: `schedule` may be called again before `land` has heard what the last batch sampled. A decode
needs no token from the host, since the device keeps the last one of each slot. Whatever ends a request gives its
pages and its slot on at once, also under a batch in flight, because batches run in the order they were scheduled.

The order of service is that of `turns`. Who lacks pages takes them from the last in it, and nobody passes another in
the queue. So the first of those that run has a row in every batch (but while a token it needs is in flight, or while
prompts go first, as many as there are slots) and ends; then the next one is first. Nothing starves but behind an
endless stream of better priority, as asked for: what comes later goes first only for a while. A prompt that little room
is left for in a batch waits for the next one (`cuts`), and others behind it may be read before.

How far a request's decoding goes ahead of what it said, where a grammar or drafts are to be looked at, is ahead.py's.
"""

import bisect
import collections
import itertools
from collections.abc import Callable, Collection

import numpy as np

from shardlm.errors import ShardlmError
from shardlm.serve.ahead import end_of, left, must_land
from shardlm.serve.batch import Landed, Row, ScheduledBatch
from shardlm.serve.blocks import check_blocks, whole_blocks
from shardlm.serve.holdings import Holdings
from shardlm.serve.page_table import PageTable
from shardlm.serve.request import Request, Status, check_room
from shardlm.serve.scheduler_config import SchedulerConfig
from shardlm.serve.turns import Turns, by_turn


class Scheduler:
    """Feeds one runner: `add` requests, then in a loop `schedule`, run the batch, and `land` the oldest one that ran.
    Not for several threads."""

    def __init__(self, config: SchedulerConfig, pages: PageTable):
        """Takes over an empty page table. Raises ShardlmError where the longest request could never run."""
        pages.check_room(config.max_model_len)
        self.config, self.pages = config, pages
        self.preemptions = 0
        self._requests: dict[str, Request] = {}  # unfinished, by id
        self._waiting: list[Request] = []  # both in the order of service
        self._running: list[Request] = []
        self._holdings = Holdings(config, pages)
        self._in_flight: collections.deque[ScheduledBatch] = collections.deque()
        self._only: Collection[Request] | None = None  # that may run; None: all
        self._turns = Turns()
        self._batches = 0  # so many were scheduled

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def least_remaining(self) -> int:
        """Tokens that the reply which ends first may still be scheduled for, of those that run and have any left; 0
        where none has."""
        return min((more for request in self._running if (more := request.remaining) > 0), default=0)

    @property
    def num_in_flight(self) -> int:
        """Batches that have been scheduled and have not landed."""
        return len(self._in_flight)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    # Requests come and go.

    def add(self, request: Request) -> None:
        """Puts a new request into the queue. Raises ShardlmError where it is too long or its id is in use."""
        limit, wanted = self.config.max_model_len, request.params.max_tokens
        check_room(request.prompt_len, wanted, limit)
        if request.id in self._requests:
            raise ShardlmError(f"there is an unfinished request with the id {request.id!r}; give each its own")
        check_blocks(request, self.config, self.pages.windows)
        request.max_len = limit if wanted is None else min(limit, request.prompt_len + wanted)
        request.heard = 0  # another scheduler's numbers mean nothing here
        self._requests[request.id] = request
        self._turns.enter(request, *self._holdings.to_read(request, self._running))
        bisect.insort(self._waiting, request, key=by_turn)

    def abort(self, id: str) -> Request | None:
        """Ends an unfinished request with the reason "abort"; None where there is none, as it may just have ended."""
        request = self._requests.get(id)
        if request:
            self.finish(request, "abort")
        return request

    def finish(
        self, request: Request, reason: str, *, stop_reason: int | str | None = None, num_generated: int | None = None
    ) -> None:
        """Ends a request and frees what it holds. Its reply is cut to `num_generated` tokens where given: that is how
        a stop text, which the engine finds, also overrules an end that came later in the same batch."""
        if not request.finished:
            if request.status is Status.RUNNING:
                self._release(request)
            else:
                self._waiting.remove(request)
            del self._requests[request.id]
            request.status = Status.FINISHED
        request.finish_reason, request.stop_reason = reason, stop_reason
        if num_generated is not None:
            del request.tokens[request.prompt_len + num_generated :]

    def reset(self) -> None:
        """For new weights, or an empty prefix cache: everything that runs is computed anew, and nothing of what was is
        found again. Replies go on from the tokens they have, those of batches in flight included."""
        while self._running:
            self._preempt(self._running[-1])
        self.pages.forget()
        self._holdings.encoder_cache.forget()

    def renewed(self) -> "Scheduler":
        """One without requests in its place, with this one's counts: for after an interruption in the midst of it."""
        new = Scheduler(self.config, self.pages.renewed())
        new.preemptions = self.preemptions
        return new

    def lose(self) -> list[Request]:
        """For what failed on the device: what is in flight will not land, and nothing that was computed is left.
        Returns the requests that ran, which are in the queue again with the tokens they have."""
        self._in_flight.clear()
        for request in self._requests.values():
            request.in_flight = request.most_in_flight = request.batches_in_flight = 0
        ran = list(self._running)
        self.reset()
        return ran

    def restrict(self, only: Collection[Request] | None) -> None:
        """From now on nobody but these runs, and who does goes back to the queue; None: all may again."""
        self._only = only
        if only is not None:
            for request in [request for request in self._running if request not in only]:
                self._preempt(request)

    def upcoming(self) -> list[Request]:
        """The waiting requests that may run next, in the order of service."""
        allowed = self._waiting if self._only is None else (r for r in self._waiting if r in self._only)
        return list(itertools.islice(allowed, self.config.max_rows))

    def forget(self, request: Request) -> None:
        """A waiting request that another scheduler goes on with."""
        self._waiting.remove(request)
        del self._requests[request.id]

    # What runs next.

    def schedule(
        self, pace: Callable[[int], int] | None = None, *, prompts_first: bool = False
    ) -> ScheduledBatch | None:
        """The next batch; None where nothing can run before a batch in flight lands, or nothing is there to run.
        `pace` says of how many rows decode of how many steps their program may be; None: of as many as there are.
        `prompts_first`: nobody decodes beside prompts of its priority or a better one that have programs of their own.
        """
        decodes, rows = self._serve_in_order()
        if prompts_first and rows and self.config.cuts.lengths:
            best = min(row.request.priority for row in rows)
            decodes = [request for request in decodes if request.priority < best]
        kind = "mixed" if rows else "decode"
        longest = 1 if rows or not decodes else pace(len(decodes)) if pace else self.config.decode_steps[-1]
        steps, most = self._affordable(decodes, longest)
        rows = [self._decode_row(request, most) for request in decodes] + rows
        if not rows:
            return None
        for row in rows:
            row.request.computed = row.end
            row.request.in_flight += min(steps, row.samples)
            row.request.most_in_flight += row.samples
            row.request.batches_in_flight += 1
        table = self._holdings.table(rows)
        if any(self.pages.windows):
            for row in rows:
                if row.tokens is not None or not self.config.drafts:  # else where it ends is known when it lands
                    self._holdings.drop(row.request)
        beside = (*self._holdings.copies(), self._holdings.moves(), self._holdings.encoder_cache.taken())
        batch = ScheduledBatch(kind, self._batches, steps, tuple(rows), table, *beside)
        self._batches += 1
        self._in_flight.append(batch)
        return batch

    def _serve_in_order(self) -> tuple[list[Request], list[Row]]:
        """Who decodes, with a page for the next token, and the chunks of prompts that fit beside, with their pages.

        One pass in the order of service. Pages are only ever taken from the last of those that run, so that nobody
        loses them who was served in this pass.
        """
        decodes: list[Request] = []
        chunks: list[Row] = []
        decoding = sum(request.computed >= request.prefill_end and request.remaining > 0 for request in self._running)
        budget, upcoming = self.config.room(decoding), self.upcoming()
        prompts = len(upcoming) + sum(request.computed < request.prefill_end for request in self._running)
        for request in sorted(self._running + upcoming, key=by_turn):
            if request.status is Status.WAITING:
                # Not so where one before it was, or has just been, turned out.
                first = request is next(r for r in self._waiting if self._only is None or r in self._only)
                if not (first and budget > 0 and self._admit(request)):
                    continue
            if request.computed < request.prefill_end:
                unread = self._holdings.until(request) - request.computed
                count = self.config.cuts.chunk(unread, budget, prompts, bool(chunks))
                count = whole_blocks(request, count, budget)
                if count and self._make_pages(request, request.computed + count):
                    chunks.append(self._chunk_row(request, request.computed + count))
                    budget -= count
            elif request.remaining > 0 and not must_land(request, self.config):
                unsure = self.config.drafts > 0 and request.in_flight > 0
                if (self._holdings.grow if unsure else self._make_pages)(request, end_of(request, 1)):
                    decodes.append(request)
        return decodes, chunks

    def _chunk_row(self, request: Request, end: int) -> Row:
        """The next tokens of a prompt, or of what is computed anew after a preemption."""
        start = request.computed
        samples = int(end == request.prefill_end and request.remaining > 0)
        seen = self._holdings.encoder_cache.places(request.pictures, start, end) if request.pictures else None
        row = Row(request, request.slot, start, end, samples, request.tokens[start:end], request.fresh, seen=seen)
        request.fresh = False
        self._turns.read(end - start)
        if end == request.prefill_end:
            self._running.remove(request)
            self._turns.settle(request)
            bisect.insort(self._running, request, key=by_turn)
        self._holdings.read(request, end)  # rows after this one may share the pages already, see ScheduledBatch
        return row

    def _decode_row(self, request: Request, most: int) -> Row:
        samples = min(most, left(request, self.config)) if most > 1 else 1
        end = end_of(request, samples)
        if samples > 1:  # the page of one more is there already
            self._holdings.grow(request, end)
        row = Row(request, request.slot, request.start, end, samples, None, False, request.again)
        request.again = False
        return row

    def _affordable(self, decodes: list[Request], longest: int) -> tuple[int, int]:
        """(steps, the most tokens of a row) of the largest program that no row's pages are lacking for, and that is not
        longer than any reply can be, nor than `longest`. One token a row is always affordable."""
        if longest == 1 and not self.config.drafts:
            return 1, 1
        each = [left(request, self.config) for request in decodes]
        longest = min(longest, max(each, default=0))
        for steps in reversed(self.config.decode_steps):
            if steps > longest:
                continue
            most = steps * (1 + self.config.drafts)
            lacking = sum(
                self.pages.lacking(request.id, end_of(request, min(most, own)))
                for request, own in zip(decodes, each, strict=True)
            )
            if lacking <= self.pages.num_free:
                return steps, most
        return 1, 1

    # Who gets slots and pages.

    def _admit(self, request: Request) -> bool:
        """Gives a waiting request a slot and the pages of all tokens it has, if need be those of worse priorities."""
        if request.batches_in_flight:  # preempted, and what it sampled has not landed: its tokens are not known
            return False
        self._holdings.hash(request, len(request.tokens))
        if not self._make_room(request):
            return False
        request.computed = self._holdings.give(request)
        request.prefill_end = len(request.tokens)
        request.fresh, request.status = True, Status.RUNNING
        if not request.preemptions:
            request.cached_tokens = request.computed
        self._waiting.remove(request)
        bisect.insort(self._running, request, key=by_turn)
        return True

    def _make_room(self, request: Request) -> bool:
        """Finds a slot and pages for a waiting request, by preempting worse priorities unless that would not do."""
        worse = [other for other in self._running if other.priority > request.priority]
        if (not self._holdings.slots_left and not worse) or not self._holdings.encoder_cache.has_room(request):
            return False
        kept = len(self.pages.windows)
        if self._lacking(request) > sum(self.pages.num_held(other.id) + kept for other in worse):
            return False
        while not self._holdings.slots_left or self._lacking(request) > 0:
            if not worse:
                return False  # they shared pages among them, so that it was less than it seemed
            self._preempt(worse.pop())
        return True

    def _lacking(self, request: Request) -> int:
        return self._holdings.lacking(request, len(self._running))

    def _make_pages(self, request: Request, num_tokens: int) -> bool:
        """Makes the pages of a running request hold its next tokens, by preempting from the end of the order where
        pages lack; False where that was its own turn."""
        while not self._holdings.grow(request, num_tokens):
            victim = self._running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        """Back to the queue. Tokens in flight still land; keys and values are computed anew, as far as not cached."""
        self._release(request)
        request.status = Status.WAITING
        request.preemptions += 1
        self.preemptions += 1
        bisect.insort(self._waiting, request, key=by_turn)

    def _release(self, request: Request) -> None:
        """Takes a running request's slot and pages away."""
        self._holdings.release(request)
        self._running.remove(request)
        request.computed = request.prefill_end = 0
        request.again = False

    # What came of it.

    def land(
        self,
        batch: ScheduledBatch,
        tokens: np.ndarray,
        counts: np.ndarray | None = None,
        back: Collection[int] = (),
    ) -> list[Landed]:
        """Takes the sampled tokens of the oldest batch in flight: integers [rows or more, width or more], of which
        each row's first `counts` count, by default all its `samples`. What was sampled after those of the rows `back`
        is dropped, here and in flight. Returns what new tokens came to which requests, and which requests ended.

        Raises ValueError where the batch is not the oldest in flight, or tokens are missing.
        """
        if not self._in_flight or self._in_flight[0] is not batch:
            oldest = self._in_flight[0].number if self._in_flight else "none"
            raise ValueError(f"batch {batch.number} landed, but the oldest in flight is {oldest}; land them in order")
        if tokens.shape[0] < len(batch.rows) or tokens.shape[1] < batch.width:
            size = (len(batch.rows), batch.width)
            raise ValueError(f"batch {batch.number} landed with tokens of shape {tokens.shape}; it needs {size}")
        self._in_flight.popleft()
        landed = []
        for index, (row, sampled) in enumerate(zip(batch.rows, tokens[: len(batch.rows)].tolist(), strict=True)):
            request = row.request
            if not self.awaits(batch, request):
                continue
            request.in_flight -= min(batch.steps, row.samples)
            request.most_in_flight -= row.samples
            request.batches_in_flight -= 1
            count = row.samples if counts is None else int(counts[index])
            new = self._take(request, sampled[:count])
            if index in back and not request.finished:
                self._take_back(request)
            # Else it was preempted and is computed anew.
            if row.tokens is None and self.config.drafts and request.status is Status.RUNNING:
                request.computed = min(len(request.tokens) - 1 + request.most_in_flight, request.max_len - 1)
                self._holdings.drop(request)
            if row.end == request.max_len and not request.finished:  # max_tokens=0: only the prompt was to be read
                self.finish(request, "length")
            if new or request.finished:
                landed.append(Landed(request, index, new))
        return landed

    def awaits(self, batch: ScheduledBatch, request: Request) -> bool:
        """Whether what the batch sampled for a request of it counts: not where that ended, or took it back."""
        return not request.finished and batch.number >= request.heard

    def _take_back(self, request: Request) -> None:
        """A request goes on from the tokens it has. What is in flight may still write after them, before it does."""
        request.heard = self._batches
        request.in_flight = request.most_in_flight = request.batches_in_flight = 0
        if request.status is not Status.RUNNING:
            return
        if self.config.memories:
            self._preempt(request)
        else:
            request.computed, request.again = len(request.tokens) - 1, True

    def _take(self, request: Request, sampled: list[int]) -> list[int]:
        """Adds sampled tokens to the reply, up to its end; returns those that were added."""
        if not request.stop_ids:
            new = sampled[: request.max_len - len(request.tokens)]
            request.tokens.extend(new)
            if new and len(request.tokens) == request.max_len:
                self.finish(request, "length")
            return new
        for count, token in enumerate(sampled, 1):
            request.tokens.append(token)
            if token in request.stop_ids and len(request.tokens) - request.prompt_len > request.params.min_tokens:
                self.finish(request, "stop", stop_reason=None if token in request.eos_ids else token)
            elif len(request.tokens) == request.max_len:
                self.finish(request, "length")
            if request.finished:
                return sampled[:count]
        return sampled
