"""Training with 8-bit matmuls: one result on every mesh, what the compiled GPU program multiplies and moves, refusals,
and loss curves beside those of the compute dtype."""

import dataclasses
import functools
import pathlib
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
from gpu_programs import on_gpus
from small import init, mesh_of, model_on, on_devices, packed_batch

from shardlm.config import resolve
from shardlm.errors import ShardlmError
from shardlm.mesh import MeshSpec
from shardlm.models.llama import LlamaConfig
from shardlm.optim import OptimConfig
from shardlm.topology import topology
from shardlm.train.check import check_matmul
from shardlm.train.config import RunConfig, TrainConfig
from shardlm.train.program import Program
from shardlm.train.step import StepConfig, gradients

CONFIGS = pathlib.Path(__file__).parent.parent / "configs"


def loss_and_gradients(spec: MeshSpec, matmul: str, accumulation: int = 1):
    with jax.set_mesh(mesh_of(spec)):
        model = model_on(spec, remat="full", matmul=matmul, microbatches=accumulation)
        step = StepConfig(accumulation=accumulation)
        run = jax.jit(lambda p, b: gradients(model, p, b, jnp.float32(1), step)[:2])
        grads, losses = run(init(model), on_devices(packed_batch(), model))
        return jax.tree.map(np.asarray, (grads, losses["loss"]))


@functools.cache
def one_device(matmul: str):
    return loss_and_gradients(MeshSpec(), matmul)


def distance(grads, reference) -> float:
    """Norm of the difference over the norm, of all gradients together."""
    pairs = list(zip(jax.tree.leaves(grads), jax.tree.leaves(reference), strict=True))
    return float(np.sqrt(sum(np.sum((a - b) ** 2) for a, b in pairs) / sum(np.sum(b**2) for _, b in pairs)))


MESHES = (MeshSpec(fsdp=8), MeshSpec(fsdp=2, tensor=4), MeshSpec(data=2, fsdp=2, tensor=2))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("spec", MESHES, ids=str)
@pytest.mark.parametrize("matmul", [pytest.param("fp8", marks=pytest.mark.wide), "int8"])
def test_every_mesh_gives_the_same(matmul, spec):
    grads, loss = loss_and_gradients(spec, matmul)
    # Float32 sums in another order differ by 1e-7, and by a step of 8 bits where that moves a value across a rounding
    # boundary: 1/127 of a token's largest value in int8 (measured: loss 2.8e-5, gradients 0.0026; fp8 1.1e-7, 5.6e-8).
    assert loss == pytest.approx(one_device(matmul)[1], rel=1e-4)
    assert distance(grads, one_device(matmul)[0]) < 0.01


@pytest.mark.sampled(1)
@pytest.mark.parametrize("spec", [MeshSpec(), MeshSpec(pipeline=2, fsdp=2, tensor=2)], ids=str)
@pytest.mark.parametrize("matmul", ["fp8", pytest.param("int8", marks=pytest.mark.wide)])
def test_gradients_are_those_of_float32_within_8_bits(matmul, spec):
    # A stage scales by the rows that it holds: other 8-bit numbers, with errors of the same size.
    grads, loss = loss_and_gradients(spec, matmul, accumulation=2) if spec.pipeline > 1 else one_device(matmul)
    exact, exact_loss = one_device("dtype")
    assert 1e-6 < abs(loss - exact_loss) < 0.01  # measured: 0.002 and 0.0001, of 4.2
    # The error of three products a projection, through three layers (measured: 0.15 and 0.024).
    assert 0.005 < distance(grads, exact) < {"fp8": 0.25, "int8": 0.05}[matmul]


def text_batches(vocab: int = 128, rows: int = 4, length: int = 64):
    """Windows of generated source code, a byte a token."""
    text = np.frombuffer(tiny_run.TEXT.encode(), np.uint8).astype(np.int32)
    rng = np.random.default_rng(0)
    for _ in range(1000):
        starts = rng.integers(0, len(text) - length - 1, rows)
        windows = np.stack([text[s : s + length + 1] for s in starts])
        yield {
            "tokens": windows[:, :-1],
            "targets": windows[:, 1:],
            "segment_ids": np.ones((rows, length), np.int32),
            "positions": np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
            "loss_mask": np.ones((rows, length), np.float32),
        }


def curve(matmul: str, steps: int = 40) -> np.ndarray:
    model = LlamaConfig(
        vocab_size=128, embed_dim=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, mlp_dim=128,
        rope_theta=10_000.0,
    )  # fmt: skip
    config = RunConfig(
        model,
        mesh=MeshSpec(),
        precision="bf16",
        matmul=matmul,
        remat="none",
        optim=OptimConfig(learning_rate=1e-2, warmup_steps=10, weight_decay=0.0),
        train=TrainConfig(steps=steps, global_batch=4, seq_len=64),
    )
    program = Program.make(config, mesh_of(config.mesh))
    losses = []
    with jax.set_mesh(program.mesh):
        state, step = program.init(), program.lower_step().compile()
        for _, batch in zip(range(steps), text_batches(), strict=False):
            state, metrics = step(state, {n: jax.device_put(a, program.batch_sharding) for n, a in batch.items()})
            losses.append(float(metrics["loss"]))
    return np.array(losses)


