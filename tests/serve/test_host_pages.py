"""Pages in the host's memory: what is saved, what makes room, what comes back, and that replies stay what they are."""

import os
import random

import jax
import numpy as np
import pytest
from engines import CONFIG, finished, random_engine
from small import logits_of

from shardlm.errors import ShardlmError
from shardlm.host_memory import POOL, host_gib, use_host_memory
from shardlm.mesh import MeshSpec
from shardlm.serve import pool_size
from shardlm.serve.engine_config import EngineConfig
from shardlm.serve.host_pages import BUNDLE, HostPages, Move
from shardlm.serve.page_table import PageTable
from shardlm.serve.sampling_params import SamplingParams

HASHES = [bytes([n]) for n in range(100)]


def keys(*numbers: int) -> list:
    return [(0, HASHES[n]) for n in numbers]


def places(**pages: int) -> tuple[int, ...]:
    """Of a bundle, by p0, p1, ..."""
    return tuple(pages.get(f"p{n}", 0) for n in range(BUNDLE))


def test_what_was_used_longest_ago_makes_room():
    host = HostPages(2)
    host.save([(5, key) for key in keys(0, 1)])
    host.save([(7, key) for key in keys(2)])
    host.load(keys(0)[0], 9)  # used again
    host.save([(8, key) for key in keys(3)])
    assert [key in host for key in keys(0, 1, 2, 3)] == [True, True, False, True] and len(host) == 3
    with host.holding(keys(0, 3, 50)):
        host.save([(1, key) for key in keys(4)])  # no room: nothing is saved
    assert keys(4)[0] not in host and (host.saved, host.loaded) == (4, 1)
    host.check_invariants()
    saved = [Move(True, bundle, places(**pages)) for bundle, pages in ((0, {"p0": 5, "p1": 5}), (1, {"p0": 7}))]
    assert host.taken() == (*saved, Move(False, 0, places(p0=9)), Move(True, 1, places(p0=8)))
    assert host.taken() == ()
    assert host.renewed().saved == 4 and not host.renewed().taken() and len(host.renewed()) == 0
    host.forget()
    host.check_invariants()
    assert keys(0)[0] not in host


def test_pages_of_a_bundle_come_back_together():
    host = HostPages(1)
    host.save([(n + 1, key) for n, key in enumerate(keys(0, 1, 2))])
    host.taken()
    for place, page in ((2, 11), (0, 12), (2, 13)):
        host.load(keys(place)[0], page)
    assert host.taken() == (Move(False, 0, places(p0=12, p2=11)), Move(False, 0, places(p2=13)))


def test_pages_that_are_given_on_are_saved_and_brought_back():
    host = HostPages(3)
    table = PageTable(7, 4, host=host)
    table.allocate("one", 24)
    assert table.host.taken() == ()
    table.register("one", HASHES, 24)
    table.free("one")
    table.allocate("two", 8)  # two pages of six: the ends of the text, and what comes next is saved with them
    assert sorted(host.taken()[0].pages)[-6:] == [1, 2, 3, 4, 5, 6] and host.saved == 6
    table.append("two", 20)
    assert host.taken() == () and table.cached(HASHES) == 6  # all are there already
    table.free("two")
    assert table.missing(24, HASHES[:5]) == 6
    assert table.allocate("three", 24, HASHES[:5]) == 20  # its first page never left
    [move] = host.taken()
    assert not move.saves and sorted(move.pages)[-4:] == sorted(table.pages("three")[1:5]) and host.loaded == 4
    table.check_invariants()
    table.free("three")
    table.forget()
    assert table.cached(HASHES) == 0 and len(host) == 0


def test_conversations_get_the_replies_they_get_alone():
    """More of them than pages hold, in turns, each beginning with the turns before."""
    engine, model, params = random_engine(MeshSpec(tensor=2), pages=20, rows=2, tokens=16, bundles=6)
    mesh = jax.tree.leaves(params)[0].sharding.mesh

    @jax.jit
    def likeliest(params, row):
        return jax.reshard(logits_of(model, params, row).argmax(-1), jax.P())

    rng = random.Random(0)
    talks = [[rng.randrange(CONFIG.vocab_size) for _ in range(20)] for _ in range(4)]
    found = 0
    for turn in range(3):
        for number, talk in enumerate(talks):
            talk += [rng.randrange(CONFIG.vocab_size) for _ in range(3)]
            engine.add(f"{number}", talk, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
        done = finished(engine)
        for number, talk in enumerate(talks):
            output = done[f"{number}"]
            said, row = output.outputs[0].token_ids, np.zeros((1, 64), np.int32)
            row[0, : len(talk) + 6] = [*talk, *said]
            with jax.set_mesh(mesh):
                expected = np.asarray(likeliest(params, row))[0, len(talk) - 1 : len(talk) + 5].tolist()
            assert said == expected, (turn, number)
            found += output.num_cached_tokens if turn else 0
            talk += said
    stats = engine.stats()
    assert stats.pages_saved >= 40 and stats.pages_loaded >= 20
    assert found >= 4 * (20 + 28) * 0.8, "nearly all that was said before"
    engine.reset_prefix_cache()
    engine.add("anew", talks[0][:40], SamplingParams(temperature=0, max_tokens=1))
    assert finished(engine)["anew"].num_cached_tokens == 0


def test_what_cannot_be_is_refused():
    for options, named in (
        ({"kv_offloading_size": 0}, "number of GiB above 0"),
        ({"kv_offloading_size": True}, "number of GiB above 0"),
        ({"kv_offloading_size": 4, "enable_prefix_caching": False}, "enable_prefix_caching on"),
    ):
        with pytest.raises(ShardlmError, match=named):
            EngineConfig(**options)
    assert pool_size.bundles_of([2**20, 2**20], 1) == 32
    with pytest.raises(ShardlmError, match=r"0\.02 GiB .* no bundle of 16 pages, 0\.03125 GiB"):
        pool_size.bundles_of([2**20, 2**20], 0.02)
    with pytest.raises(ShardlmError, match=r"kv_offloading_size=1e\+06 GiB is more than the memory"):
        pool_size.check_host(1e6)


def test_the_pool_of_the_host_is_as_large_as_its_memory_unless_said(monkeypatch):
    monkeypatch.setenv(POOL, "7")
    use_host_memory()
    assert os.environ[POOL] == "7"
    monkeypatch.delenv(POOL)
    use_host_memory()
    assert int(os.environ[POOL]) == int(host_gib()) > 1
