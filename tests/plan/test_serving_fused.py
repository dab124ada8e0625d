"""Plans of engines that may have fused products (layers/fused.py): by which way they stand, and what they tell."""

import dataclasses
import itertools

import pytest

from shardlm.hardware import GPUS
from shardlm.layers.attention import AttentionConfig
from shardlm.layers.block import BlockConfig
from shardlm.layers.mlp import MlpConfig
from shardlm.mesh import MeshSpec
from shardlm.models.llama import LlamaConfig
from shardlm.plan.cluster import Cluster
from shardlm.plan.constants import GAP
from shardlm.plan.op import Op
from shardlm.plan.report.figures import figure
from shardlm.plan.serving.answer import RankedServing, ServingAnswer
from shardlm.plan.serving.case import ServedModel, ServingCase
from shardlm.plan.serving.fused import fused
from shardlm.plan.serving.memory import serving_memory
from shardlm.plan.serving.report.data import to_json
from shardlm.plan.serving.report.text import to_text
from shardlm.plan.serving.search import Found, ServingPlan
from shardlm.plan.serving.time import Speed
from shardlm.serve.engine_config import EngineConfig


def on(count: int, gpu: str = "h200", **options) -> ServingCase:
    model = ServedModel("llama", LlamaConfig().transformer(), "bfloat16", 8192)
    return ServingCase(model, Cluster.of(GPUS[gpu], count), EngineConfig(**options), 1024, 256)


def said(plan: ServingPlan) -> str:
    return " ".join(to_text(to_json(ServingAnswer(Found((plan,), ()), (RankedServing(plan),)))).split())


def test_they_are_told_beside_what_is_planned():
    """An engine that tries them out is planned without where they were not measured; one that is told to have them,
    with."""
    auto, off, wanted = (ServingPlan.of(on(1, "a100", fused_products=how)) for how in ("auto", "off", "on"))
    assert auto.decode == off.decode and not off.fused and not wanted.fused
    assert [step.batch for step in auto.fused] == [1, 8, 32, 64] and auto.fused == wanted.decode[:4]
    assert wanted.decode[4:] == auto.decode[4:]  # more tokens than they take
    gained = [(a.seconds - b.seconds) / 32 for a, b in zip(auto.decode, auto.fused, strict=False)]
    assert all(6 * GAP <= each < 9 * GAP for each in gained)  # kernels of a layer, and fuller tiles of 64 rows
    rates = [f"{figure(step.tokens_per_second)} at {step.batch}" for step in auto.fused]
    assert f"up to {', '.join(rates)} tokens/s: their kernels are counted, none was measured there" in said(auto)
    assert "fused kernels" not in said(wanted) and "--fused_products=on" in said(wanted)


def test_they_are_planned_where_they_were_measured():
    """On one Hopper, by seconds that were (benchmarks/results/gpu_h200.json)."""
    auto, wanted = (ServingPlan.of(on(1, fused_products=how)) for how in ("auto", "on"))
    assert auto.decode == wanted.decode and not auto.fused and "fused kernels" not in said(auto)
    served = on(1, max_model_len=4096)
    speed = Speed.of(served, serving_memory(served))
    for rows, measured in ((1, 4.43e-3), (8, 4.77e-3), (64, 6.85e-3)):
        assert speed.decode(rows, 637).seconds == pytest.approx(measured, rel=0.06)


@pytest.mark.parametrize(("tensor", "rows", "kernels"), [(1, 8, 9), (1, 64, 9), (2, 8, 12), (4, 64, 12)])
def test_kernels_of_a_layer(tensor, rows, kernels):
    """As tests/test_gpu_serving.py counts them; those over several devices were read from programs compiled by hand.
    A gate over two devices has so few columns that another kernel multiplies with it."""
    case = on(tensor, mesh=MeshSpec(tensor=tensor), fused_products="on")
    speed = Speed.of(case, serving_memory(case))
    (work, layers), *_ = speed._works(0, speed._decoding(rows, 1024))
    assert layers == 32 and sum(op.count for op in work.ops) == kernels
    apart = Speed.of(on(tensor, mesh=case.engine.mesh, fused_products="off"), speed.memory)
    (before, _), *_ = apart._works(0, speed._decoding(rows, 1024))
    assert sum(op.count for op in before.ops) == 15
    for name, most in (("flops", 1e-9), ("hbm_bytes", 0.02)):  # what small kernels read and write is little
        total, own = (sum(getattr(op, name) * op.count for op in one.ops) for one in (before, work))
        assert own == pytest.approx(total, rel=most) and own <= total


def test_a_gate_that_is_cut_to_a_share_is_not_joined():
    """As Gemma 3n's first layers have it, and layers/mlp.py."""
    ops = [Op("mlp", what, "matmul", 1.0, 1.0, 1, dims=(8, 512, 512)) for what in ("gate", "up", "down")]
    block = BlockConfig(AttentionConfig(4, 2, 128), MlpConfig(512, "gelu_tanh"))
    cut = dataclasses.replace(block, mlp=dataclasses.replace(block.mlp, sparsity=0.95))
    assert [op.what for op in fused(ops, block, False)] == ["gate up", "down"]
    assert [op.what for op in fused(ops, cut, False)] == ["gate", "up", "down"]


def test_what_is_not_gated_keeps_its_activation():
    shape = LlamaConfig().transformer()
    [segment] = shape.segments
    [block] = segment.pattern
    ungated = dataclasses.replace(block, mlp=dataclasses.replace(block.mlp, gated=False, activation="relu2"))

    def kernels(of, fused: str) -> float:
        own = dataclasses.replace(shape, segments=(dataclasses.replace(segment, pattern=(of,)),))
        case = dataclasses.replace(on(1, fused_products=fused), model=ServedModel("own", own, "bfloat16", 8192))
        speed = Speed.of(case, serving_memory(case))
        (work, _), *_ = speed._works(0, speed._decoding(8, 1024))
        return sum(op.count for op in work.ops)

    # Queries, keys and values are two less, and rotation and writes too; gate and up one, and what gates is not there.
    assert [kernels(of, "off") - kernels(of, "on") for of in (block, ungated)] == [6, 4]


def test_drafts_are_tokens_of_a_step():
    asked = {"method": "ngram", "num_speculative_tokens": 3}
    model = ServedModel("llama", LlamaConfig().transformer(), "bfloat16", 8192)
    engine = EngineConfig(speculative_config=asked)
    case = ServingCase(model, Cluster.of(GPUS["a100"], 1), engine, 1024, 256, acceptance_rate=0.5)
    assert [step.batch for step in ServingPlan.of(case).fused] == [1, 8]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"quantization": "fp8"}, False),
        ({"dtype": "float16"}, False),
        ({"enable_lora": True}, False),
        ({"mesh": MeshSpec(pipeline=2)}, True),  # stages do not try out
    ],
)
def test_none_are_told_of_an_engine_that_has_none(options, told):
    """`told`: whether it has them if it is told to."""
    plan, wanted = (ServingPlan.of(on(2, **options, fused_products=how)) for how in ("auto", "on"))
    assert not plan.fused and "fused kernels" not in said(plan)
    quicker = [a.seconds < b.seconds for a, b in zip(wanted.decode, plan.decode, strict=True)]
    assert any(quicker) == told
    assert list(itertools.dropwhile(bool, quicker)) == [False] * quicker.count(False)  # of few requests
