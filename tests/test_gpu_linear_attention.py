"""Linear attention compiled for NVIDIA GPUs without one: states go through chunks in one kernel, not in a loop, and the
memory of served texts stays where it is."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import pytest
from gpu_programs import MARKS

from shardlm.hlo.flops import matmul_flops
from shardlm.hlo.kernels import kernel
from shardlm.hlo.text import parse
from shardlm.layers.delta_net import DeltaNetConfig
from shardlm.mesh import MeshSpec, shard_map
from shardlm.ops import summed_kernel
from shardlm.ops.delta_rows import remembered
from shardlm.ops.gated_delta import CHUNK, SUMMED, gated_delta
from shardlm.plan import delta_kernels
from shardlm.plan.linear_attention import TURN, Rule
from shardlm.topology import topology

pytestmark = MARKS


def of_rule(gpu, dtype, B, T, K, N, H, V, by_channel=False):
    """(the mesh of one GPU, the arguments of `gated_delta` there: queries, keys and values in this dtype, decays, beta
    and the state in float32, and the numbers of texts)."""
    mesh = MeshSpec().build(topology(gpu, 1, 1))
    on = jax.sharding.NamedSharding(mesh, jax.P())
    near = [(B, T, K, H), (B, T, K, H), (B, T, N, V)]
    wide = [(B, T, N, H) if by_channel else (B, T, N), (B, T, N), (B, N, H, V)]
    given = [jax.ShapeDtypeStruct(shape, dtype, sharding=on) for shape in near]
    given += [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=on) for shape in wide]
    return mesh, [*given, jax.ShapeDtypeStruct((B, T), jnp.int32, sharding=on)]


@pytest.mark.parametrize("gpu", ["a100", "h100"])
@pytest.mark.parametrize(
    "dtype,kernels", [(jnp.bfloat16, 2), (jnp.float32, 0)], ids=["bf16 by channel", "fp32 by channel"]
)
def test_states_that_decay_by_channel_are_carried_by_a_kernel_in_16_bits(gpu, dtype, kernels):
    """Forward and back; of float32 by a loop each."""
    B, T, K, N, H, V = 1, 1024, 2, 4, 128, 128
    mesh, given = of_rule(gpu, dtype, B, T, K, N, H, V, by_channel=True)

    def loss(*given):
        return jnp.sum(gated_delta(*given)[0].astype(jnp.float32))

    with jax.set_mesh(mesh):  # which says what is compiled for, as jax 0.11 on asks
        found = jax.jit(jax.grad(loss, argnums=range(6))).lower(*given).compile().as_text()
    assert found.count('custom_call_target="__gpu$xla.gpu.triton"') == kernels
    assert found.count(" while(") == 2 - kernels


@pytest.mark.parametrize(("gpu", "dtype"), [("a100", jnp.bfloat16), ("h100", jnp.bfloat16), ("h100", jnp.float32)])
def test_prompts_of_the_gated_delta_rule_are_kernels_in_16_bits(gpu, dtype):
    """Forward alone, without a loop, and without matrices of tokens by tokens in memory; what they multiply and move is
    what plans count. Of float32 XLA's products."""
    B, T, K, N, H, V, tokens = 2, 2048 - 30, 4, 8, 128, 64, 2048
    mesh, given = of_rule(gpu, dtype, B, T, K, N, H, V)
    with jax.set_mesh(mesh):
        compiled = jax.jit(gated_delta).lower(*given).compile()
    found, memory = compiled.as_text(), compiled.memory_analysis()
    kernels = re.findall(r'triton".*op_name="[^"]*/(\w+)/pallas_call"', found)
    squares_bytes = 4 * B * tokens * N * CHUNK
    if dtype == jnp.float32:
        assert not kernels and found.count(" while(") and memory.temp_size_in_bytes > 4 * squares_bytes
        return
    assert sorted(kernels) == ["delta_changes", "delta_states", "summed_outputs"] and " while(" not in found
    states_bytes, padded_bytes = 2 * B * tokens // CHUNK * N * H * V, 2 * B * tokens * 2 * (K * H + N * V)
    assert memory.temp_size_in_bytes < 1.2 * (states_bytes + 2 * B * tokens * N * (H + V) + padded_bytes)
    rule = Rule.of_rows(DeltaNetConfig(N, K, H, V), T, B, 1, 2)
    ops = [op for op in delta_kernels.operations(rule, 0, TURN) if op.unit == "matmul"]
    work, module = matmul_flops(found), parse(found)
    assert work.flops == sum(op.flops for op in ops) and not work.uncounted
    calls = [(of, at) for of in module.computations.values() for at in of.instructions if at.opcode == "custom-call"]
    moved = sum(kernel(module, *call).nbytes for call in calls if "pallas_call" in call[1].attributes)
    assert moved == pytest.approx(sum(op.hbm_bytes for op in ops), rel=0.01)


