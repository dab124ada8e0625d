"""How other systems bring tokens to experts, against counting by hand and by chance."""

import dataclasses
import random

import pytest

from shardlm.plan import validate as validation
from shardlm.plan.constants import MODULE
from shardlm.plan.published import load
from shardlm.plan.sketch import Sketch
from shardlm.plan.systems_experts import experts_ops, experts_sent, waiting
from shardlm.plan.traffic import Sent
from shardlm.plan.validate import configuration, predict


@pytest.fixture(scope="module")
def published():
    return load(validation.POINTS)


def of(published, name):
    """(point, its model, a sketch of it)"""
    point = published.points[name]
    model = published.model_of(point)
    ends = validation.systems.ends_are_layers(point)
    shape = validation.systems.with_ends(model) if ends else model
    return point, model, Sketch.of(configuration(point, shape), published.gpu_of(point))


def test_deepep_sends_a_token_once_to_each_device(published):
    """Against tokens that choose eight of 128 experts on eight devices at random."""
    point, model, _ = of(published, "automodel-qwen3-30b-a3b-h100x8")
    sent = Sent(("expert",), "tokens sent", 8.0, "ragged-all-to-all", 3)
    (found,) = experts_sent([sent], point, model.experts)
    draw = random.Random(0)
    devices = [len({draw.randrange(8) for _ in range(8)}) for _ in range(4000)]
    assert found.nbytes == pytest.approx(sum(devices) / len(devices), rel=0.02)
    plain = published.points["bridge-qwen3-30b-a3b-gb200x8-mxfp8-26.02"]
    assert list(experts_sent([sent], plain, model.experts)) == [sent]


def test_experts_split_over_tensor_exchange_each_token_as_often_as_it_has_experts(published):
    point, model, _ = of(published, "nemo-grok-1-h100x512-bf16")
    hidden = Sent(("tensor",), "the sequence: gathers", 8.0, count=4, beside=True)
    attention, experts = experts_sent([hidden], point, model.experts)
    assert (attention.nbytes, attention.beside, experts.nbytes, experts.beside) == (4, True, 8, False)


def test_the_all_to_all_dispatcher_sorts_twice_and_gpt_oss_adds_biases(published):
    point, model, sketch = of(published, "bridge-gpt-oss-120b-h100x64-bf16-26.02")
    rows, layers = 4096 * 4, 36 / 4 * 80  # of one microbatch; of one stage in a step
    sorting, biases, clamps = experts_ops(point, model.experts, sketch, again=1.0)
    assert sorting.hbm_bytes == 2 * rows * 2880 * 2.5 and (sorting.forward, sorting.again) == (layers, 0)
    assert (biases.hbm_bytes, biases.count) == (20 * rows * 2880, 3 * layers)
    assert (clamps.hbm_bytes, clamps.again, clamps.count) == (16 * rows * 2880, layers, 4 * layers)
    assert all(op.in_stages for op in (sorting, biases, clamps))
    qwen, other, there = of(published, "bridge-qwen3-235b-a22b-b200x256-mxfp8-26.02")
    assert [op.what for op in experts_ops(qwen, other.experts, there, 0)] == ["rows sorted twice"]
    captured, third, here = of(published, "bridge-qwen3-30b-a3b-gb200x8-mxfp8-26.02")
    assert not list(experts_ops(captured, third.experts, here, 0))


def test_a_layer_takes_what_its_host_takes_at_least(published):
    point, model, sketch = of(published, "bridge-qwen3-235b-a22b-b200x256-mxfp8-26.02")
    with_host = predict(point, published).cost
    calm = dataclasses.replace(point, note=point.note.replace("no CUDA graphs", "CUDA graphs"))
    without = predict(calm, published).cost
    host = 256 * 12 * (310 + 30 * 16) * MODULE  # 96 layers over 8 stages, 256 microbatches, 16 experts a device
    assert without.step_seconds < host < with_host.step_seconds < 1.2 * host
    biased, oss, there = of(published, "bridge-gpt-oss-120b-gb200x64-bf16-26.02")
    assert waiting(biased, oss, there, without).host == pytest.approx((310 + 6 * 2) * MODULE)  # waits in every layer
    assert waiting(calm, model, sketch, without) is None
