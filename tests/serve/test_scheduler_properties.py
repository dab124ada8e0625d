"""Any order of arrivals, ends, dispatches and landings: no page leaks or is shared wrongly, nothing starves, and every
reply is the one that the request would get alone."""

import random

import hypothesis.strategies as st
import numpy as np
from fake_device import EOS, VOCAB, FakeDevice, reply
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shardlm.layers.page_layout import PageLayout
from shardlm.serve.ahead import most_ahead
from shardlm.serve.chunk_programs import Cuts
from shardlm.serve.host_pages import HostPages
from shardlm.serve.page_table import PageTable
from shardlm.serve.request import UNBOUNDED, Request, Status
from shardlm.serve.sampling_params import SamplingParams, StructuredOutputs
from shardlm.serve.scheduler import Scheduler, SchedulerConfig
from shardlm.serve.scheduler_config import DRAFTS_AHEAD
from shardlm.serve.snapshots import Snapshots
from shardlm.vision.picture import Picture, Placed

MAX_DELAY = 2  # batches that the host may be ahead of the one that lands
MAX_MODEL_LEN = 20
# Of each group its window and how many tokens a place stands for.
GROUPS = (((0, 1),), ((0, 1),), ((0, 1), (3, 1)), ((5, 1),), ((0, 1), (2, 1), (2, 1), (7, 1)), ((5, 1), (0, 2)))
IMAGE, IMAGES = 5, ("aa", "bbb", "cc", "ddddddd")  # the token that stands for parts of images, and some
PREFIXES = ([], [1, 2, 3, 4, 5, 6, 1, 2, 3], [1, 2, 3, 4, 6])  # shared by many prompts


def rarely(value):
    return st.sampled_from((None,) * 5 + (value,))


@st.composite
def sampling_params(draw):
    max_tokens = draw(st.sampled_from((None, None, 0, 1, 5, 9, 12)))
    return SamplingParams(
        max_tokens=max_tokens,
        seed=draw(st.sampled_from((None, 1, 2))),  # equal prompts go on in different ways
        min_tokens=draw(st.integers(0, min(max_tokens or 0, 4))),
        ignore_eos=draw(st.sampled_from((True, True, False))),
        stop_token_ids=draw(st.sampled_from(((), (), (3,)))),
        prompt_logprobs=draw(rarely(0)),
        truncate_prompt_tokens=draw(rarely(6)),
        structured_outputs=draw(rarely(StructuredOutputs(regex="a"))),
    )