@pytest.mark.parametrize(("gpu", "dtype"), [("a100", jnp.bfloat16), ("h100", jnp.bfloat16), ("h100", jnp.float32)])
def test_gradients_of_the_gated_delta_rule_are_kernels_in_16_bits(gpu, dtype):
    """Without a loop, and without float32 matrices of tokens by tokens in memory; what they multiply is what plans
    count, and what they move. Of float32 XLA's products."""
    B, T, K, N, H, V, tokens = 1, 2048 - 30, 4, 8, 128, 64, 2048
    mesh, given = of_rule(gpu, dtype, B, T, K, N, H, V)

    def loss(*given):
        return jnp.sum(jnp.square(gated_delta(*given)[0].astype(jnp.float32)))

    with jax.set_mesh(mesh):
        compiled = jax.jit(jax.grad(loss, argnums=range(6))).lower(*given).compile()
    found, memory = compiled.as_text(), compiled.memory_analysis()
    kernels = re.findall(r'triton".*op_name="[^"]*/(\w+)/pallas_call"', found)
    states_bytes, values_bytes = 2 * B * tokens // CHUNK * N * H * V, 2 * B * tokens * N * V
    if dtype == jnp.float32:
        assert not kernels and found.count(" while(") and memory.temp_size_in_bytes > 6 * states_bytes
        return
    forward = ["delta_changes", "delta_states", "summed_outputs"]
    back = [f"delta_{name}_back" for name in ("changes", "pairs", "reads", "states")]
    assert sorted(kernels) == sorted(forward + back) and " while(" not in found
    keys_bytes, inverse_bytes = 2 * B * tokens * 2 * K * H, 2 * B * tokens * N * CHUNK
    # What is kept, the gradient of states, that of changes, and what is padded, given and made.
    most = inverse_bytes + 2 * states_bytes + 12 * values_bytes + 5 * keys_bytes
    assert memory.temp_size_in_bytes < most
    rule = Rule.of_rows(DeltaNetConfig(N, K, H, V), T, B, 1, 2)
    ops, work = list(delta_kernels.products(rule)), matmul_flops(found)
    assert work.flops == pytest.approx(sum(op.flops * (1 + op.gradients) for op in ops), rel=1e-9)
    assert not work.uncounted
    module = parse(found)
    calls = [(of, at) for of in module.computations.values() for at in of.instructions if at.opcode == "custom-call"]
    moved = sum(kernel(module, *call).nbytes for call in calls if "pallas_call" in call[1].attributes)
    assert moved == pytest.approx(sum(op.hbm_bytes * (1 + op.gradients) for op in ops), rel=0.1)


