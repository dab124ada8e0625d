"""Moments in bfloat16 and 8 bits: how they are rounded, where blocks lie, and that neither the mesh nor host memory nor
a bad step changes them."""

import collections
import dataclasses
import functools
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_run
from gpu_programs import on_gpus
from small import LLAMA, init, mesh_of, model_on
from small_moe import MOE

from shardlm.errors import ShardlmError
from shardlm.mesh import MeshSpec
from shardlm.models.llama import LlamaConfig
from shardlm.moments import Blocks, block, check_split, kind_of
from shardlm.optim import OptimConfig, make_optimizer
from shardlm.topology import topology
from shardlm.train.bench import random_batch
from shardlm.train.config import OffloadConfig, RunConfig, TrainConfig
from shardlm.train.program import Program

BASE = OptimConfig(learning_rate=0.01, warmup_steps=1, schedule="constant", b2=0.999)
WIDE = dataclasses.replace(LLAMA, vocab_size=512, embed_dim=64, mlp_dim=512, num_heads=4, head_dim=32, num_layers=2)
MIXTURE = dataclasses.replace(MOE, vocab_size=512, embed_dim=64, num_heads=4, head_dim=32, expert_dim=512, num_layers=2)
SPLIT = MeshSpec(data=2, fsdp=2, tensor=2)


def words(tree) -> list[tuple[str, np.ndarray]]:
    return [(jax.tree_util.keystr(path), np.asarray(a)) for path, a in jax.tree_util.tree_leaves_with_path(tree)]


def assert_equal(found, expected):
    for (name, a), (_, b) in zip(words(found), words(expected), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)


@functools.cache
def updated(spec: MeshSpec, preset: str, name: str, kind: str, config=WIDE):
    """(weights, state) after three updates with made-up gradients."""
    with jax.set_mesh(mesh_of(spec)):
        model = model_on(spec, preset, config)
        tx = make_optimizer(dataclasses.replace(BASE, name=name, moments=kind), 100, model.names)
        table = model.execution.rules.optimizer

        @jax.jit
        def run(params):
            params = model.place(params, table)
            state = tx.init(params)
            for turn in (1, 2, 3):
                grads = jax.tree.map(lambda p, turn=turn: jnp.sin(40 * turn * p), params)
                updates, state = tx.update(grads, state, params)
                params = optax.apply_updates(params, updates)
            return params, state

        return jax.tree.map(np.asarray, run(init(model)))


def held_types(state) -> dict[str, int]:
    leaves = jax.tree.leaves(state.state, is_leaf=lambda a: isinstance(a, Blocks))
    names = ["blocks" if isinstance(a, Blocks) else str(a.dtype) for a in leaves if isinstance(a, Blocks) or a.ndim]
    return {name: names.count(name) for name in set(names)}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "name,kind,preset",
    [
        ("adamw", "int8", "zero3"),
        ("adamw", "bfloat16", "zero1"),
        *(  # each optimizer in both kinds; presets in turn, as they say no more than where a block is
            pytest.param(name, kind, preset, marks=pytest.mark.wide)
            for name, *presets in (
                ("adamw", "hybrid", "zero2"),
                ("lion", "zero3", "zero1"),
                ("sgd", "zero2", "hybrid"),
                ("muon", "zero1", "zero3"),
            )
            for kind, preset in zip(("int8", "bfloat16"), presets, strict=True)
        ),
    ],
)
def test_every_mesh_rounds_alike(name, kind, preset):
    whole = updated(MeshSpec(), "replicated", name, kind)
    params, state = updated(SPLIT, preset, name, kind)
    assert_equal(state.keys, whole[1].keys)
    if name != "muon":  # whose products are summed in another order
        assert_equal((params, state), whole)
    assert held_types(state) == held_types(whole[1])
    if (name, kind) == ("adamw", "int8"):  # two moments of nine weights; of three norms
        assert held_types(state) == {"blocks": 18, "float32": 6}


@pytest.mark.wide
@pytest.mark.parametrize(
    "config,spec",
    [
        (WIDE, MeshSpec(pipeline=2, fsdp=2, tensor=2)),
        (WIDE, MeshSpec(context=2, tensor=4)),  # with whole kv heads
        (MIXTURE, MeshSpec(data=2, expert=2, pipeline=2)),
    ],
)
def test_stages_and_experts_round_alike(config, spec):
    whole, split = (updated(*how, "adamw", "int8", config) for how in ((MeshSpec(), "replicated"), (spec, "zero3")))
    assert_equal(split, whole)
    assert held_types(split[1])["blocks"] == 18


