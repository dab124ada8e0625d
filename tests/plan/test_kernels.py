"""The time of single kernels: the roofline's two sides, tiles and waves by hand, and what others measured."""

import dataclasses
import json
import math
import pathlib
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlm.hardware import GPUS, Gpu
from shardlm.plan.constants import GAP
from shardlm.plan.kernels import Kernels
from shardlm.plan.op import Op
from shardlm.plan.serving.time import kernel_seconds

MEASURED = json.loads((pathlib.Path(__file__).parents[2] / "benchmarks" / "achieved.json").read_text())
H100 = Kernels.of(GPUS["h100"])


def product(rows: float, n: float, k: float, dtype: str = "bf16") -> Op:
    moved = 2 * (rows * n + rows * k + n * k)
    return Op("mlp", "up", "matmul", 2.0 * rows * n * k, moved, 1, dims=(rows, n, k), dtype=dtype)


def scores(tokens: int, heads: int, width: int) -> Op:
    pairs = tokens * (tokens + 1) / 2
    keys = pairs / tokens
    return Op("attention", "scores", "attention", 4.0 * pairs * heads * width, 0, 1, dims=(tokens, keys, width))


def test_large_products_run_at_the_rate_and_thin_ones_at_memory():
    large = product(132 * 256, 128 * 64, 8192)  # whole waves of whole tiles
    rate = 989.4e12 * 0.803 * 0.80
    assert H100.forward_seconds(large) == pytest.approx(large.flops / rate + GAP, rel=1e-6)
    thin = product(8, 8192, 8192)
    assert H100.forward_seconds(thin) == pytest.approx(thin.hbm_bytes / (3.35e12 * 0.87) + GAP)


def test_ultras_hold_more_of_their_rates_by_the_power_they_are_sold_with():
    clocks = {name: Kernels.of(GPUS[name]).clock for name in ("b200", "gb200", "b300", "gb300")}
    assert clocks["b200"] == clocks["gb200"] == 0.70  # what `sustained` was chosen with
    assert clocks["b300"] == pytest.approx(0.70 * (1100 / 1000) ** 0.5)
    assert clocks["gb300"] == pytest.approx(0.70 * ((1400 / 2500) / (1000 / 2250)) ** 0.5)
    assert Kernels.of(GPUS["gb300"]).achieved.matmul == Kernels.of(GPUS["b300"]).achieved.matmul == 0.786
    capped = dataclasses.replace(GPUS["gb300"], watts=1200)  # a limit below what it is sold with
    assert Kernels.of(capped).clock == pytest.approx(clocks["gb300"] * (1200 / 1400) ** 0.5)
    more = dataclasses.replace(GPUS["h100"], watts=1000)  # not known to run faster
    assert Kernels.of(more).clock == H100.clock
    assert Kernels.of(GPUS["b300"]).matmul_rate("int8") < Kernels.of(GPUS["b300"]).matmul_rate("fp8") / 20


def test_a_wave_that_is_hardly_begun_costs_a_whole_one():
    whole = H100.tiled_seconds(132 * 256, 128, 4096, 1, "bf16")
    assert H100.tiled_seconds(132 * 256 + 1, 128, 4096, 1, "bf16") > 1.2 * whole
    smooth = dataclasses.replace(H100, cores=0)
    assert smooth.tiled_seconds(132 * 256 + 256, 128, 4096, 1, "bf16") == pytest.approx(whole * 133 / 132)


def test_products_of_experts_fill_the_cores_together():
    one = product(512, 2048, 2048)
    together = dataclasses.replace(one, flops=16 * one.flops)
    assert H100.forward_seconds(one) < H100.forward_seconds(together) < 16 * H100.forward_seconds(one)


def test_eight_bits_are_faster_where_there_are_units_and_cost_casts():
    large, eight = product(16384, 8192, 8192), product(16384, 8192, 8192, "fp8")
    assert 0.5 < H100.forward_seconds(eight) / H100.forward_seconds(large) < 0.7
    small, narrow = product(256, 256, 256), product(256, 256, 256, "fp8")
    assert H100.forward_seconds(narrow) > H100.forward_seconds(small)
    a100 = Kernels.of(GPUS["a100"])
    assert a100.matmul_rate("fp8") == a100.matmul_rate("bf16")


def test_rows_that_are_drawn_need_a_tile_more_for_half_of_the_experts():
    smooth = dataclasses.replace(H100, cores=0)
    even = smooth.tiled_seconds(1024, 4096, 7168, 32, "bf16")
    assert smooth.tiled_seconds(1024, 4096, 7168, 32, "bf16", drawn=True) / even == pytest.approx(8.5 / 8, rel=1e-3)
    draw = random.Random(0)
    draws = [sum(draw.random() < 1 / 64 for _ in range(64 * 120)) for _ in range(100)]
    tiles = statistics.mean(math.ceil(rows / 128) for rows in draws)  # of 120 rows on average
    one = smooth.tiled_seconds(128, 4096, 7168, 32, "bf16")
    assert smooth.tiled_seconds(120, 4096, 7168, 32, "bf16", drawn=True) / one == pytest.approx(tiles, rel=0.05)


