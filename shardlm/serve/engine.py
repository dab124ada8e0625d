"""The engine: requests in, text out. Keeps the scheduler one batch ahead of the devices, turns what they sampled into
text, and ends replies at stop strings and grammars' ends. One thread calls it (async_llm.py for many clients).

A batch may fail (recovery.py). The request that it is due to ends with the error, nobody else; where nothing runs any
more the engine ends.
"""

import collections
import functools
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardlm.errors import ShardlmError
from shardlm.serve.adapter_table import AdapterTable, Room
from shardlm.serve.adapters import Ready, load
from shardlm.serve.batch import ScheduledBatch
from shardlm.serve.outputs import EngineError, RequestOutput, RequestTimes, SpeculationStats, Stats
from shardlm.serve.pace import Pace
from shardlm.serve.pictures import check_pictures, sees_of, turns_of
from shardlm.serve.pooling import Pooling
from shardlm.serve.recovery import Recovery
from shardlm.serve.replies import Group, Reply, allowed_next, collect_embeddings, collect_scores, read, take
from shardlm.serve.reply_form import FREE, FormCompiler, ReplyForm
from shardlm.serve.request import Request, check_prompt, check_room
from shardlm.serve.runner import Runner
from shardlm.serve.sampling_params import SamplingParams
from shardlm.serve.scheduler import Scheduler
from shardlm.serve.started import Started
from shardlm.tokenizer import Tokenizer
from shardlm.vision.picture import Placed
from shardlm.vision.sight import Sight

log = logging.getLogger(__name__)

AHEAD = 2  # batches that are started before the first of them is waited for


