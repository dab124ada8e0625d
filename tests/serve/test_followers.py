"""How one process leads others, within one: two engines on the same device, of which one does what the other is
told."""

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
from shardlm.serve import following, lines
from shardlm.serve.adapters import ready
from shardlm.serve.carry import Sent
from shardlm.serve.followers import LARGE, Followers, Line, pickled
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
        runner.followers, both[0].engine.ended = None, None
    here, there = multiprocessing.Pipe()
    here.close()
    with pytest.raises(EngineError, match="process 0, which led this one, has gone"):
        follow(both[1].engine.runner, there)


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
    monkeypatch.setattr(lines, "_coordinator", lambda: coordinator)
    monkeypatch.setattr(lines, "_host", lambda: "localhost")

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


def knock(coordinator) -> None:
    """Connects without the key."""
    place = json.loads(coordinator.blocking_key_value_get("", 0))
    with socket.create_connection(("localhost", place["port"]), timeout=60) as sock:
        sock.sendall(bytes(2 * lines.SECRET))
        with contextlib.suppress(ConnectionResetError):
            sock.recv(2 * lines.SECRET)


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
