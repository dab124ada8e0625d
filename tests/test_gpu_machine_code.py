"""What becomes of our kernels on GPUs, compiled without one: tensor cores multiply, 16 bytes are read at a time and
before they are used, registers suffice, and a byte takes no more instructions than it did (bench/machine_code.py)."""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import pytest
from gpu_programs import MARKS

from shardlm import topology
from shardlm.bench import machine_code
from shardlm.bench.kernel_cases import FORMS, FULL, FewBits, FewBitsExperts, Paged, Rotations
from shardlm.bench.kernels import kernel_of
from shardlm.ops import choice_kernel, delta_drafts_kernel, delta_step_kernel, states_kernel
from shardlm.ops.delta_drafts import Few
from shardlm.ops.gated_delta import CHUNK, SUMMED
from shardlm.ops.gated_delta_rows import gradients_by_kernel as delta_gradients_by_kernel
from shardlm.ops.gated_delta_rows import kept_outputs_by_kernel
from shardlm.ops.paged_kernel import pallas
from shardlm.ops.summed_rows import gradients_by_kernel
from shardlm.ops.summed_rows import outputs_by_kernel as summed_outputs_by_kernel
from shardlm.ops.sums_of_one import sums_of_one
from shardlm.topology import CHIPS

pytestmark = MARKS
BACK_KERNELS = ("delta_changes_back", "delta_pairs_back", "delta_reads_back")
SPILLED = {"delta_reads_back": 256, "delta_pairs_back": 216, "delta_changes": 8}  # bytes, on an A100
SUMMED_KERNELS = ("states", "outputs", "values_back", "queries_back", "keys_back")


@dataclasses.dataclass(frozen=True)
class Expected:
    """Of one kernel at a shape.

    nbytes   that a block reads from memory in one turn of its loop
    most     PTX instructions of a warp for each of them, on any GPU or by its name
    blocks   that fit on a multiprocessor, at least, on any GPU or by its name
    filled   blocks of the grid for each multiprocessor, at least
    barriers of a turn, at most: more of them move numbers through shared memory
    products instructions of tensor cores of a turn, at most: more of them make the same product in several warps
    spilled  bytes, at most, of what loops go around
    """

    shape: Paged | FewBits | FewBitsExperts
    nbytes: int
    most: float | Mapping[str, float]
    blocks: int | Mapping[str, int]
    filled: float
    barriers: int = 11
    products: Mapping[str, int] = dataclasses.field(default_factory=dict)
    spilled: int = 64


DECODE = FULL["paged attention"]["decode 64 x 4k"]
LATENTS = FULL["paged attention"]["decode 64 x 4k, latents"]
PAIR = 64 * 128 * 2  # of 64 positions, the numbers of key and value of a head
# As compiled with jax 0.10.2, and a little more. At the memory's full rate an H100 issues 0.31 instructions of a warp
# for each byte and an H200 0.22, of SASS, of which there are a third fewer than of PTX in the kernels of few bits: what
# keeps numbers of tiles apart there is in PTX alone (packed_numbers.apart).
CASES = {
    "decode": Expected(DECODE, 2 * PAIR, 0.044, 5, 15),
    "decode, fp8": Expected(dataclasses.replace(DECODE, how="fp8"), PAIR, 0.175, {"h100": 5, "a100": 4}, 15),
    "decode, int8": Expected(dataclasses.replace(DECODE, how="int8"), PAIR, 0.155, 4, 15),
    "decode, latents": Expected(
        *(LATENTS, 64 * 576 * 2, {"h100": 0.09, "a100": 0.115}, 1, 3, 10, {"h100": 40, "a100": 272}),
        spilled=152,  # of jax 0.11 on an A100; 8 of jax 0.10
    ),
    "decode, latents, fp8": Expected(
        dataclasses.replace(LATENTS, how="fp8"), 64 * 576, 0.33, 1, 7, products={"h100": 136}
    ),
    "decode alone": Expected(dataclasses.replace(DECODE, rows=1), 2 * PAIR, 0.044, 5, 0.9),
    "chunk": Expected(
        FULL["paged attention"]["chunk 1 x 2k of 8k"],
        2 * PAIR,
        {"h100": 0.065, "a100": 0.09},
        2,
        7,
        products={"h100": 12, "a100": 128},
    ),
    "int4": Expected(FewBits(1, 4096, 14_336, FORMS["int4"], True), 128 * 32, 0.37, 4, 2.4),
    "int4, 64 rows": Expected(FewBits(64, 4096, 14_336, FORMS["int4"], True), 128 * 32, 0.7, 2, 2.4, 2),
    "int4 with zeros, 64 rows": Expected(
        FewBits(64, 4096, 14_336, FORMS["int4 with zeros"], True), 128 * 64, 0.65, 2, 2.4, 2
    ),
    "int4 with zeros": Expected(FewBits(1, 4096, 14_336, FORMS["int4 with zeros"], True), 128 * 64, 0.33, 3, 2.4),
    "int8": Expected(FewBits(1, 4096, 14_336, FORMS["int8"], True), 128 * 64, 0.21, 4, 2.4),
    "fp8": Expected(FewBits(1, 4096, 14_336, FORMS["fp8"], True), 128 * 64, 0.25, 4, 2.4),
    "mxfp4": Expected(FewBits(1, 4096, 14_336, FORMS["mxfp4"], True), 128 * 64, 0.42, 3, 2.4),
    "experts": Expected(FewBitsExperts(1, 2048, 768, 128, FORMS["int4"], True), 128 * 32, 0.37, 3, 5),
}


