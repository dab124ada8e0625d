"""Weights of a training state in the copies that sample: the same numbers wherever they rest, and no memory of copies
while a step trains."""

import dataclasses
import gc

import jax
import numpy as np
import pytest
from engines import CONFIG, folder_of
from flax.traverse_util import flatten_dict

from shardlm.data.config import DataConfig
from shardlm.errors import ShardlmError
from shardlm.layers.lora import LoraConfig
from shardlm.mesh import MeshSpec
from shardlm.models.pretrained import Pretrained
from shardlm.reinforce import copied_weights
from shardlm.reinforce.sampler import Sampler
from shardlm.serve.layers import plain_shapes, split, turned
from shardlm.serve.runner import Runner
from shardlm.serve.sampling_params import SamplingParams
from shardlm.train.config import GrpoConfig, RunConfig, TrainConfig
from shardlm.train.program import Program

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return folder_of(tmp_path_factory.mktemp("copies") / "hf", 0, dataclasses.replace(CONFIG, num_layers=3))


def made(folder, mesh: MeshSpec, tensor: int, precision: str = "fp32", lora: LoraConfig | None = None):
    """(the state that trains, what samples)."""
    config = RunConfig(
        model=Pretrained(str(folder)),
        data=DataConfig(),
        mesh=mesh,
        precision=precision,
        remat="none",
        lora=lora or LoraConfig(),
        grpo=GrpoConfig(("judge:it",), max_tokens=8, tensor=tensor, kv_cache_gib=0.001),
        train=TrainConfig(global_batch=8, seq_len=32),
    )
    last = jax.devices()[-mesh.size(*mesh.sizes()) :]  # where nothing would be by default
    program = Program.make(config, mesh.build(last))
    state = program.init(program.pretrained(), program.frozen())
    return state, Sampler.make(config, program.model, program.mesh)


def same(runner, wanted, lying) -> None:
    """Whether a copy has these weights, in its dtypes."""
    assert set(plain_shapes(runner.model, runner.params)) == set(wanted)
    for path, a in flatten_dict(runner.params).items():
        plain, *how = lying.get(path, (path,))
        expected = turned(wanted[plain], *how) if how else wanted[plain]
        assert (np.asarray(a, np.float32) == np.asarray(expected.astype(a.dtype), np.float32)).all(), path


