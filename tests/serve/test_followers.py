"""How one process leads others, within one: two engines on the same device, of which one does what the other is
told."""

import concurrent.futures
import contextlib
import json
import multiprocessing
import pickle
import socket
import threading
from unittest import mock

import jax
import numpy as np
import pytest
from engines import decoding_from, folder_of
from flax.traverse_util import flatten_dict
from jax.sharding import NamedSharding, PartitionSpec
from test_adapters_served import adapter_of

from shardlm.errors import ShardlmError
from shardlm.layers.lora import LoraConfig
from shardlm.mesh import MeshSpec
from shardlm.opened import describe
from shardlm.serve import followers as followers_module
from shardlm.serve import following, lines
from shardlm.serve.adapters import ready
from shardlm.serve.alike import asked
from shardlm.serve.build import EngineConfig
from shardlm.serve.carry import Sent
from shardlm.serve.followers import END, LARGE, SETTLE, Followers, Line, pickled, refuse_second
from shardlm.serve.following import follow
from shardlm.serve.llm import LLM
from shardlm.serve.outputs import EngineError
from shardlm.serve.sampling_params import SamplingParams, StructuredOutputs

SIZES = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "block_size": 4, "decode_steps": 2}
PARAMS = [
    SamplingParams(temperature=0, max_tokens=6, repetition_penalty=1.5, ignore_eos=True),
    SamplingParams(max_tokens=6, seed=1, structured_outputs=StructuredOutputs(regex="[a-z]{4,}")),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    home = tmp_path_factory.mktemp("followers")
    base = folder_of(home / "base")
    return {
        "base": base,
        "other": folder_of(home / "other", 1),
        "adapter": adapter_of(home / "a", base, LoraConfig(2), 0),
    }


@pytest.fixture(scope="module")
def both(folders):
    """(who leads, who follows)."""
    with decoding_from(SIZES["max_num_seqs"]):
        return [LLM(folders["base"], enable_lora=True, **SIZES) for _ in range(2)]


@pytest.fixture
def led(both):
    """The two, connected, and the thread of the second."""
    here, there = multiprocessing.Pipe()
    thread = threading.Thread(target=follow, args=(both[1].engine.runner, there))
    thread.start()
    both[0].engine.runner.followers = Followers([Line(1, here)])
    yield *both, thread
    if followers := both[0].engine.runner.followers:
        followers.end()
    both[0].engine.runner.followers = None
    thread.join(60)
    assert not thread.is_alive()


def check_alike(first: LLM, second: LLM, thread: threading.Thread) -> None:
    """All that the devices hold is the same, once the second has done what it was told."""
    first.engine.runner.followers.end()
    thread.join(60)
    for name in ("_state", "params"):
        held = [getattr(llm.engine.runner, name) for llm in (first, second)]
        jax.tree.map(np.testing.assert_array_equal, *held)


def test_what_one_runs_the_other_does(led, folders):
    first, second, thread = led
    old = jax.tree.map(np.asarray, second.engine.runner.params)
    said = first.generate([[1, 2, 3, 4, 5], list(range(30))], PARAMS, use_tqdm=False)
    assert all(output.error is None for output in said)
    first.update_weights(folders["other"])
    first.engine.load_adapter("a", str(folders["adapter"]), ready(folders["adapter"], first.engine))
    first.score([[1, 2, 3]])
    check_alike(first, second, thread)
    new = flatten_dict(second.engine.runner.params)
    changed = {path[-1] for path, a in flatten_dict(old).items() if not np.array_equal(a, new[path])}
    assert {"embedding", "wq_lora_a", "wq_lora_b"} <= changed, changed


def test_what_cannot_be_made_is_said(led, folders, tmp_path):
    first, second, thread = led
    with pytest.raises(ShardlmError, match="there is no folder"):
        first.update_weights(tmp_path / "none")
    with pytest.raises(ShardlmError, match="write them as a checkpoint that all can read"):
        first.update_weights(second.engine.runner.params)
    fails = mock.Mock(side_effect=ShardlmError("no such disk"))
    with mock.patch.dict(following.MAKERS, new_weights=fails), pytest.raises(ShardlmError, match="process 1: no such"):
        first.update_weights(folders["base"])
    others = mock.patch.object(following, "of_files", return_value="others")
    with others, pytest.raises(ShardlmError, match=r"process 1: .*base has other weights on this host than process 0"):
        first.update_weights(folders["base"])
    first.generate([[1, 2]], PARAMS[0], use_tqdm=False)
    check_alike(first, second, thread)


def test_who_has_gone_ends_the_engine(both):
    here, there = multiprocessing.Pipe()
    there.close()
    runner = both[0].engine.runner
    runner.followers = Followers([Line(3, here)])
    try:
        with pytest.raises(EngineError, match="process 3, which has a part of the model, has gone"):
            both[0].generate([[1, 2]], PARAMS[0], use_tqdm=False)
    finally:
        runner.followers.end()
        runner.followers, both[0].engine.ended = None, None
    here, there = multiprocessing.Pipe()
    here.close()
    with pytest.raises(EngineError, match="process 0, which led this one, has gone"):
        follow(both[1].engine.runner, there)


def failing(monkeypatch, runner):
    """Its next batch is started everywhere, and fails here with the state gone."""
    start = runner.start

    def fail(*arguments):
        monkeypatch.undo()
        start(*arguments)
        jax.tree.map(lambda a: a.delete(), runner._state)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(runner, "start", fail)


def test_after_a_batch_that_fails_both_are_as_new(led, monkeypatch):
    first, second, thread = led
    failing(monkeypatch, first.engine.runner)
    before = first.engine.stats().failed_batches
    [output] = first.generate([[1, 2]], PARAMS[0], use_tqdm=False)
    assert output.error is None and len(output.outputs[0].token_ids) == 6
    assert first.engine.stats().failed_batches == before + 1
    check_alike(first, second, thread)


def test_who_does_not_come_to_an_end_ends_the_engine(monkeypatch):
    here, there = multiprocessing.Pipe()
    followers = Followers([Line(2, here)])
    monkeypatch.setattr(followers_module, "SETTLE_SECONDS", 0.01)
    for _ in range(2):
        with pytest.raises(EngineError, match=r"process 2 did not come to the end of its programs in 0\.01 s"):
            followers.settle()
    there.send_bytes(b"")
    followers.end()
    with pytest.raises(EngineError, match="did not come"):
        followers.tell("reset")


def test_a_program_that_fails_is_noticed_while_nothing_is_told(monkeypatch):
    monkeypatch.setattr(following, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(following, "RESET_SECONDS", 0.1)
    here, there = multiprocessing.Pipe()
    broken = concurrent.futures.Future()
    runner = mock.Mock(**{"_run.return_value": broken})
    with concurrent.futures.ThreadPoolExecutor() as pool:
        followed = pool.submit(follow, runner, there)
        here.send_bytes(pickled(("_run", ())))
        broken.set_exception(RuntimeError("out of memory"))
        with pytest.raises(RuntimeError, match="out of memory"):
            followed.result(30)


def test_programs_that_fail_alike_are_forgotten_at_a_reset(monkeypatch):
    """What was told after the one that failed is not started; what comes after the reset is."""
    monkeypatch.setattr(following, "LOOK_SECONDS", 0.01)
    here, there = multiprocessing.Pipe()
    broken, well = concurrent.futures.Future(), concurrent.futures.Future()
    broken.set_exception(RuntimeError("out of memory"))
    well.set_result([])
    runner = mock.Mock(**{"_run.side_effect": [broken, well], "reset.return_value": None})
    with concurrent.futures.ThreadPoolExecutor() as pool:
        followed = pool.submit(follow, runner, there)
        here.send_bytes(pickled(("_run", ("fails",))))
        here.send_bytes(pickled((SETTLE, ())))
        assert here.poll(30) and here.recv_bytes() == b""
        for name in ("skipped", "reset", "runs"):
            here.send_bytes(pickled((name, ()) if name == "reset" else ("_run", (name,))))
        here.send_bytes(pickled((END, ())))
        assert followed.result(30) is None
    assert runner.mock_calls == [mock.call._run("fails"), mock.call.reset(), mock.call._run("runs")]


def test_an_interrupt_while_a_program_is_started_ends_the_engine(both, monkeypatch):
    here, there = multiprocessing.Pipe()
    runner = both[0].engine.runner
    runner.followers = Followers([Line(1, here)])
    monkeypatch.setattr(runner, "_launchers", (mock.Mock(**{"submit.side_effect": KeyboardInterrupt}),))
    try:
        with pytest.raises(KeyboardInterrupt):
            both[0].generate([[1, 2]], PARAMS[0], use_tqdm=False)
        monkeypatch.undo()
        with pytest.raises(EngineError, match="KeyboardInterrupt came while a program was started that all"):
            both[0].generate([[1, 2]], PARAMS[0], use_tqdm=False)
    finally:
        runner.followers.end()
        runner.followers, both[0].engine.ended = None, None
        both[0].engine.renew()
        there.close()


def test_a_second_engine_is_refused_while_others_follow_the_first(folders):
    here, _ = multiprocessing.Pipe()
    followers = Followers([Line(1, here)])
    with pytest.raises(ShardlmError, match="the other processes serve the engine that was made before"):
        LLM(folders["base"], **SIZES)
    followers.end()
    refuse_second()


def test_large_arrays_travel_without_their_zeros():
    table = np.zeros((64, LARGE // 64), np.int32)
    table[:, :9] = np.arange(9)
    full = np.ones((LARGE,), np.int32)
    said = pickled(("run", (table, full[:2])))
    assert len(said) < table.nbytes / 100
    for a, b in zip(pickle.loads(said)[1], (table, full[:2]), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(pickle.loads(pickled(full)), full)


class Coordinator:
    """Keys and values, as jax's client has them."""

    def __init__(self):
        self.values, self.there = {}, threading.Event()

    def key_value_set(self, key, value):
        self.values["place"] = value
        self.there.set()

    def blocking_key_value_get(self, key, wait_ms):
        assert self.there.wait(60)
        return self.values["place"]


def connected(monkeypatch, others, about) -> tuple[list, dict]:
    """(what to_followers gives or raises, what to_leader does in each of the other processes)."""
    coordinator, said = Coordinator(), {}
    monkeypatch.setattr(lines, "coordinator", lambda: coordinator)
    monkeypatch.setattr(lines, "coordinator_host", lambda: "localhost")
    monkeypatch.setattr(lines, "HANDSHAKE_SECONDS", 2.0)  # that the one who says nothing takes

    def other(process):
        try:
            said[process] = lines.to_leader(others[process], process)
        except Exception as error:
            said[process] = error

    threads = [threading.Thread(target=other, args=(process,)) for process in others]
    stranger = threading.Thread(target=knock, args=(coordinator,))
    for thread in (stranger, *threads):
        thread.start()
    try:
        found = lines.to_followers(about, len(others) + 1)
    except ShardlmError as error:
        found = error
    for thread in (stranger, *threads):
        thread.join(60)
    return found, said


def test_what_was_asked_for_is_compared_before_anything_is_built(monkeypatch, folders):
    coordinator = Coordinator()
    monkeypatch.setattr(lines, "coordinator", lambda: coordinator)
    about = {}
    for name in ("base", "other"):
        speculative = {"model": str(folders[name]), "num_speculative_tokens": 2}
        config = EngineConfig(speculative_config=speculative, lora_modules={"a": folders["adapter"]})
        about[name] = asked(config, describe(folders[name]))
    assert {name for name, said in about["base"].items() if said != about["other"][name]} == {
        "the model's folder",
        "the draft model's folder",
    }
    lines.agree(about["base"], 0)
    lines.agree(about["base"], 1)
    with pytest.raises(ShardlmError, match="process 2 has another engine than process 0: the model's folder is "):
        lines.agree(about["other"], 2)


def knock(coordinator) -> None:
    """Connects without the key, and once to say nothing; late, it finds nobody."""
    where = "localhost", json.loads(coordinator.blocking_key_value_get("", 0))["port"]
    with contextlib.suppress(ConnectionError), contextlib.ExitStack() as both:
        _, sock = (both.enter_context(socket.create_connection(where, timeout=60)) for _ in range(2))
        sock.sendall(bytes(2 * lines.SECRET))
        sock.recv(lines.SECRET)
        sock.recv(lines.SECRET)


def test_processes_find_each_other(monkeypatch):
    found, said = connected(monkeypatch, {2: {"sizes": "a"}, 1: {"sizes": "a"}}, {"sizes": "a"})
    assert [line.process for line in found] == [1, 2]
    for line in found:
        line.connection.send_bytes(b"go")
        assert said[line.process].recv_bytes() == b"go"
        line.connection.close()
        said[line.process].close()


def test_another_engine_is_refused_by_both(monkeypatch):
    found, said = connected(monkeypatch, {1: {"sizes": "x" * 500 + "rows=2"}}, {"sizes": "x" * 500 + "rows=3"})
    for error in (found, said[1]):
        assert "process 1 has another engine than process 0: sizes is" in str(error)
        assert "rows=2" in str(error) and "rows=3" in str(error)


def test_what_leaves_a_stage_is_sent_to_each_device_of_the_next():
    source, target = (MeshSpec(tensor=2).build(jax.devices()[first : first + 2]) for first in (0, 2))
    sent = Sent(source, target)
    arrays = [np.arange(12, dtype=np.float32).reshape(3, 4), np.arange(3, dtype=np.int32)]
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]
    sent.compile(shapes)
    for times in (1, 2):
        given = jax.device_put([times * a for a in arrays], NamedSharding(source, PartitionSpec()))
        for a, came in zip(arrays, sent(given, shapes), strict=True):
            assert came.sharding == NamedSharding(target, PartitionSpec())
            for shard in came.addressable_shards:
                np.testing.assert_array_equal(shard.data, times * a)