@pytest.mark.parametrize("gpu", ["h100", "a100"])
@pytest.mark.parametrize(("width", "how"), [(128, "auto"), (96, "auto"), (128, "fp8"), (128, "int8")])
def test_rotation_and_pages(width, how, gpu):
    """Of 64 rows, with norms: all blocks run at the same time, and nothing stands beside them in a layer."""
    kernel = kernel_of(Rotations(64, 32, 8, width, norms=True, how=how), True)
    key = jax.eval_shape(lambda: jax.random.key(0))
    found = machine_code.kernels(kernel.run, lambda: jax.eval_shape(kernel.inputs, key), gpu)
    [code] = [code for code in found if code.name.startswith("rotate_write")]
    assert code.spilled in (0, None) and code.filled(gpu) <= (code.blocks(gpu) or 32)
    assert code.registers is None or code.registers <= 48
    copies = [code.name for code in found if "copy" in code.name or "scatter" in code.name]
    assert not copies


OF_WEIGHT = 64 * 128 * 2  # of 64 numbers that are summed up, 128 columns in 16 bits
LAYER = {
    # By kernel in their order: queries, keys and values; what goes back to the stream; gate and up; again back. Bytes
    # that a block reads in a turn, and instructions for each of them (H200: 0.22 at the memory's full rate), at most.
    2: ((OF_WEIGHT, 0.03), (OF_WEIGHT, 0.03), (2 * OF_WEIGHT, 0.03), (OF_WEIGHT, 0.03)),
    64: ((OF_WEIGHT, 0.04), (OF_WEIGHT, 0.03), (2 * OF_WEIGHT, 0.045), (OF_WEIGHT, 0.03)),
}


@pytest.mark.parametrize(("rows", "gpu"), [(2, "h200"), (64, "h200"), (2, "a100"), (64, "a100")])
def test_products_of_a_layer(rows, gpu):
    """One kernel for each product or pair of them, which reads ahead and keeps its sums in registers, and of which all
    blocks run at the same time (jax 0.11: of 64 rows on an A100 a pair's 108 of 112)."""
    kernel = kernel_of(FULL["products of a layer"][f"{rows} rows"], True)
    key = jax.eval_shape(lambda: jax.random.key(0))
    found = machine_code.kernels(kernel.run, lambda: jax.eval_shape(kernel.inputs, key), gpu)
    ours = [code for code in found if code.name.startswith("few_rows")]
    assert [code.name.split("__")[0] for code in ours] == ["few_rows", "few_rows", "few_rows_gated", "few_rows"]
    assert len(found) <= 4 + 4  # sums of parts, each with what follows it
    for code, (nbytes, most) in zip(ours, LAYER[rows], strict=True):
        assert code.spilled in (0, None)
        assert code.loop["tensor cores"] and code.loop["read 16 bytes, ahead"] and not code.loop.get("read fewer")
        assert code.blocks(gpu) is None or code.filled(gpu) <= code.blocks(gpu) * (
            1.05 if (rows, gpu) == (64, "a100") else 1
        )
        # Three stages of all blocks of a multiprocessor are under way.
        assert code.filled(gpu) * code.shared_bytes * 3 / 4 > 48_000
        assert code.source != "sass" or code.per_byte(nbytes) < most * (1 + 0.6 * (gpu == "a100"))