@pytest.mark.parametrize("kind,most", [("bfloat16", 0.03), ("int8", 0.15)])
def test_a_slow_moment_follows_its_gradients(kind, most):
    """Of gradients that fall to a third, with b2=0.999: rounded to the nearest, what a step takes away is nothing."""
    names = {"w": ((), ("embed", "mlp"))}
    params = {"w": jnp.ones((16, 512))}
    tx = make_optimizer(dataclasses.replace(BASE, moments=kind), 9999, names)
    plain = make_optimizer(BASE, 9999, names)

    @jax.jit
    def run(key):
        def step(i, states):
            size = jnp.where(i < 300, 1.0, 1 / 3) * jnp.exp(jnp.sin(jnp.arange(512.0)))  # an uneven block
            grads = {"w": size * jax.random.normal(jax.random.fold_in(key, i), (16, 512))}
            return tuple(t.update(grads, s, params)[1] for t, s in zip((tx, plain), states, strict=True))

        held, exact = jax.lax.fori_loop(0, 1000, step, (tx.init(params), plain.init(params)))
        zeros = {"w": jnp.zeros((16, 512))}
        updates = [t.update(zeros, s, params)[0]["w"] for t, s in zip((tx, plain), (held, exact), strict=True)]
        return held, exact, updates

    held, exact, (found, expected) = run(jax.random.key(0))
    a = held.state[0].nu["w"]
    if kind == "int8":
        assert a.codes.dtype == jnp.uint8 and a.scales.shape == (16, 16)
        found_nu = (np.asarray(a.codes, np.float32) / 255) ** 4 * np.repeat(np.asarray(a.scales), 32, axis=1)
    else:
        found_nu = np.asarray(a, np.float32)
    nu = np.asarray(exact[0].nu["w"])
    assert abs(np.mean(found_nu / nu) - 1) < 0.02  # no bias
    assert np.mean(np.abs(np.sqrt(found_nu / nu) - 1)) < most
    error = np.asarray(found - expected)
    assert np.linalg.norm(error) < most * np.linalg.norm(expected)


def test_no_gradient_beside_larger_ones_makes_a_leap():
    """Gradients over seven decades within a block, and some that are always zero. A float32 update has at most 1 here:
    with squares down to their first code, or first moments in steps of 6e-5, some were 40."""
    names, params = {"w": ((), ("embed", "mlp"))}, {"w": jnp.ones((16, 512))}
    optim = dataclasses.replace(BASE, learning_rate=1.0, weight_decay=0.0, b2=0.95)
    tx, plain = (make_optimizer(dataclasses.replace(optim, moments=kind), 9999, names) for kind in ("int8", "float32"))
    decades = np.random.default_rng(0).uniform(-7, 0, (16, 512))
    size = jnp.asarray(np.where(np.arange(512) % 7, 10.0**decades, 0), jnp.float32)

    @jax.jit
    def run(key):
        def step(states, i):
            grads = {"w": size * (0.3 + jax.random.normal(jax.random.fold_in(key, i), size.shape))}
            found = [t.update(grads, s, params) for t, s in zip((tx, plain), states, strict=True)]
            return tuple(state for _, state in found), [updates["w"] for updates, _ in found]

        return jax.lax.scan(step, (tx.init(params), plain.init(params)), jnp.arange(200))[1]

    found, expected = map(np.asarray, run(jax.random.key(0)))
    assert np.abs(found).max() < 3 and np.all(found[:, size == 0] == 0)
    large = decades > -3
    assert np.std((found - expected)[50:, large]) < 0.2 * np.std(expected[50:, large])


def test_where_blocks_lie():
    """Inside of what tensor up to 16 and rows over up to 1,024 devices leave together."""
    assert block(("embed", "mlp"), (4096, 14336)) == (1, 128)
    assert block(("mlp", "embed"), (11008, 4096)) == (16, 4)
    assert block(("embed", "heads", "head_dim"), (4096, 32, 128)) == (1, 1, 128)
    assert block(("embed", "heads", "head_dim"), (192, 4, 48)) == (1, 1, 48)
    # Tensor over more devices than there are heads leaves them whole: as the same blocks.
    heads = [block(("embed", name, "head_dim"), (64, 2, 32)) for name in ("kv_heads", "kv_heads_whole")]
    assert heads == [(1, 1, 32), (1, 1, 32)]
    assert block(("experts", "expert_embed", "expert_mlp"), (256, 7168, 2048)) == (1, 1, 128)
    assert block(("vocab", "embed"), (128256, 4096)) == (16, 4)
    kinds = [kind_of("int8", *of) for of in ((("vocab", "embed"), (50257, 768)), (("embed", "rank"), (64, 8)))]
    assert kinds == ["bfloat16", "float32"]  # a table that nothing divides; 512 numbers


def run_config(kind: str, **changes) -> RunConfig:
    base = RunConfig(
        WIDE,
        mesh=MeshSpec(fsdp=2, tensor=2),
        optim=dataclasses.replace(BASE, moments=kind, ema_decay=0.9),
        train=TrainConfig(steps=4, global_batch=4, seq_len=16),
    )
    return dataclasses.replace(base, **changes)