def test_passes_move_what_they_say_and_weights_are_cast_and_added_as_they_say():
    one = Op("attention", "rotated", "memory", 0, 1e9, 2, 1, gradient_bytes=3e9)
    assert H100.forward_seconds(one) == pytest.approx(1e9 / H100.memory + GAP)
    assert H100.gradient_seconds(one) == pytest.approx(3e9 / H100.memory + GAP)
    twice = dataclasses.replace(one, gradient_bytes=None)
    assert H100.gradient_seconds(twice) == pytest.approx(2 * H100.forward_seconds(one))
    eight = product(512, 8192, 8192, "fp8")
    kept = dataclasses.replace(eight, cast_weights=1 / 8)
    saved = H100.forward_seconds(eight) - H100.forward_seconds(kept)
    assert saved == pytest.approx(7 / 8 * 4 * 8192 * 8192 / H100.memory)
    thin = product(8, 8192, 8192)
    added = dataclasses.replace(thin, added_bytes=6 * 8192 * 8192)
    assert H100.gradient_seconds(added) - H100.gradient_seconds(thin) == pytest.approx(6 * 8192 * 8192 / H100.memory)
    assert H100.forward_seconds(added) == H100.forward_seconds(thin)


def test_less_power_is_slower_and_more_is_not_faster():
    def rate(watts: float) -> float:
        return Kernels.of(dataclasses.replace(GPUS["h100"], watts=watts)).matmul_rate("bf16")

    assert rate(500) / rate(700) == pytest.approx(math.sqrt(500 / 700), rel=1e-3)
    assert rate(900) == pytest.approx(rate(700), rel=1e-3)


def test_attention_is_faster_on_long_rows_and_wide_heads_and_slower_unfused():
    def rate(op: Op, kernels: Kernels = H100) -> float:
        return op.flops / kernels.forward_seconds(op)

    assert rate(scores(512, 512, 128)) < rate(scores(2048, 128, 128)) < rate(scores(16384, 64, 128))
    assert rate(scores(8192, 64, 64)) < rate(scores(8192, 64, 128)) < rate(scores(8192, 64, 256))
    long = scores(8192, 64, 128)
    kinds = ("cudnn", "flash2", "triton", "xla")
    newer, older, first, none = (rate(long, Kernels.of(GPUS["h100"], kind)) for kind in kinds)
    assert newer > 1.5 * older > 1.5 * first > 2 * none
    assert H100.gradient_seconds(long) > 2.5 * H100.forward_seconds(long)
    ultra, b200 = (unthrottled(GPUS[name]) for name in ("gb300", "gb200"))
    assert rate(long, ultra) > 1.15 * rate(long, b200)


@given(
    rows=st.integers(1, 1 << 17),
    n=st.integers(1, 1 << 15),
    k=st.integers(1, 1 << 15),
    gpu=st.sampled_from(sorted(GPUS)),
)
def test_no_kernel_beats_the_peak_or_gains_from_more_work(rows: int, n: int, k: int, gpu: str):
    kernels, card = Kernels.of(GPUS[gpu]), GPUS[gpu]
    op = product(rows, n, k)
    seconds = kernels.forward_seconds(op)
    assert seconds >= op.flops / card.peak.bf16
    assert seconds >= op.hbm_bytes / card.hbm_bytes_per_second
    assert kernels.forward_seconds(product(2 * rows, n, k)) >= seconds
    assert kernels.forward_seconds(product(rows, n, 2 * k)) >= seconds
    assert kernels.gradient_seconds(op) >= 2 * op.flops / card.peak.bf16


def unthrottled(gpu: Gpu, attention: str = "cudnn") -> Kernels:
    """Benchmarks of single kernels are short: none of what a whole step loses."""
    return dataclasses.replace(Kernels.of(gpu, attention), clock=1.0)