@pytest.mark.parametrize("rows", [2, 64])
def test_products_of_a_layer_where_shared_memory_is_short(rows, monkeypatch):
    """For a GPU as an L40S, of 99 KB for a program: of more XLA compiles none."""
    short = dataclasses.replace(CHIPS["a100"], compute_capability=(8, 9), shared_bytes_per_block=99 * 1024)
    monkeypatch.setattr(topology, "CHIPS", {**CHIPS, "a100": short})
    kernel = kernel_of(FULL["products of a layer"][f"{rows} rows"], True)
    key = jax.eval_shape(lambda: jax.random.key(0))
    found = machine_code.kernels(kernel.run, lambda: jax.eval_shape(kernel.inputs, key), "a100")
    [pair] = [code for code in found if code.name == "few_rows_gated"]
    assert 64 * 1024 < pair.shared_bytes <= 99 * 1024


@pytest.mark.parametrize(
    ("case", "gpu"),
    [
        *((case, "h100") for case in CASES),
        *((case, "a100") for case in ("decode, fp8", "decode, latents", "chunk", "int4, 64 rows", "mxfp4")),
    ],
)
def test_kernels(case, gpu):
    expected = CASES[case]
    kernel, key = kernel_of(expected.shape, True), jax.eval_shape(lambda: jax.random.key(0))
    found = machine_code.kernels(kernel.run, lambda: jax.eval_shape(kernel.inputs, key), gpu)
    [code] = [one for one in found if one.name in ("paged_attention", "few_bits_matmul", "few_bits_experts")]
    _check(code, gpu, expected.spilled)
    assert code.filled(gpu) >= expected.filled and code.loop["barriers"] <= expected.barriers
    assert code.loop["tensor cores"] <= expected.products.get(gpu, code.loop["tensor cores"])
    if code.source == "ptx":
        assert code.per_byte(expected.nbytes) <= _of_gpu(expected.most, gpu)
    if code.registers is not None:
        assert code.blocks(gpu) >= _of_gpu(expected.blocks, gpu)


def test_many_parts_are_merged_in_registers():
    """One row of 16k and one kv head of eight, as a device of eight has: 128 parts."""
    kernel = kernel_of(Paged(1, 1, 16_384, 8, 1, 128), True)
    key = jax.eval_shape(lambda: jax.random.key(0))
    found = {
        code.name: code for code in machine_code.kernels(kernel.run, lambda: jax.eval_shape(kernel.inputs, key), "h100")
    }
    assert found["paged_attention"].grid[2] == 128 and found["paged_attention_merge"].spilled in (0, None)
    assert found["paged_attention_merge"].registers in (None, *range(129))


def _of_gpu(number, gpu: str) -> float:
    return number[gpu] if isinstance(number, Mapping) else number


@pytest.mark.parametrize(("back", "gpu"), [(False, "h100"), (True, "a100")])
def test_states_of_linear_attention(back, gpu):
    """2,048 tokens of 32 heads: about a block for each multiprocessor."""
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    each = array(jnp.bfloat16, 32, 1, 32, 128, 128)
    given = array(jnp.float32, 32, 1, 32, 1), each, each, array(jnp.float32, 1, 32, 128, 128)
    run = functools.partial(states_kernel.pallas, back=back)
    [code] = [one for one in machine_code.kernels(run, lambda: given, gpu) if one.name == "chunk_states"]
    _check(code, gpu)
    assert code.filled(gpu) > 0.9


