"""Pages in the host's memory: what is saved, what makes room, what comes back, and that replies stay what they are."""

import os
import random
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import CONFIG, finished, random_engine
from small import logits_of

from shardlm import host_memory
from shardlm.errors import ShardlmError
from shardlm.host_memory import POOL, host_gib, use_host_memory, whose_memory
from shardlm.layers.page_layout import PageLayout
from shardlm.mesh import MeshSpec
from shardlm.serve import host_copies, pool_size
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


@pytest.mark.parametrize(
    ("hosts", "gib", "most"), [((5, 5, 8, 8), (100, 100, 50, 50), 150), ((5, 5, 5, 8), (120, 120, 120, 80), 200)]
)
def test_the_memory_of_a_host_counts_once_however_many_processes_are_on_it(monkeypatch, hosts, gib, most):
    said = [list(hosts), [each * 2**30 for each in gib]] * 2
    monkeypatch.setattr(pool_size, "of_all", lambda own: said.pop(0))
    pool_size.check_host(most)
    with pytest.raises(ShardlmError, match=rf"more than the memory of 2 hosts, {most}\.0 GiB"):
        pool_size.check_host(most + 1)


def test_processes_know_whether_they_share_memory(monkeypatch, tmp_path):
    code = "from shardlm.host_memory import whose_memory; print(whose_memory())"
    assert int(subprocess.check_output([sys.executable, "-c", code])) == whose_memory() < 2**63
    found = {whose_memory()}
    for container in ("one", "other"):  # each with a limit of its own
        (tmp_path / container).write_text(f"{2**29}\n")
        monkeypatch.setattr(host_memory, "LIMITS", (tmp_path / container, tmp_path / "none"))
        found |= {whose_memory(), whose_memory()}
    assert len(found) == 3


def test_the_room_is_taken_before_requests_come():
    engine, *_ = random_engine(MeshSpec(tensor=2), pages=20, rows=2, tokens=16, bundles=3)
    [bundles] = engine.runner._bundles
    room = bundles.nbytes
    assert room == 3 * BUNDLE * sum(a.nbytes for a in engine.runner._state.pages.values()) // 20
    for prompt in ([1] * 40, [2] * 40, [3] * 40):
        engine.add("one", prompt, SamplingParams(max_tokens=1))
        finished(engine)
    assert engine.stats().pages_saved and bundles.nbytes == room
    runner = engine.runner

    def lacking(*args):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of host memory")

    runner._programs = {("save", 0): lacking}
    with pytest.raises(ShardlmError, match=f"48 pages do not fit .*Out of host memory.*kv_offloading_size.*{POOL}"):
        runner.allocate()


@pytest.mark.parametrize("abstract", [False, True])
def test_pages_in_pinned_memory_come_back(monkeypatch, abstract):
    """As on GPUs. `abstract`: as for devices that are compiled for, or of which the first is another process's."""
    mesh = jax.make_mesh((4,), ("tensor",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        pool = jax.device_put(
            np.arange(2 * 20 * 4 * 8 * 2, dtype=np.float32).reshape(40, 4, 8, 2), jax.P(None, None, "tensor")
        )
        state = {"k": pool, "v": pool + 1}
    if abstract:
        monkeypatch.setattr(host_copies, "_has_memories", lambda mesh: False)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state)
    work = host_copies.PageCopies(20, None, host=True).shapes(shapes, mesh)
    with jax.set_mesh(mesh):
        programs = {
            (name, 0): jax.jit(run, donate_argnums=1).lower(*how).compile() for name, (run, how) in work.items()
        }
    expected, bundles = jax.tree.map(np.asarray, state), host_copies.Bundles()
    state = bundles.moved(programs, 0, state, [Move(True, 5, tuple(range(1, 1 + BUNDLE)))])
    assert {a.sharding.memory_kind for a in jax.tree.leaves(bundles._held)} == {"pinned_host"}
    state = bundles.moved(programs, 0, jax.tree.map(jnp.zeros_like, state), [Move(False, 5, places(p0=7, p3=9))])
    for name, pool in state.items():
        own, found = (a.reshape(2, 20, -1) for a in (expected[name], np.asarray(pool)))
        np.testing.assert_array_equal(found[:, [7, 9]], own[:, [1, 4]])
        assert (found != 0).sum() == (found[:, [7, 9]] != 0).sum()


def test_the_pool_of_the_host_has_what_is_asked_for_unless_said(monkeypatch, tmp_path):
    def most(*gib: float) -> int:
        monkeypatch.delenv(POOL)
        use_host_memory(*gib)
        return int(os.environ[POOL])

    monkeypatch.setattr(host_memory, "LIMITS", (tmp_path / "none", tmp_path / "memory.max"))
    monkeypatch.setenv(POOL, "7")
    use_host_memory()
    assert os.environ[POOL] == "7"
    assert most() == int(host_gib()) > 1
    (tmp_path / "memory.max").write_text("max\n")
    assert most() == int(host_gib())
    monkeypatch.setattr(host_memory, "host_gib", lambda: 1000.0)
    assert (most(), most(10), most(200)) == (1000, 64, 236)
    monkeypatch.undo()
    monkeypatch.setattr(host_memory, "LIMITS", (tmp_path / "memory.max",))
    (tmp_path / "memory.max").write_text(f"{3 * 2**29}\n")
    assert host_gib() == 1.5  # of a container


def test_none_are_taken_where_prefixes_cannot_be_cached():
    """Linear attention without room for copies of what it remembers (serve/memories.py)."""
    layouts = [PageLayout.whole(4, 1, memories=(0, 1, 2))]
    config = EngineConfig(kv_offloading_size=1, kv_cache_bytes=2**30, max_num_seqs=2, block_size=16)
    for slot, kept in ((2**20, True), (2**28, False)):
        sizes, *_ = pool_size.sized(layouts, [2**16], None, 4096, config, 1, [slot])
        assert (sizes.bundles > 0) == (sizes.snapshots > 0) == kept
