"""Models whose layers see a window of positions: pages behind it are given on, and replies stay what the model alone
says, with chunks smaller and larger than the window, drafts, shared beginnings, preemption, and windows that were
evicted."""

import dataclasses
import random
from array import array

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import CONFIG, finished, of_model
from small import init, logits_of, mesh_of

from shardlm.layers.page_layout import PageLayout, layout_of
from shardlm.layers.param import Execution
from shardlm.layers.stack import Segment
from shardlm.mesh import MeshSpec
from shardlm.models.transformer_config import TransformerConfig
from shardlm.rules import Rules
from shardlm.serve.layers import taken_apart
from shardlm.serve.page_table import PageTable, extend_hashes
from shardlm.serve.request import Request
from shardlm.serve.sampling_params import SamplingParams
from shardlm.serve.scheduler import Scheduler, SchedulerConfig
from shardlm.serve.speculation.build import DraftModel
from shardlm.serve.speculation.config import SpeculativeConfig
from shardlm.state import ModelDef

LENGTH = 64
# float32 sums in another order (measured: up to 2e-6).
TOLERANCE = 5e-5


def windowed(*windows: int, **options) -> TransformerConfig:
    """A decoder of layers with these windows."""
    config = CONFIG.transformer()
    [block] = config.segments[0].pattern
    attention = [dataclasses.replace(block.attention, window=window, **options) for window in windows]
    pattern = tuple(dataclasses.replace(block, attention=own) for own in attention)
    return dataclasses.replace(config, segments=(Segment(pattern, 1),))


# Name: the decoder, the tokens of a step, pages, the groups that its layers fall into, and how many tokens it drafts.
MODELS = {
    "gemma": (windowed(8, 8, 0), 32, 44, (0, 8, 8), 0),
    "gemma, drafts": (windowed(8, 8, 0), 32, 44, (0, 8, 8), 3),
    "mistral": (windowed(10, 10), 6, 8, (10,), 0),
    "gpt_oss": (windowed(7, 0, sinks=True), 6, 24, (0, 7), 0),
}


@pytest.mark.parametrize(
    "name", ["gpt_oss", *(pytest.param(n, marks=pytest.mark.wide) for n in ("gemma", "gemma, drafts", "mistral"))]
)
def test_replies_are_the_model_s_and_pages_behind_the_window_are_given_on(name):
    config, tokens, pages, groups, drafts = MODELS[name]
    spec = MeshSpec()
    with jax.set_mesh(mesh_of(spec)):
        model = ModelDef.make(config, Execution(Rules.make("zero3", spec).for_decoding()))
        params = init(model)
        if name == "gpt_oss":
            sinks = lambda path, a: a + 1 if "sinks" in str(path) else a  # noqa: E731
            params = jax.tree_util.tree_map_with_path(sinks, params)
        apart = taken_apart(model, jax.tree.map(jnp.copy, params))
    sizes = {"rows": 2, "tokens": tokens, "length": LENGTH, "pages": pages}
    if drafts:
        sizes |= {"speculative": SpeculativeConfig(drafts, "draft_model"), "draft": DraftModel(*apart)}
    engine = of_model(*apart, mesh_of(spec), **sizes)
    table = engine.scheduler.pages
    assert table.windows == groups

    @jax.jit
    def scores(params, row):
        return jax.reshard(jax.nn.log_softmax(logits_of(model, params, row)), jax.P())

    def check(output):
        """Greedy, and its log-probabilities those of a forward pass without a cache."""
        found = output.outputs[0]
        every = [*output.prompt_token_ids, *found.token_ids]
        row = np.zeros((1, LENGTH), np.int32)
        row[0, : len(every)] = every
        with jax.set_mesh(mesh_of(spec)):
            expected = np.asarray(scores(params, row))[0]
        for place, (token, told) in enumerate(zip(found.token_ids, found.logprobs, strict=True)):
            own = expected[len(output.prompt_token_ids) + place - 1]
            assert abs(told.chosen.logprob - own[token]) < TOLERANCE and own[token] > own.max() - TOLERANCE

    rng = random.Random(0)
    bases = [[rng.randrange(CONFIG.vocab_size) for _ in range(50)] for _ in range(2)]
    done = {}
    for number in range(20):
        shared = rng.choice(bases)[: rng.choice((0, 20, 50))]
        prompt = shared + [rng.randrange(CONFIG.vocab_size) for _ in range(rng.randint(1, 5))]
        params_of = SamplingParams(temperature=0, max_tokens=rng.randint(1, 14), ignore_eos=True, logprobs=0)
        engine.add(f"r{number}", prompt, params_of, priority=rng.choice((0, -1, -2)))
        for _ in range(rng.randrange(4)):
            done |= {output.request_id: output for output in engine.step() if output.finished}
            table.check_invariants()
    done |= finished(engine)
    for output in done.values():
        check(output)
    assert len(done) == 20 and engine.scheduler.preemptions and engine.stats().prefix_hits
    if drafts:  # those of the model itself are right while its second set of pages is
        assert engine.stats().speculation.drafted == sum(engine.stats().speculation.accepted) > 0

    def cached(prompt) -> int:
        """Tokens of a prompt that were found in the cache, once its reply was right."""
        params_of = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=0)
        engine.add("one", prompt, params_of)
        output = finished(engine)["one"]
        check(output)
        return output.num_cached_tokens

    # Pages behind the window stay cached until somebody else needs them, before those that were given back later.
    engine.scheduler.reset()
    prompt, hashes = bases[0][:41], []
    extend_hashes(hashes, array("i", prompt), 20, table.page_size)
    assert (cached(prompt), cached(prompt)) == (0, 40)
    assert table.find(hashes) == (5 if 0 in groups else 0)  # a pool of 7 pages needed them for the prompt's end
    while table.find(hashes):
        cached([rng.randrange(CONFIG.vocab_size) for _ in range(5)])
    assert 0 not in groups or all(digest in table._page_of[0] for digest in hashes)
    assert cached(prompt[:21]) == 0 and cached(prompt[:21]) == 20