class Engine:
    """`add` requests, then `step` until `has_unfinished` is False."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        stop_ids: Sequence[int],
        adapters: AdapterTable | None = None,
    ):
        """`adapters`: those of all replicas."""
        self.adapters = adapters or AdapterTable(Room())
        self.runner, self.scheduler, self.tokenizer, self.stop_ids = runner, scheduler, tokenizer, tuple(stop_ids)
        self.pooling = Pooling(runner.model.config.embed_dim)
        self._vocab = runner.model.config.vocab_size
        self._forms = FormCompiler(tokenizer, self._vocab, self.stop_ids)
        self._groups: dict[str, Group] = {}
        self._replies: dict[str, Reply] = {}
        self._started: collections.deque[Started] = collections.deque()
        self._broken: tuple[Exception, ScheduledBatch | None] | None = None  # could not be started, or scheduled
        self._recovery = Recovery(runner)
        self.pace: Pace | None = None  # where requests come at any time
        self.ended: EngineError | None = None
        self._prompt_tokens = self._generated_tokens = 0
        proposer = runner.proposer
        self._speculation = SpeculationStats(0, 0, (0,) * proposer.drafts) if proposer else None

    @property
    def has_unfinished(self) -> bool:
        return bool(self._groups) or self.waits

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and reply together."""
        return self.scheduler.config.max_model_len

    @property
    def sight(self) -> Sight | None:
        """How the model sees; None where it reads text alone."""
        return self.runner.image_encoder and self.runner.image_encoder.sight

    # Requests.

    def add(
        self,
        id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        text: str | None = None,
        priority: int = 0,
        salt: str = "",
        adapter: str = "",
        embed: bool = False,
        form: ReplyForm | None = None,
        pictures: Sequence[Placed] = (),
    ) -> None:
        """A request for params.n replies or, with `embed` and max_tokens=0, for the embedding of the prompt. `form`:
        that of `params`, where it was compiled before; `adapter`: the name of one that is loaded; `pictures`: what some
        tokens of the prompt stand for. Raises ShardlmError for what cannot be served; nothing is added then. Raises
        EngineError where the engine ended."""
        if self.ended is not None:
            raise self.ended
        if not embed:
            self.pooling.check_writes()
        check_prompt(prompt, self._vocab)
        params.check_vocabulary(self._vocab)
        if id in self._groups:
            raise ShardlmError(f"there is an unfinished request with the id {id!r}; give each its own")
        number, salt = self.adapters.of(adapter).number, self.adapters.salted(salt, adapter)
        if pictures:
            check_room(len(prompt), params.max_tokens, self.max_model_len, len(pictures))
            check_pictures(self.sight, pictures, params)
        options = {"priority": priority, "salt": salt, "adapter": number, "pictures": pictures}
        options |= {"turns": turns_of(self.sight, len(prompt), pictures), "sees": sees_of(self.sight)}
        form = form or self.compile_form(params)
        output = RequestOutput(id, text, list(prompt), None, [], False, metrics=RequestTimes())
        group = Group(output, [], embed)
        for index in range(params.n):
            own = id if params.n == 1 else f"{id}#{index}"
            request = Request(own, prompt, params, self.stop_ids, **options)
            said = form.copy() if form and params.n > 1 else form
            stream = self._forms.stream(form, params) if form else None
            group.replies.append(Reply.make(request, index, said, stream, group, self.tokenizer))
        self._groups[id] = group
        group.output.outputs = [reply.output for reply in group.replies]
        group.output.truncated = group.replies[0].request.truncated
        group.output.prompt_token_ids = list(group.replies[0].request.tokens)
        if params.prompt_logprobs is not None:
            group.output.prompt_logprobs = [None] * len(group.output.prompt_token_ids)
        added = []
        try:
            for reply in group.replies:
                self.scheduler.add(reply.request)
                added.append(reply)
                self._replies[reply.request.id] = reply
        except ShardlmError:
            for reply in added:
                self.scheduler.abort(reply.request.id)
                del self._replies[reply.request.id]
            del self._groups[id]
            raise
        self._prompt_tokens += len(group.output.prompt_token_ids)

    def compile_form(self, params: SamplingParams) -> ReplyForm | None:
        """Of params.structured_outputs and thinking_token_budget; slow for large grammars, and safe on another thread.
        Raises ShardlmError."""
        return self._forms.of(params)

    def abort(self, id: str) -> RequestOutput | None:
        """Ends a request with the reason "abort" and frees its pages at once; None where there is none."""
        group = self._groups.pop(id, None)
        if group is None:
            return None
        for reply in group.replies:
            if reply.output.finish_reason is None:
                self.scheduler.abort(reply.request.id)
                self._close(reply)
        group.output.finished = True
        return group.output

    def update_weights(self, params: Any, draft: Any = None, encoder: Any = None) -> None:
        """New weights of the same shapes, also of the draft model and of the encoder of images where given: whatever
        runs goes on with them from its tokens; nothing cached is kept."""
        self.runner.update_weights(params, draft, encoder)
        self.scheduler.reset()

    @property
    def holds_pages(self) -> bool:
        """Whether requests run, whose pages cannot be forgotten under them."""
        return self.scheduler.num_running > 0

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Nothing that was computed is shared with what comes. Requests that run are computed anew from their tokens
        where `reset_running_requests`; else nothing happens while there are any, and False says so, as vLLM's does."""
        if self.holds_pages and not reset_running_requests:
            return False
        self.scheduler.reset()
        return True

    @property
    def runners(self) -> list[Runner]:
        """Of all replicas."""
        return [self.runner]

    @property
    def used_adapters(self) -> set[int]:
        """Numbers of those that unfinished requests have."""
        return {reply.request.adapter for reply in self._replies.values()}

    def load_adapter(self, name: str, path: str, made: Ready) -> None:
        """An adapter as adapters.ready has it, or another in place of the one of this name, with which its requests
        that run go on. Raises ShardlmError without room."""
        load(self.adapters, name, path, made, self.runners, self.used_adapters)

    def stats(self) -> Stats:
        pages = self.scheduler.pages
        return Stats(
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            kv_usage=pages.num_used / (pages.num_pages - 1),
            prefix_queries=pages.statistics.queried,
            prefix_hits=pages.statistics.found,
            preemptions=self.scheduler.preemptions,
            generation_tokens=self._generated_tokens,
            prompt_tokens=self._prompt_tokens,
            speculation=self._speculation,
            failed_batches=self._recovery.failed,
            pages_saved=pages.host.saved if pages.host is not None else 0,
            pages_loaded=pages.host.loaded if pages.host is not None else 0,
            engines_up=int(self.ended is None),
            num_pages=pages.num_pages - 1,
            page_size=pages.page_size,
        )

    # Steps.

    def keep_pace(self) -> None:
        """From now on requests may come at any time: programs are short (pace.py)."""
        self.pace = Pace(self.runner.config.decode_steps, self.runner.platform)

    def step(self) -> list[RequestOutput]:
        """Starts what can run, waits for the oldest batch, and returns the requests that it moved on, or that ended
        with an error. Raises EngineError where nothing runs any more; the requests are left to be handed over."""
        self.dispatch()
        return self.collect()

    @property
    def waits(self) -> bool:
        """Whether there is something for `collect`."""
        return bool(self._started) or self._broken is not None

    @property
    def oldest(self) -> Started | None:
        """The batch that `collect` waits for; None where there is none, or none that could be started."""
        return self._started[0] if self._started else None

    def dispatch(self) -> None:
        """Starts what can run, as far ahead as AHEAD says, or until a batch cannot be started."""
        self._recovery.let_go(self.scheduler)
        while self._broken is None and len(self._started) < AHEAD:
            batch = None
            try:
                # None: nobody waits for a part of a reply. Decoding waits for company then: a step reads all weights.
                steps = self.pace and self.pace.steps
                batch = self.scheduler.schedule(steps, prompts_first=steps is None)
                if batch is None:
                    break
                self._start(batch)
            except Exception as error:
                self._broken = error, batch

    def _start(self, batch: ScheduledBatch) -> None:
        settings = {row.request.id: self._replies[row.request.id].settings for row in batch.rows}
        replies, slots = [], []
        for row in batch.rows:
            reply = self._replies[row.request.id]
            if row.fresh:
                reply.sent = FREE
                reply.group.output.metrics.scheduled()
            if row.samples and reply.masked and ((rule := reply.rule) is None or rule != reply.sent):
                replies.append(reply)
                slots.append(row.slot)
                reply.sent = rule
        masks = allowed_next(replies, self._vocab, lambda masks, forms: self._forms.fill(masks, forms))
        self._started.append(self.runner.start(batch, settings, list(zip(slots, masks, strict=True))))
        if self.pace:
            self.pace.started(batch.number)

    def collect(self) -> list[RequestOutput]:
        """Waits for the oldest batch, and returns the requests that it moved on, or that failed. Raises as `step`."""
        if not self._started:  # one that could not be started comes after those that were: they may be why
            return self._recover(*self._broken) if self._broken else []
        started = self._started.popleft()
        moved: dict[str, RequestOutput] = {}
        try:
            self._land(started, moved)
            self._recovery.landed()
        except Exception as error:
            # What ended in spite of it has been told of nobody yet; the rest comes again with a later batch.
            ended = {id: output for id, output in moved.items() if output.finished}
            failed = {output.request_id: output for output in self._recover(error, started.batch)}
            return [*(ended | failed).values()]
        return list(moved.values())

    def _land(self, started: Started, moved: dict[str, RequestOutput]) -> None:
        """Waits for a batch, and puts the requests that it moved on into `moved`."""
        sampled = started.sampled()
        if self.pace:
            batch = started.batch
            self.pace.landed(batch.number, len(batch.rows), batch.steps if batch.kind == "decode" else 0)
        collect_scores(started, self._replies, self.tokenizer)
        collect_embeddings(started, self._replies)
        awaited, counted = functools.partial(self.scheduler.awaits, started.batch), self._counts(started)
        counts, back = read(started.batch, sampled.token, counted, self._replies, awaited)
        for request, row, tokens in self.scheduler.land(started.batch, sampled.token, counts, back):
            reply = self._replies.get(request.id)
            if reply is None:  # aborted while the batch was under way
                continue
            moved[reply.group.output.request_id] = reply.group.output
            try:
                request.bound = reply.bound
                self._generated_tokens += take(reply, tokens, sampled, row, self.scheduler, self.tokenizer)
                if request.finished:
                    self._close(reply)
            except Exception as error:  # this request's text, grammar or report: the others go on
                log.exception("request %s failed", reply.group.output.request_id)
                reply.group.output.error = f"{type(error).__name__}: {error}"
                self.abort(reply.group.output.request_id)
        for output in moved.values():
            if not output.finished:
                self._finish(self._groups[output.request_id])

    def _recover(self, error: Exception, batch: ScheduledBatch | None) -> list[RequestOutput]:
        """After `error` at a batch, or before there was one: the request that has ended with it, if it is known. The
        engine is as new for the others. Raises EngineError, and leaves all requests, where that is not to be."""
        log.error("a batch failed", exc_info=error)
        self._started.clear()
        if self.pace:
            self.pace.forget()
        self._broken = None
        try:
            guilty = self._recovery.after(error, batch, self.scheduler)
        except EngineError as ended:
            self.ended = ended
            raise
        if guilty is None:
            return []
        output = self._replies[guilty.id].group.output
        output.error = f"the batch of this request alone failed with {type(error).__name__}: {error}"
        return [self.abort(output.request_id)]

    def renew(self) -> None:
        """After the thread was interrupted in the midst of anything, as by Ctrl-C: no requests, nothing cached."""
        self._groups.clear()
        self._replies.clear()
        self._started.clear()
        self._broken = None
        self._recovery.forget()
        if self.pace:
            self.pace.forget()
        self.scheduler = self.scheduler.renewed()
        self.runner.reset()

    # After the engine ended.

    def hand_over(self) -> list[Group]:
        """All unfinished requests, as far as they have come; they are no longer this engine's."""
        self.scheduler.lose()
        self._recovery.forget()
        self.scheduler.restrict(None)
        groups = list(self._groups.values())
        for group in groups:
            for reply in group.replies:
                if reply.output.finish_reason is None:
                    self.scheduler.forget(reply.request)
                    del self._replies[reply.request.id]
        self._groups.clear()
        return groups

    def restart(self) -> None:
        """After the end, its requests handed over: takes requests again. Raises what still fails."""
        self._recovery.restart()
        self.ended = None

    def take_over(self, group: Group) -> None:
        """Goes on with the request of another engine of the same model and sizes."""
        self._groups[group.output.request_id] = group
        for reply in group.replies:
            if reply.output.finish_reason is None:
                self.scheduler.add(reply.request)
                self._replies[reply.request.id] = reply

    def _counts(self, started: Started) -> np.ndarray | None:
        """How many tokens each row of a batch brought; None: all that it was to bring. Drafts of requests that had
        ended by then are not counted."""
        tally = started.tally() if self._speculation else None
        if tally is None:
            return None
        live = [self.scheduler.awaits(started.batch, row.request) for row in started.batch.rows[: len(tally.made)]]
        steps, drafted, accepted = (a[live].sum(axis=0) for a in (tally.steps, tally.drafted, tally.accepted))
        new = (int(steps), int(drafted), tuple(accepted.tolist()))
        self._speculation = self._speculation.plus(SpeculationStats(*new))
        return np.array([*tally.made, *(row.samples for row in started.batch.rows[len(tally.made) :])])

    def _close(self, reply: Reply) -> None:
        request, output = reply.request, reply.output
        output.finish_reason, output.stop_reason = request.finish_reason, request.stop_reason
        del self._replies[request.id]

    def _finish(self, group: Group) -> None:
        """Marks a request as finished when its replies are."""
        output = group.output
        output.num_cached_tokens = max(reply.request.cached_tokens for reply in group.replies)
        if all(reply.output.finish_reason is not None for reply in group.replies):
            output.finished = True
            del self._groups[output.request_id]