def live() -> int:
    """Bytes of all arrays; of those that share memory once."""
    found = {}
    for array in jax.live_arrays():
        if not array.is_deleted():
            for shard in array.addressable_shards:
                found[shard.device, shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return sum(found.values())


def settled() -> int:
    """`live`, when what other tests left in cycles is gone: the collector would take it while something is counted."""
    gc.collect()
    return live()


@pytest.mark.parametrize(
    ("mesh", "tensor", "precision"),
    [
        pytest.param(MeshSpec(data=2, fsdp=2), 1, "bf16", marks=pytest.mark.wide),
        pytest.param(MeshSpec(fsdp=4), 2, "bf16", marks=pytest.mark.wide),
        pytest.param(MeshSpec(fsdp=2, tensor=2), 2, "fp32", marks=pytest.mark.wide),
        (MeshSpec(tensor=4), 2, "fp32"),
    ],
)
def test_copies_hold_what_is_trained_and_only_while_they_sample(folder, mesh, tensor, precision):
    state, sampler = made(folder, mesh, tensor, precision)
    wanted = flatten_dict({**state.params, "segments": split(state.params["segments"])})
    wanted = {path: np.asarray(a) for path, a in wanted.items()}
    with sampler.holding(state.params, None):  # which keeps numbers of some bytes
        sampler.sample([[1, 2, 3]] * 4, [GREEDY] * 4)
    before = settled()
    with sampler.holding(state.params, None):
        assert len(sampler._engines) == 4 // tensor
        for engine in sampler._engines:
            same(engine.runner, wanted, sampler.weights.turned)
        trees = [(engine.runner.params, engine.runner._state) for engine in sampler._engines]
        own = sum(a.nbytes for a in jax.tree.leaves(trees))
        del trees
        assert own > 0 and live() - before > 0.9 * own  # some of which may be what trains
        replies = sampler.sample([[1, 2, 3]] * 4, [GREEDY] * 4)
    assert len({tuple(one.token_ids) for group in replies for one in group}) == 1
    assert settled() == before


def test_copies_of_a_checkpoint_that_sees_have_no_encoder_for_texts(folder, monkeypatch):
    """Which would be held while a step trains, about a gigabyte of each device."""
    given = {}

    def made_of(model, **options):
        given.update(options)
        raise ShardlmError("that is enough")

    monkeypatch.setattr("shardlm.reinforce.sampler.LLM", made_of)
    with pytest.raises(ShardlmError, match="that is enough"):
        made(folder, MeshSpec(data=4), 1)
    assert given["limit_mm_per_prompt"] == {"image": 0}


@pytest.mark.wide
def test_a_prompts_replies_are_those_of_its_seed_by_however_many_copies(folder):
    state, sampler = made(folder, MeshSpec(data=4), 1)
    asked = [SamplingParams(n=4, seed=7, max_tokens=5, logprobs=0, ignore_eos=True)] * 5
    with sampler.holding(state.params, None):
        three = sampler.sample([[1, 2, 3]] * 3, asked[:3])
        five = sampler.sample([[1, 2, 3], [4, 5]] + [[1, 2, 3]] * 3, asked)
        four = sampler.sample([[1, 2, 3]] * 4, asked[:4])
    tokens = [[[one.token_ids for one in group] for group in groups] for groups in (three, five, four)]
    assert len({tuple(ids) for ids in tokens[2][0]}) == 4
    assert all(group == tokens[2][0] for group in (*tokens[0], tokens[1][0], *tokens[1][2:], *tokens[2]))


def test_weights_come_one_after_the_other(folder, monkeypatch):
    """Beside what copies hold of them there is never more than a parameter."""
    state, sampler = made(folder, MeshSpec(fsdp=4), 1, "bf16")
    with sampler.holding(state.params, None):  # compiled
        pass
    before, seen, put = settled(), [], copied_weights.CopiedWeights._put

    def told(self, path, given, place):
        a = put(self, path, given, place)
        seen.append((live() - before, sum(shard.data.nbytes for shard in a.addressable_shards)))
        return a

    monkeypatch.setattr(copied_weights.CopiedWeights, "_put", told)
    with sampler.holding(state.params, None):
        pass
    sizes = [size for _, size in seen]
    assert len(seen) > 20
    assert all(there <= sum(sizes[: i + 1]) + max(sizes) for i, (there, _) in enumerate(seen))


@pytest.mark.wide
def test_copies_without_room_are_said_and_leave_nothing(folder, monkeypatch):
    state, sampler = made(folder, MeshSpec(data=2), 1)
    with sampler.holding(state.params, None):
        pass
    before = settled()

    def full(runner):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate")

    with monkeypatch.context() as patched:
        patched.setattr(Runner, "allocate", full)
        said = r"do not fit into memory .*: 0\.00 GiB of weights .*, grpo\.tensor to"
        with pytest.raises(ShardlmError, match=said), sampler.holding(state.params, None):
            raise AssertionError("it is held")
    assert settled() == before
    with sampler.holding(state.params, None):
        assert len(sampler.sample([[1, 2]], [GREEDY])[0][0].token_ids) == 4


def test_what_lies_as_it_is_sampled_with_is_not_copied(folder):
    state, sampler = made(folder, MeshSpec(data=2), 1)
    placed = sampler.weights.placed(state.params)
    meshes = [engine.runner.mesh for engine in sampler._engines]
    own, theirs = flatten_dict(state.params)["final_norm", "scale"], placed["final_norm", "scale"]
    assert theirs is own
    copy = copied_weights.of_copies(placed, meshes)[1]["final_norm"]["scale"]
    assert copy.unsafe_buffer_pointer() == own.addressable_shards[1].data.unsafe_buffer_pointer()


@pytest.mark.wide
def test_the_sums_of_adapters_are_let_go_of(folder):
    state, sampler = made(folder, MeshSpec(fsdp=2), 1, lora=LoraConfig(2))
    before = settled()
    for _ in range(2):
        with sampler.holding(state.params, state.frozen):
            assert live() > before
        assert settled() == before