def test_chunks_of_mamba():
    """Nemotron-H 8B's 128 heads: no register is spilled, and two programs or more share a multiprocessor."""
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    B, T, K, N, H, V = 1, 4096, 8, 128, 128, 64
    near = [array(jnp.bfloat16, B, T, *own) for own in ((K, H), (K, H), (N, V))]
    state, rates = array(jnp.float32, B, N, H, V), [array(jnp.float32, B, T, N)] * 2
    given = (*near, *rates, state, array(jnp.int32, B, T), near[-1], state)

    def run(*given):
        return summed_outputs_by_kernel(SUMMED, *given[:7]), gradients_by_kernel(SUMMED, *given)

    found = [code for code in machine_code.kernels(run, lambda: given, "h100") if code.name.startswith("summed_")]
    assert {code.name.partition("__")[0] for code in found} == {f"summed_{name}" for name in SUMMED_KERNELS}
    for code in found:
        assert code.loop["tensor cores"] and code.spilled in (0, None) and code.filled("h100") > 1.9
        assert code.blocks("h100") is None or code.blocks("h100") >= 2


@pytest.mark.parametrize("gpu", ["h100", "a100"])
def test_the_gated_delta_rule_and_its_gradients(gpu):
    """8,192 tokens of Qwen3-Next's 32 heads: no register is spilled on an H100, where programs that do not carry states
    fill a multiprocessor with eight warps or more, and those that carry them have one each. On an A100 208 bytes are
    spilled in one of seven kernels, and 8 in two (jax 0.11: 216 in one of these)."""
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    B, T, K, N, H, V = 1, 8192, 16, 32, 128, 128
    near = [array(jnp.bfloat16, B, T, *own) for own in ((K, H), (K, H), (N, V))]
    state = array(jnp.float32, B, N, H, V)
    given = *near, *[array(jnp.float32, B, T, N)] * 2, state, array(jnp.int32, B, T), near[-1], state

    def run(*given):
        *made, kept = kept_outputs_by_kernel(CHUNK, *given[:7])
        return made, delta_gradients_by_kernel(CHUNK, kept, *given)

    found = machine_code.kernels(run, lambda: given, gpu)
    codes = {code.name.partition("__")[0]: code for code in found}
    carry, others = ("delta_states", "delta_states_back"), ("delta_changes", "summed_outputs", *BACK_KERNELS)
    for name in carry:
        _check(codes[name], gpu)
        assert codes[name].filled(gpu) > 0.9 and codes[name].spilled in (0, None)
    for name in others:
        code = codes[name]
        assert (code.spilled or 0) <= (SPILLED.get(name, 0) if gpu == "a100" else 0)
        assert code.blocks(gpu) is None or code.blocks(gpu) * code.threads >= 256


@pytest.mark.parametrize("gpu", ["h100", "a100"])
def test_steps_of_linear_attention(gpu):
    """64 rows of Qwen3-Next's 32 heads: what blocks read at once covers the memory's latency (16 KB each, where 40 KB
    of a multiprocessor would)."""
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    B, N, H, V = 64, 32, 128, 128
    near = [array(jnp.bfloat16, B, 1, heads, H) for heads in (16, 16, N)]
    rates, held = [array(jnp.float32, B, 1, N)] * 2, array(jnp.float32, 200, N, H, V)
    given = *near, *rates, held, array(jnp.int32, B, 1), array(jnp.int32, B)
    found = machine_code.kernels(delta_step_kernel.pallas, lambda: given, gpu)
    [code] = [one for one in found if one.name == "delta_step"]
    assert code.spilled in (0, None) and code.filled(gpu) > 50
    assert code.blocks(gpu) is None or code.blocks(gpu) >= 5


@pytest.mark.parametrize("drafts", [2, 5])
def test_drafts_of_linear_attention(drafts):
    """The same of the tokens of two steps."""
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    B, N, H, V, T = 64, 32, 128, 128, 1 + drafts
    C = 2 * T
    shapes = (C + T, H), (C,), (C, V), (C, C), (T, C), (C - T, H), (1,)
    few, slot = Few(*(array(B, N, *shape) for shape in shapes)), jax.ShapeDtypeStruct((B,), jnp.int32)
    found = machine_code.kernels(delta_drafts_kernel.pallas, lambda: (few, array(200, N, H, V), slot), "h100")
    [code] = [one for one in found if one.name == "delta_drafts"]
    assert code.spilled in (0, None)
    assert code.blocks("h100") is None or code.blocks("h100") >= 4