def concurrent(layout: PageLayout, *, length: int, page_size: int, chunk: int, steps: int) -> int:
    """How many requests of nearly `length` tokens decode at once before one is turned out or has to wait."""
    table = PageTable(layout.num_pages, page_size, windows=layout.windows, longest_step=chunk)
    scheduler = Scheduler(SchedulerConfig(300, chunk, length, (1, steps)), table)
    prompt, running = length - 400, 0
    for number in range(300):
        tokens = [number, *range(prompt - 1)]  # no shared beginnings
        scheduler.add(Request(str(number), tokens, SamplingParams(max_tokens=400, ignore_eos=True)))
    while not scheduler.preemptions:
        batch = scheduler.schedule()
        scheduler.land(batch, np.zeros((len(batch.rows), steps), int))
        decoding = sum(row.tokens is None for row in batch.rows)
        if batch.kind == "decode":
            return decoding
        running = max(running, decoding)
    return running


def test_windows_leave_room_for_more_requests():
    """As Gemma 3 4B, in which 5 layers of 34 see all and the others an eighth; in the same memory."""
    windows = [0 if layer % 6 == 5 else 256 for layer in range(34)]
    layout = layout_of(windows, 0, 2048, 16, 8)
    assert layout.windows == (0, *[256] * 6) and layout.layers == 5
    memory = 34 * 129 * 8  # of pages of one layer: eight requests to their ends
    options = {"length": 2048, "page_size": 16, "chunk": 512, "steps": 8}
    before = concurrent(PageLayout.whole(34, memory // 34), **options)
    after = concurrent(dataclasses.replace(layout, num_pages=memory // layout.layers), **options)
    assert (before, after) == (9, 31)


@pytest.mark.parametrize(
    ("windows", "length", "groups", "layers"),
    [
        ([0] * 5, 4096, (0,), 5),
        ([64] * 5, 4096, (64,), 5),
        ([64] * 5, 64, (0,), 5),  # shorter than the window: one table, of which nothing is given on
        ([64, 0] * 4, 4096, (0, 64), 4),
        ([64, 64, 64, 0, 64, 64, 64], 4096, (0, *[64] * 6), 1),
        ([64] * 30 + [0], 4096, (0, *[64] * 6), 5),
        ([0, 16, 32] * 2, 4096, (0, 16, 32), 2),
    ],
)
def test_layers_fall_into_groups_of_equal_windows(windows, length, groups, layers):
    layout = layout_of(windows, 9, length, 16, 8)
    assert (layout.windows, layout.layers, layout.num_pages) == (groups, layers, 9)
    assert len(set(layout.places)) == len(windows)
    assert length <= 64 or all(groups[group] == own for own, (group, _) in zip(windows, layout.places, strict=True))


def test_a_draft_model_s_layers_are_where_what_they_see_is_kept():
    """However its windows are: under the page numbers of a model with layers that see all, 64 and 32 positions."""
    layout = layout_of([64, 0, 32] * 2, 9, 4096, 16, 8)
    assert layout.windows == (0, 32, 64)
    beside = layout.beside([0, 0, 48, 32, 80, 16])
    assert (beside.num_pages, beside.windows) == (9, layout.windows)
    assert beside.places == ((0, 0), (0, 1), (2, 0), (1, 0), (0, 2), (1, 1)) and beside.layers == 3
    assert PageLayout.whole(2, 9).beside([0, 16, 0]).places == ((0, 0), (0, 1), (0, 2))
    assert layout_of([64, 64], 9, 4096, 16, 8).beside([32, 0]) is None  # nothing is kept for the second one