def test_products_of_experts_lose_where_little_is_summed_as_others_measured():
    """DeepGEMM on an H800, 8 bits, of its best; each [8192, k] x [k, 4096], four of them."""

    def rate(k: int) -> float:
        one = product(8192, 4096, k, "fp8")
        four = dataclasses.replace(one, flops=4 * one.flops, hbm_bytes=0.0, grouped=True)
        return four.flops / unthrottled(GPUS["h100"]).one_seconds(four)

    best = rate(16384)
    for k, measured in ((512, 590), (1536, 990), (2048, 1099), (7168, 1297)):
        assert rate(k) / best == pytest.approx(measured / 1358, rel=0.12), k
    one = product(512, 2048, 2048, "fp8")
    many = dataclasses.replace(one, flops=16 * one.flops, hbm_bytes=16 * one.hbm_bytes)
    plain = dataclasses.replace(many, dtype="bf16")
    casts = H100.forward_seconds(many) - H100.one_seconds(many)  # all 16 experts' operands are cast, not one's
    assert casts == pytest.approx(16 * 4 * (512 + 2048) * 2048 / H100.memory + GAP)
    assert H100.forward_seconds(plain) == H100.one_seconds(plain)


def test_products_take_what_others_measured():
    errors = []
    for one in MEASURED["matmul"]:
        if one["m"] and one["gpu"] in GPUS:
            op = product(one["m"], one["n"], one["k"], {"fp16": "bf16"}.get(one["dtype"], one["dtype"]))
            op = dataclasses.replace(op, hbm_bytes=0.0)
            kernels = unthrottled(GPUS[one["gpu"]])
            seconds = kernels.tiled_seconds(*op.dims, 1, op.dtype) + GAP  # 8-bit operands came as such
            errors.append(abs(seconds / (op.flops / (one["tflops_per_second"] * 1e12)) - 1))
    assert len(errors) >= 30
    assert statistics.median(errors) < 0.15


def test_attention_takes_what_others_measured():
    errors = []
    for one in MEASURED["attention"]:
        kinds = {"flash-attention-3": "cudnn", "flash-attention-2": "flash2", "flash-attention-4": "cudnn"}
        kinds |= {"cudnn": "cudnn"} if GPUS[one["gpu"]].generation == "blackwell" else {}
        length = one["seq_len"]
        if not length or one["kernel"] not in kinds or one["head_dim"] is None or one["causal"] is not True:
            continue
        if one["head_dim"] == 192:  # with values of 128: constants.py at ATTENTION_WIDTH
            continue
        kernels = unthrottled(GPUS[one["gpu"]], kinds[one["kernel"]])
        op = scores(length, (1 << 20) // length, one["head_dim"])
        backward = one["direction"] == "backward"
        took = kernels.gradient_seconds(op) / 2.5 if backward else kernels.forward_seconds(op)
        errors.append(abs(op.flops / took / (one["tflops_per_second"] * 1e12) - 1))
        if one["kernel"] == "cudnn":
            assert errors[-1] < 0.10, one
    assert len(errors) >= 23
    assert statistics.median(errors) < 0.12


def test_some_rows_more_than_a_tile_are_not_twice_the_work():
    """Of decoding: 129 rows are tiles of 160 (cublasLtMatmulTile_t), and were as long as 256."""
    seconds = [
        kernel_seconds(
            Op("mlp", "up", "matmul", 2.0 * rows * 57_344 * 8192, 0, 1, dims=(rows, 57_344, 8192), dtype="bf16"), H100
        )
        for rows in (128, 129, 256)
    ]
    assert 1.05 < seconds[1] / seconds[0] < 1.4 and seconds[2] > 1.8 * seconds[0]


FEW_ROWS_MEASURED = [  # rows, n, k, TFLOP/s in fp8 on an H800 (DeepGEMM's README at 7a70b43, 2025-02)
    (64, 2112, 7168, 206),
    (64, 24576, 1536, 289),
    (64, 32768, 512, 219),
    (64, 7168, 16384, 336),
    (64, 4096, 7168, 287),
    (64, 7168, 2048, 295),
    (128, 2112, 7168, 352),
    (128, 24576, 1536, 535),
    (128, 32768, 512, 358),
    (128, 7168, 16384, 645),
    (128, 4096, 7168, 533),
    (128, 7168, 2048, 510),
    (4096, 7168, 16384, 1358),
]


def test_products_of_some_hundred_rows_take_longer_than_either_side():
    """Neither reading nor multiplying hides the other whole: by the longer of the two the median is 0.79."""
    ratios = []
    for rows, n, k, reached in FEW_ROWS_MEASURED:
        flops, moved = 2.0 * rows * n * k, n * k + rows * k + 2.0 * rows * n
        op = Op("mlp", "up", "matmul", flops, moved, 1, dims=(rows, n, k), dtype="fp8")
        ratios.append((kernel_seconds(op, H100) - GAP) / (flops / (reached * 1e12)))
    *few, large = ratios
    assert statistics.median(few) == pytest.approx(1.0, abs=0.05) and min(few) > 0.7 and max(few) < 1.25
    assert large == pytest.approx(1.0, abs=0.05)
    hidden = H100.unhindered.tiled_seconds(4096, 7168, 16384, 1, "fp8")
    assert kernel_seconds(op, H100) > hidden + GAP