@pytest.mark.wide
def test_loss_curves_follow_that_of_bfloat16():
    plain = curve("dtype")
    last = plain[-10:].mean()
    print("MEASURED plain", plain[0], last)
    assert last < plain[0] / 8  # the model has learned most of what there is (measured: from 5.70 to 0.58; later 0.41)
    for matmul in ("fp8", "int8"):
        low = curve(matmul)
        assert np.all(np.isfinite(low))
        assert low[-10:].mean() < last + 0.02  # measured: 0.012 and 0.022 below
        assert np.abs(low - plain).mean() < 0.05  # measured: 0.021 and 0.013


def test_refusals():
    class Gpu:
        platform, device_kind, compute_capability = "gpu", "NVIDIA A100-SXM4-80GB", "8.0"

    class Unlisted(Gpu):
        device_kind, compute_capability = "NVIDIA L4", "8.9"

    remedy = r"A100-SXM4-80GB: its matrix units do not take fp8.*compute capability 8\.9.*set matmul to int8 or dtype"
    with pytest.raises(ShardlmError, match=remedy):
        check_matmul("fp8", "bf16", Gpu())
    with pytest.raises(ShardlmError, match="matrix units do not take fp8"):
        check_matmul("fp8", "bf16", type("Old", (Unlisted,), {"compute_capability": "7.5"})())
    with pytest.raises(ShardlmError, match=r"matmul=int8 with precision=fp16.*65,504.*set precision to bf16"):
        check_matmul("int8", "fp16", Gpu())
    check_matmul("int8", "bf16", Gpu())
    check_matmul("fp8", "bf16", Unlisted())
    check_matmul("fp8", "bf16", jax.devices()[0])


def step_on(gpu: str, mesh: MeshSpec, **changes):
    config = dataclasses.replace(resolve(str(CONFIGS / "llama3_8b.py"), []).config, mesh=mesh, **changes)
    program = Program.make(config, config.mesh.build(topology(gpu, 1, 8)))
    return program.lower_step(), dict(program.xla_options().options)


def products(text: str) -> Counter:
    """(type, type) -> number of the matmuls with operands of these types, in Triton's fusions and in cuBLASLt calls."""
    found = Counter()
    for computation in re.findall(r"^(?:ENTRY )?%?[\w.\-]+ [^\n]*\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL):
        types = dict(re.findall(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\w+)\[", computation, re.MULTILINE))
        calls = r" (?:dot|custom-call)\(%?([\w.\-]+), %?([\w.\-]+)[,)](.*)"
        for first, second, rest in re.findall(calls, computation):
            if "custom_call_target" not in rest or "matmul" in rest:
                found[types.get(first), types.get(second)] += 1
    return found


@on_gpus
def test_h100_multiplies_fp8_and_gathers_8_bits():
    lowered, options = step_on("h100", MeshSpec(fsdp=4, tensor=2), matmul="fp8")
    text = lowered.compile(options).as_text()
    found = products(text)
    assert found["f8e4m3fn", "f8e4m3fn"] and found["f8e5m2", "f8e4m3fn"] and found["f8e4m3fn", "f8e5m2"]
    # In 16 bits remain the head's matmuls alone: forward, and both gradients.
    assert {pair for pair in found if None not in pair and "bf16" in pair} == {("bf16", "bf16")}
    assert found["bf16", "bf16"] <= 6
    gathered = re.findall(r" = (.*?) all-gather(?:-start)?\(", text)
    types = {shape: set() for shape in ("4096,7168", "7168,4096", "2,8192,4096")}
    for dtype, shape in re.findall(r"(\w+)\[([\d,]+)\]", " ".join(gathered)):
        types.get(shape, set()).add(dtype)
    # This GPU's share of the MLP's weights is gathered over fsdp in 8 bits, and so are the gradients of a row's outputs
    # over the sequence; activations between blocks are still gathered in 16 bits.
    assert types == {"4096,7168": {"f8e4m3fn"}, "7168,4096": {"f8e4m3fn"}, "2,8192,4096": {"bf16", "f8e5m2"}}


@on_gpus
def test_cublaslt_takes_every_fp8_product_when_triton_does_not():
    """On a GPU XLA chooses between the two by timing them; both must be able to."""
    lowered, _ = step_on("h100", MeshSpec(fsdp=8), matmul="fp8")
    text = lowered.compile({"xla_gpu_enable_triton_gemm": False}).as_text()
    calls = [line for line in text.splitlines() if '"__cublas$lt$matmul$f8"' in line]
    assert len(calls) == 7 + 6 + 2 * 7  # forward, again in the backward pass but for the last, and two gradients
    # The scales are arguments of the kernel, not a pass over its result.
    assert all("bf16[" in line.split("custom-call")[0] for line in calls)


@on_gpus
def test_an_a100_is_refused_before_anything_compiles():
    with pytest.raises(ShardlmError, match=r"matmul=fp8 on NVIDIA A100-SXM4-80GB.*set matmul to int8"):
        step_on("a100", MeshSpec(fsdp=8), matmul="fp8")
