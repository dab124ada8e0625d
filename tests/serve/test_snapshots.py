"""Copies of what linear attention remembers: where they are made, who goes on from them, and that replies stay what
they are without any."""

import dataclasses
import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import CONFIG, TOKENIZER, finished, of_model
from small import init, mesh_of
from small_hybrid import HYBRID
from small_mamba import BESIDE, MAMBA
from small_short_conv import CONV

from shardlm.layers.packed import Packed
from shardlm.layers.param import Execution
from shardlm.mesh import MeshSpec
from shardlm.rules import Rules
from shardlm.serve.layers import taken_apart
from shardlm.serve.page_table import PageTable
from shardlm.serve.sampling_params import SamplingParams
from shardlm.serve.snapshots import Snapshots
from shardlm.state import ModelDef

HASHES = [bytes([n]) for n in range(100)]


def test_a_prompt_is_copied_near_its_end_and_where_others_began_alike():
    kept = Snapshots(8, 4, page_size=4, least=20, tail=3)
    kept.begin("first", 0, 62, 62, HASHES, found=0, known=0)
    assert [kept.until("first", start, 62) for start in (0, 55, 56, 61)] == [56, 56, 62, 62]  # 59 is within a page
    kept.begin("second", 1, 62, 62, HASHES, found=0, known=6)
    assert [kept.until("second", start, 62) for start in (0, 24, 56)] == [24, 56, 62]
    kept.begin("third", 2, 62, 62, HASHES, found=0, known=4)  # too little to save
    assert kept.until("third", 0, 62) == 56
    kept.begin("short", 3, 22, 22, HASHES, found=0, known=0)
    assert kept.until("short", 0, 22) == 22
    kept.begin("goes on", 4, 62, 90, HASHES, found=0, known=0)  # with a part of its reply: behind its prompt too
    assert [kept.until("goes on", start, 90) for start in (0, 56, 84)] == [56, 84, 90]
    kept.end("second")
    assert kept.until("second", 0, 62) == 62 and kept.until("unknown", 0, 9) == 9


def test_what_was_used_longest_ago_makes_room():
    kept = Snapshots(8, 2, page_size=4, least=4, tail=0)
    for owner in range(3):
        kept.begin(owner, owner, 4, 4, [HASHES[owner]], found=0, known=0)
    kept.read(0, 0, 4, HASHES[0:])
    kept.read(1, 1, 3, HASHES[1:])  # not where it is to be copied
    kept.read(1, 1, 4, HASHES[1:])
    assert HASHES[0] not in kept  # before the batch has run
    assert kept.taken() == ((), ((0, 8), (1, 9))) and kept.taken() == ((), ())
    assert HASHES[0] in kept and HASHES[1] in kept
    kept.begin("again", 5, 9, 9, HASHES, found=1, known=1)
    kept.read(2, 2, 4, HASHES[2:])
    assert kept.taken() == (((8, 5),), ((2, 9),)) and HASHES[1] not in kept
    kept.read(2, 2, 4, HASHES[2:])  # there already
    assert kept.taken() == ((), ())
    kept.check_invariants()
    kept.forget()
    kept.check_invariants()
    assert HASHES[0] not in kept


def test_more_copies_in_one_batch_than_there_is_room_for():
    kept = Snapshots(8, 1, page_size=4, least=4, tail=0)
    for owner in range(2):
        kept.begin(owner, owner, 4, 4, [HASHES[owner]], found=0, known=0)
        kept.read(owner, owner, 4, HASHES[owner:])
    assert kept.taken() == ((), ((0, 8),))
    kept.check_invariants()


def test_pages_count_as_found_up_to_a_copy():
    kept = Snapshots(2, 1, page_size=4, least=4, tail=0)
    table = PageTable(40, 4, snapshots=kept)
    table.allocate("one", 40)
    table.register("one", HASHES[:10], 40)
    assert table.cached(HASHES) == 10 and table.find(HASHES) == 0
    kept.begin("one", 0, 28, 28, HASHES, found=0, known=0)
    kept.read("one", 0, 28, HASHES)
    kept.taken()
    assert table.find(HASHES) == 7 and table.find(HASHES[:6]) == 0
    table.free("one")
    assert table.allocate("two", 44, HASHES) == 28
    table.check_invariants()
    table.free("two")
    table.forget()
    assert table.cached(HASHES) == 0 and HASHES[6] not in kept


@functools.partial(jax.jit, static_argnums=0)
def forward(model, params, row):
    """int32 [1, T], the likeliest token after each of a row, without a cache."""
    lm = model.model(params)
    positions = jnp.arange(row.shape[1], dtype=jnp.int32)[None]
    hidden, _, _ = lm(row, positions, Packed(jnp.ones_like(row), model.execution.rules))
    return jax.reshard(lm.logits(hidden).argmax(-1), jax.P())


def likeliest(model, params, tokens) -> list[int]:
    row = np.zeros((1, 64), np.int32)
    row[0, : len(tokens)] = tokens
    return np.asarray(forward(model, params, row))[0, : len(tokens)].tolist()


@pytest.mark.wide
@pytest.mark.parametrize("small", [HYBRID, MAMBA, CONV, BESIDE], ids=lambda small: type(small).__name__)
def test_conversations_get_the_replies_they_get_alone(small):
    """Turns that begin with the turns before, shared beginnings, few pages and fewer copies, requests that are
    aborted, prompts cut into small chunks."""
    shape = dataclasses.replace(small, vocab_size=CONFIG.vocab_size)
    spec, rng = MeshSpec(tensor=2), random.Random(1)
    mesh = mesh_of(spec)
    with jax.set_mesh(mesh):
        model = ModelDef.make(shape.transformer(), Execution(Rules.make("zero3", spec).for_decoding()))
        params, own = init(model), init(model)
        apart = taken_apart(model, own)
    engine = of_model(*apart, mesh, tokens=16, pages=40, snapshots=3)
    beginnings = [TOKENIZER.encode(text) for text in ('{"name": "ab", "age": 12, "tags"', "né日🙂 true " * 2)]
    done, talks = {}, [list(rng.choice(beginnings)) for _ in range(5)]
    for turn in range(3):
        for number, talk in enumerate(talks):
            talk += rng.choices(range(256), k=rng.randint(1, 4))
            engine.add(f"{number}", talk, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
            engine.add(f"gone {number}", [*talk, 5], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
            for _ in range(rng.randrange(4)):
                done |= {output.request_id: output for output in engine.step() if output.finished}
            engine.abort(f"gone {number}")
        done |= finished(engine)
        for number, talk in enumerate(talks):
            said = done.pop(f"{number}").outputs[0].token_ids
            with jax.set_mesh(mesh):
                assert said == likeliest(model, params, [*talk, *said])[len(talk) - 1 : -1], (turn, number)
            talk += said
    hits = engine.stats().prefix_hits
    assert hits > 100 and engine.scheduler.pages.snapshots.count == 3