@pytest.mark.parametrize(("gpu", "dtype"), [("a100", jnp.bfloat16), ("h100", jnp.bfloat16), ("h100", jnp.float32)])
def test_chunks_of_mamba_are_kernels_in_16_bits(gpu, dtype):
    """Forward and back, without a loop, and without what tokens see of each other in memory; their products are
    counted. Of float32 XLA's."""
    B, T, K, N, H, V = 1, 2048, 2, 32, 128, 64
    mesh, given = of_rule(gpu, dtype, B, T, K, N, H, V)

    def loss(*given):
        return jnp.sum(jnp.square(gated_delta(*given, takes_back=False)[0].astype(jnp.float32)))

    with jax.set_mesh(mesh):
        compiled = jax.jit(jax.grad(loss, argnums=range(6))).lower(*given).compile()
    found, memory = compiled.as_text(), compiled.memory_analysis()
    kernels = collections.Counter(re.findall(r'triton".*op_name="[^"]*/summed_(\w+)/pallas_call"', found))
    pairs_bytes = 2 * T * N * SUMMED
    if dtype == jnp.float32:
        assert not kernels and found.count(" while(") and memory.temp_size_in_bytes > 2 * pairs_bytes
        return
    assert kernels == {"states": 3, "outputs": 1, "values_back": 1, "queries_back": 1, "keys_back": 1}
    assert " while(" not in found and memory.temp_size_in_bytes < 4.5 * pairs_bytes  # two arrays of states are two
    work, pairs = matmul_flops(found), (SUMMED + summed_kernel.ROWS) / 2
    each = 7 * H * V + pairs * (2 * H + 5 * V)  # of a head and token; heads are summed before the rest
    assert work.flops == 2 * T * (N * each + K * pairs * 3 * H) and not work.uncounted


@pytest.mark.parametrize("mamba", [False, True], ids=["delta", "mamba"])
@pytest.mark.parametrize(("rows", "tokens"), [("known", 1), ("drafts", 3), ("in_turn", 1)])
def test_no_memory_of_all_slots_is_copied(rows, tokens, mamba):
    """Of served rows what is remembered is written where it lies, without another array of all slots, turned or not;
    one row after another takes no more than one state, and one token of each, or drafts, a kernel that makes none
    anew."""
    B, K, N, H, V, W, slots = 64, 2, 4, 128, 64 if mamba else 128, 4, 1000
    mesh = MeshSpec().build(topology("h100", 1, 1))
    on = jax.sharding.NamedSharding(mesh, jax.P())
    of = {"q": (K, H), "k": (K, H), "v": (N, V)}
    kept = W - 1 + (tokens if rows == "drafts" else 0)

    def shaped(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=on)

    x = {name: shaped(jnp.bfloat16, B, tokens, *own) for name, own in of.items()}
    taps = {name: shaped(jnp.bfloat16, *own, W) for name, own in of.items()}
    if mamba:
        taps |= {f"bias_{name}": shaped(jnp.bfloat16, *own) for name, own in of.items()}
        taps["skip"] = shaped(jnp.float32, N)
    held = {f"conv_{name}": shaped(jnp.bfloat16, slots, kept, *own) for name, own in of.items()}
    held["state"] = shaped(jnp.float32, slots, N, H, V)
    if rows == "drafts":
        rates = dict.fromkeys(("log_decay", "beta"), shaped(jnp.float32, slots, tokens, N))
        held |= rates | {"start": shaped(jnp.int32, slots)}
    each, one = shaped(jnp.float32, B, tokens, N), shaped(jnp.int32, B)
    given = (x, taps, each, each, one, one, shaped(bool, B, tokens), held, one)
    run = shard_map(functools.partial(remembered, rows), in_specs=jax.P(), out_specs=jax.P())
    with jax.set_mesh(mesh):
        compiled = jax.jit(run, donate_argnums=7).lower(*given).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    pool = 4 * slots * N * H * V
    assert memory.alias_size_in_bytes > pool
    of_drafts = 0.6 if mamba else 0.5  # what reads states is as wide, and states are half as large
    assert memory.temp_size_in_bytes < (of_drafts if rows == "drafts" else 0.1) * pool * B / slots
    # By the names of operations: jax 0.11 tells of a shared line the file of whoever traced it first.
    kernels = re.findall(r'triton".*op_name="[^"]*/(\w+)/pallas_call"', text)
    assert kernels == {"known": ["delta_step"], "drafts": ["delta_drafts"], "in_turn": []}[rows]
    made = set(re.findall(rf" = f32\[{slots},{N},{H},{V}\]\S* ([\w-]+)\(", text))
    assert made <= {"scatter", "fusion", "parameter", "get-tuple-element", "bitcast", "dynamic-update-slice"}, made