class Serving(RuleBasedStateMachine):
    @initialize(
        page_size=st.integers(1, 4),
        spare_pages=st.integers(0, 6),
        max_rows=st.integers(1, 5),
        budget=st.integers(1, 24),
        decode_steps=st.sampled_from(((1,), (1, 4), (1, 2, 8))),
        caching=st.sampled_from((True, True, True, False)),
        groups=st.sampled_from(GROUPS),
        drafts=st.sampled_from((0, 0, 1, 3)),
        least=st.sampled_from((None, 0, 3)),
        seed=st.integers(0, 100),
        snapshots=st.sampled_from((None, None, 0, 1, 2, 5)),
        tail=st.integers(0, 3),
        bundles=st.sampled_from((None, None, 1, 2, 5)),
        whole=st.booleans(),
        places=st.sampled_from((10, 13, MAX_MODEL_LEN)),  # two images of 7 and 3 at least
    )
    def start(
        self,
        page_size,
        spare_pages,
        max_rows,
        budget,
        decode_steps,
        caching,
        groups,
        drafts,
        least,
        seed,
        snapshots,
        tail,
        bundles,
        whole,
        places,
    ):
        """`snapshots`: None for a model that remembers by pages alone, as those do that have entries."""
        windows, strides = zip(*groups, strict=True)
        snapshots = snapshots if max(strides) == 1 else None
        memories = snapshots is not None
        drafts, caching = 0 if memories else drafts, caching and snapshots != 0
        tokens = max_rows * (1 + drafts) + budget
        cuts = Cuts() if least is None else Cuts(tuple(sorted({min(n, tokens) for n in (2, 4, 8, 16, 32)})), least)
        self.sees = "images" if whole and budget >= max(map(len, IMAGES)) else "before"
        config = SchedulerConfig(max_rows, tokens, MAX_MODEL_LEN, decode_steps, drafts, cuts, memories, places)
        step = config.longest_step
        least = PageLayout(0, windows, (), strides=strides).pages_of(MAX_MODEL_LEN, page_size, step)
        kept = Snapshots(max_rows + 1, snapshots, page_size, page_size, tail) if snapshots and caching else None
        sizes = {"windows": windows, "strides": strides, "longest_step": step, "caching": caching, "snapshots": kept}
        sizes["host"] = HostPages(bundles) if bundles and caching else None
        self.pages = PageTable(1 + least + spare_pages, page_size, **sizes)
        self.scheduler = Scheduler(config, self.pages)
        self.device = FakeDevice(self.pages, max_rows, drafts, memories)
        self.wanted: dict[Request, tuple[list[int], str]] = {}  # of those that nobody ends early
        self.streamed: dict[Request, list[int]] = {}
        self.count, self.rng = 0, random.Random(seed)
        self.taken_back: set[Request] = set()  # whose tokens may be, as forms do it

    @rule(
        prefix=st.sampled_from(PREFIXES),
        rest=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5),
        params=sampling_params(),
        priority=st.sampled_from((0, 0, 0, 0, 1, -1)),
        salt=st.sampled_from(("", "", "", "other")),
        images=st.one_of(st.just([]), st.lists(st.sampled_from(IMAGES), max_size=2)),
    )
    def add(self, prefix, rest, params, priority, salt, images):
        prompt, placed = list(prefix), []
        for image in images if not params.truncate_prompt_tokens else ():
            if len(prompt) + len(image) + len(rest) < MAX_MODEL_LEN:
                takes = len(prompt) + np.arange(len(image), dtype=np.int32)
                picture = Picture({}, (1, len(image)), image.encode())
                placed.append(Placed(picture, len(prompt), len(prompt) + len(image), takes))
                prompt += [IMAGE] * len(image)
        self.ask(prompt + rest, params, priority, salt, placed)

    def ask(self, prompt, params, priority, salt, pictures=()):
        how = {"priority": priority, "salt": salt, "pictures": pictures, "sees": self.sees}
        request = Request(str(self.count), prompt, params, eos_ids=(EOS,), **how)
        self.count += 1
        if self.rng.random() < 0.3:
            self.taken_back.add(request)
            request.revocable = True
        self.scheduler.add(request)
        self.wanted[request] = reply(prompt, params, salt, MAX_MODEL_LEN)
        self.streamed[request] = []

    @rule(data=st.data(), rest=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3), params=sampling_params())
    @precondition(lambda self: self.ended)
    def go_on(self, data, rest, params):
        """Another turn of a conversation: what has ended may be cached to its last page."""
        last = data.draw(st.sampled_from(self.ended[-3:]))
        pictures = () if params.truncate_prompt_tokens else last.pictures
        self.ask([*last.tokens, *rest], params, 0, last.salt, pictures)

    @property
    def ended(self) -> list[Request]:
        return [r for r in self.streamed if r.finished and len(r.tokens) < MAX_MODEL_LEN - 4]

    @property
    def unfinished(self) -> list[Request]:
        return sorted((r for r in self.wanted if not r.finished), key=lambda r: r.turn)

    @rule(data=st.data(), how=st.sampled_from(("abort", "abort", "stop text", "stop text", "new weights")))
    @precondition(lambda self: self.unfinished)
    def interfere(self, data, how):
        if how == "new weights":
            self.scheduler.reset()
            assert self.pages.num_used == self.scheduler.num_running == 0
            return
        request = data.draw(st.sampled_from(self.unfinished))
        wanted, keep = self.wanted.pop(request)[0], len(request.generated)
        if how == "abort":
            assert self.scheduler.abort(request.id) is request and request.finish_reason == "abort"
            assert self.scheduler.abort(request.id) is None
        else:
            keep = data.draw(st.integers(0, keep))
            self.scheduler.finish(request, "stop", stop_reason="text", num_generated=keep)
        assert list(request.generated) == wanted[:keep]

    def schedule(self):
        turns = {request: request.turn for request in self.unfinished}  # those whose prompts are read get others
        longest = self.rng.choice(self.scheduler.config.decode_steps)
        first = self.rng.random() < 0.3
        batch = self.scheduler.schedule(self.rng.choice((None, lambda rows: longest)), prompts_first=first)
        first = first and self.scheduler.config.cuts.lengths and batch is not None and batch.kind == "mixed"
        if first:
            self.check_prompts_go_first(batch)
        elif running := [request for request in turns if request.status is Status.RUNNING]:
            self.check_the_first_moves(min(running, key=turns.get), batch)
        if batch is None:
            assert self.scheduler.num_in_flight or not self.unfinished, "stuck"
            return
        self.check_shape(batch)
        self.device.dispatch(batch, [request.id for request in self.scheduler._running if request.fresh])

    def check_prompts_go_first(self, batch):
        beside = [row.request.priority for row in batch.rows if row.tokens is None]
        assert all(p < min(row.request.priority for row in batch.rows if row.tokens) for p in beside)

    def check_the_first_moves(self, first, batch):
        waits_for_a_token = first.batches_in_flight and (
            most_ahead(first, self.scheduler.config) <= 0 or first.remaining <= 0 or self.scheduler.config.drafts > 0
        )
        rows = batch.rows if batch else ()
        assert waits_for_a_token or any(row.request is first for row in rows), f"{first} got no row"

    def check_shape(self, batch):
        config, rows = self.scheduler.config, batch.rows
        assert len({row.slot for row in rows}) == len(rows) <= config.max_rows
        kinds = [row.tokens is not None for row in rows]
        assert kinds == sorted(kinds), "decodes come first"
        if batch.kind == "mixed":
            beside = 0 if config.cuts.lengths else batch.num_tokens - sum(len(row.tokens) for row in rows if row.tokens)
            assert any(kinds) and batch.steps == 1
            assert sum(len(row.tokens) for row in rows if row.tokens) <= config.max_batch_tokens - beside
        else:
            assert not any(kinds) and batch.steps in config.decode_steps
            assert batch.steps <= batch.width <= batch.steps * (1 + config.drafts)
        for row in rows:
            inside = row.tokens and any(one.start < row.end < one.end for one in row.request.pictures)
            assert self.sees == "before" or not inside, "an image is cut"
            assert row.end > row.start and row.samples <= batch.steps * (1 + config.drafts)
            ahead = row.request.bound - len(row.request.tokens)
            assert row.request.most_in_flight <= max(1, ahead), "a mask needs every token"
            assert not config.drafts or row.tokens or row.request.batches_in_flight <= DRAFTS_AHEAD
            assert config.drafts or row.tokens or row.end == row.start + row.samples, "what is ahead is known"
            assert not row.fresh or row.start == 0 or row.request.params.prompt_logprobs is None

    @rule(steps=st.integers(1, 8), delay=st.integers(0, MAX_DELAY))
    def serve(self, steps, delay):
        for _ in range(steps):
            while self.scheduler.num_in_flight > delay:
                self.land()
            self.schedule()

    def land(self):
        """Where the host may run ahead for now, a random number of tokens counts, and the rest is taken back."""
        batch, tokens, counts = self.device.run()
        back = []
        for index, row in enumerate(batch.rows):
            if row.request in self.taken_back and row.samples and self.rng.random() < 0.4:
                back.append(index)
                counts[index] = self.rng.randint(1, max(1, counts[index]))
        for row in batch.rows:
            if row.request in self.taken_back and not row.request.finished:
                bound = self.rng.choice((0, len(row.request.tokens) + self.rng.randint(0, 9), UNBOUNDED))
                # What is in flight goes on.
                row.request.bound = (
                    bound if bound - len(row.request.tokens) >= row.request.most_in_flight else UNBOUNDED
                )
        for request, index, new in self.scheduler.land(batch, tokens, counts, back):
            assert batch.rows[index].request is request and (new or request.finished)
            self.streamed[request] += new

    @invariant()
    def pages_are_accounted_for(self):
        if not hasattr(self, "pages"):
            return
        self.pages.check_invariants()
        self.scheduler._holdings.encoder_cache.check_invariants()
        for request, (tokens, reason) in self.wanted.items():
            assert list(request.generated) == self.streamed[request] == tokens[: len(request.generated)]
            assert len(request.page_hashes) <= len(request.tokens) // self.pages.page_size, "a hash of unknown tokens"
            if request.finished:
                assert (list(request.generated), request.finish_reason) == (tokens, reason)

    def teardown(self):
        if not hasattr(self, "pages"):
            return
        rounds, most = 0, sum(request.max_len for request in self.unfinished)
        while self.scheduler.num_in_flight:
            self.land()
        while self.unfinished:  # each round runs a token of the first in line or more, so that this ends in time
            self.schedule()
            self.land()
            self.pages_are_accounted_for()
            rounds += 1
            assert rounds <= most, "somebody starves"
        assert self.pages.num_used == self.scheduler.num_waiting == self.scheduler.num_running == 0
        assert not self.scheduler.has_unfinished and self.pages.num_free == self.pages.num_pages - 1


TestServing = Serving.TestCase
TestServing.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