def test_choice_of_tokens():
    """DeepSeek V3.2's, of 128 queries of a text of 128k: scores are multiplied by tensor cores, and those that a block
    goes over are read 16 bytes at a time."""
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    T, pages = 128, 8192
    given = array(jnp.bfloat16, 1, T, 64, 128), array(jnp.float32, 1, T, 64), array(jnp.int32, 1, T)
    held = array(jnp.bfloat16, pages + 1, 16, 1, 128), array(jnp.int32, 1, pages), array(jnp.int32)

    def run(q, weights, positions, pool, table, first):
        pages = {"pool": pool, "scale": None, "page_table": table, "first_page": first}
        return choice_kernel.chosen(choice_kernel.scored(q, weights, positions, **pages), positions, table, 2048, 16)

    found = {code.name: code for code in machine_code.kernels(run, lambda: (*given, *held), "h100")}
    _check(found["index_scores"], "h100")
    assert found["index_scores"].blocks("h100") >= 4 and found["choose_tokens"].blocks("h100") >= 2
    assert found["choose_tokens"].loop["read 16 bytes"] and not found["choose_tokens"].spilled


def _check(code: machine_code.Code, gpu: str, spilled: int = 64) -> None:
    loop = code.loop
    assert loop["tensor cores"] and loop["read 16 bytes, ahead"] and not loop.get("spilled")
    assert loop.get("read fewer, ahead", 0) <= 8  # what says where to read, and x, 8 bytes at a time
    assert code.shared_bytes <= {"h100": 232_448, "a100": 166_912}[gpu]
    if code.registers is None:
        pytest.skip("no ptxas here: registers and what is spilled of them are not known (pip install nvidia-cuda-nvcc)")
    assert code.spilled <= spilled


def test_what_is_left_for_each_byte():
    """4 instructions a clock of 132 multiprocessors at 1.98 GHz, and 3.35 TB/s."""
    assert machine_code.left_per_byte("h100") == pytest.approx(4 * 132 * 1.98e9 / 3.35e12)


@pytest.mark.parametrize("gpu", ["h100", "a100"])
def test_matrices_that_sum_to_one_stay_in_registers(gpu):
    """Forward a kernel of its own for all iterations, and one for the gradient."""
    scores = jax.ShapeDtypeStruct((1, 2048, 4, 4), jnp.float32)
    run = functools.partial(sums_of_one, iterations=20, eps=1e-6)
    both = {
        "sums_of_one": (run, (scores,)),
        "sums_of_one_back": (lambda a, g: jax.vjp(run, a)[1](g), (scores, scores)),
    }
    for name, (compute, given) in both.items():
        [code] = machine_code.kernels(compute, lambda given=given: given, gpu)
        assert code.name == name and not code.spilled and code.grid == (64, 1, 1)


@pytest.mark.parametrize("gpu", ["h100", "a100"])
def test_a_chunk_with_images(gpu):
    """Of Gemma 3's sizes: tokens of an image see those after them, by the kernel of other chunks."""
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    pool = array(jnp.bfloat16, 1024, 16, 8, 256)
    rows = array(jnp.int32, 1, 2048)

    def run(q, k, v, table, positions, **ahead):
        return pallas(q, k, v, table, positions, jnp.int32(0), 0.06, 1024, **ahead)

    given = array(jnp.bfloat16, 1, 2048, 16, 256), pool, pool, array(jnp.int32, 1, 512), rows
    found = machine_code.kernels(run, lambda: given, gpu)
    found += machine_code.kernels(lambda until, *rest: run(*rest, until=until), lambda: (rows, *given), gpu)
    plain, ahead = (code for code in found if code.name == "paged_attention")
    assert not ahead.spilled or ahead.spilled <= plain.spilled
    assert ahead.loop["all"] <= 1.1 * plain.loop["all"]  # of blocks that not all rows see
    assert ahead.blocks(gpu) == plain.blocks(gpu)