def test_refusals():
    with pytest.raises(ShardlmError, match=r"optim\.moments=int8 with optim\.name=adafactor, which keeps sums of rows"):
        OptimConfig(name="adafactor", moments="int8")
    with pytest.raises(ShardlmError, match=r"optim\.moments=bfloat16 with optim\.name=sgd.*nothing with optim\.b1=0"):
        OptimConfig(name="sgd", b1=0.0, moments="bfloat16")
    with pytest.raises(ShardlmError, match=r"optim\.moments=fp8: choose from float32, bfloat16, int8"):
        OptimConfig(moments="fp8")


def test_a_mesh_that_divides_a_block_is_refused():
    message = r"w has blocks of 128 along mlp=14336, and 32 devices would share some; split it over a divisor of 112"
    with pytest.raises(ShardlmError, match=message):
        check_split("w", ("embed", "mlp"), (4096, 14336), (1, 32))
    check_split("w", ("embed", "mlp"), (4096, 14336), (1024, 16))


def stepped(config: RunConfig, good: tuple[bool, ...]):
    """The states after steps on one batch, of those that are not good with a loss that is no number."""
    program = Program.make(config, mesh_of(config.mesh))
    with jax.set_mesh(program.mesh):
        state, batch = program.init(), random_batch(program)
        step, found = program.lower_step().compile(), []
        for one in good:
            mask = batch["loss_mask"] if one else batch["loss_mask"] * np.float32("nan")
            state, _ = step(state, batch | {"loss_mask": jax.device_put(mask, batch["loss_mask"].sharding)})
            found.append(jax.tree.map(np.asarray, state))
    return found


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["int8", "bfloat16"])
def test_bad_steps_and_host_memory_change_nothing(kind):
    before, bad, after = stepped(run_config(kind), (True, False, True))
    parts = ("params", "opt_state", "ema")
    assert_equal([getattr(bad, part) for part in parts], [getattr(before, part) for part in parts])
    assert int(bad.skipped) == 1 and int(after.opt_state.count) == 2
    away = stepped(run_config(kind, offload=OffloadConfig(optimizer=True)), (True, True))[-1]
    assert held_types(away.opt_state) == held_types(after.opt_state)
    # XLA:CPU rounds some of AdamW's otherwise a layer at a time, and then a code in many is the next one.
    for (name, a), (_, b) in zip(words(away.opt_state), words(after.opt_state), strict=True):
        assert np.mean(a != b) < 1e-3 or a.dtype == np.float32, name


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["int8", "bfloat16"])
def test_a_run_resumes_bit_for_bit_and_on_another_mesh(kind, tmp_path):
    config = tiny_run.write(tmp_path)
    flags = (f"optim.moments={kind}", "model.mlp_dim=512", "model.embed_dim=64")
    done = tiny_run.train(config, *flags)
    assert done.returncode == 0, done.stderr
    expected = tiny_run.losses(tmp_path / "run")
    for name, more, close in (("same", (), 0), ("other", ("mesh.fsdp=4", "mesh.tensor=1", "rules=zero1"), 1e-3)):
        moved = tmp_path / name
        shutil.copytree(tmp_path / "run", moved)
        for step in (8, 12):
            shutil.rmtree(moved / "checkpoints" / str(step))
        done = tiny_run.train(config, f"run_dir={moved}", *flags, *more)
        assert done.returncode == 0 and "resuming after step 4" in done.stdout, done.stderr
        assert tiny_run.largest_difference(tiny_run.losses(moved), expected) <= close
    done = tiny_run.train(config, *flags[1:])
    assert done.returncode and f"optim.moments was '{kind}', is 'float32'" in done.stderr


@pytest.mark.wide
@on_gpus
@pytest.mark.parametrize("kind,bytes_each", [("int8", 2.1), ("bfloat16", 4.01)])
def test_update_on_h100_holds_no_whole_moment_in_float32(kind, bytes_each):
    """Compiled. XLA joins what makes scales and what makes codes where it can, and keeps what both need."""
    held, plain = compiled(kind), compiled("float32")
    weights = plain["arguments"] / 12
    assert held["arguments"] == pytest.approx((4 + bytes_each) * weights, rel=0.02)
    assert held["temporaries"] < 1.01 * plain["temporaries"]
    assert held["collectives"] == plain["collectives"]


@functools.cache
def compiled(kind: str) -> dict:
    model = LlamaConfig(8192, embed_dim=2048, num_layers=16, num_heads=16, num_kv_heads=8, mlp_dim=8192)
    config = RunConfig(
        model,
        mesh=MeshSpec(fsdp=2),
        optim=OptimConfig(moments=kind),
        precision="bf16",
        train=TrainConfig(global_batch=2, seq_len=512),
        xla_profile="hopper",
    )
    program = Program.make(config, config.mesh.build(topology("h100", 1, 2)))
    step = program.lower_step().compile(dict(program.xla_options().options))
    memory, text = step.memory_analysis(), step.as_text()
    kinds = collections.Counter(re.findall(r" (all-gather|reduce-scatter|all-reduce|all-to-all)(?:-start)?\(", text))
    return {
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "collectives": kinds,
    }
