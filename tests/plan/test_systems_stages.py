"""What a pipeline waits for its last stage, against stages run one after the other."""

import dataclasses

import pytest

from shardlm.plan import systems, systems_passes, validate
from shardlm.plan.compute import operations
from shardlm.plan.cost import kernel_seconds
from shardlm.plan.kernels import Kernels
from shardlm.plan.published import load
from shardlm.plan.sketch import Sketch
from shardlm.plan.systems_stages import at_the_end, layers_of_last
from shardlm.plan.validate import configuration, predict


@pytest.fixture(scope="module")
def published():
    return load(validate.POINTS)


def dealt(layers, stages, parts):
    """Layers of the first and of the last stage, places filled in order with as many as the fullest needs."""
    places, slots = stages * parts, -(-layers // (stages * parts))
    held = [min(slots, max(0, layers - place * slots)) for place in range(places)]
    return sum(held[::stages]), sum(held[stages - 1 :: stages])


@pytest.mark.parametrize(
    ("layers", "stages", "parts"),
    [(61, 16, 1), (61, 8, 4), (61, 4, 4), (61, 4, 8), (61, 8, 2), (80, 4, 5), (96, 8, 12), (36, 4, 1), (128, 64, 1)],
)
def test_the_last_stage_holds_what_is_left(layers, stages, parts):
    assert layers_of_last(layers, stages, parts) == dealt(layers, stages, parts)


def simulated(forward, microbatches):
    """Seconds of 1F1B (https://arxiv.org/abs/2104.04473, figure 4), stage s taking forward[s] and twice that back."""
    S = len(forward)
    done, free = {}, [0.0] * S
    order = []
    for s in range(S):
        first = min(S - 1 - s, microbatches)
        jobs = [(m, "f") for m in range(first)]
        for m in range(microbatches):
            jobs += [(m + first, "f")] if m + first < microbatches else []
            jobs.append((m, "b"))
        order.append(jobs)
    while any(order):
        for s in range(S):
            while order[s]:
                m, way = order[s][0]
                needs = (s - 1, m, "f") if way == "f" else (s + 1, m, "b") if s + 1 < S else (s, m, "f")
                if needs[0] >= 0 and needs not in done:
                    break
                start = max(free[s], done.get(needs, 0.0))
                free[s] = done[s, m, way] = start + forward[s] * (1 if way == "f" else 2)
                order[s].pop(0)
    return max(free)


def test_all_wait_for_the_longest_stage_in_every_microbatch():
    """The rule of waiting_for_stages: m microbatches at the longest stage's pace, the others once to fill and drain."""
    even, long = [1.0] * 4, [1.0, 1.0, 1.0, 1.3]
    for m in (8, 32):
        assert simulated(even, m) == 3 * (m + 3)
        assert simulated(long, m) == pytest.approx(3 * (1.3 * m + 3), rel=0.01)


@pytest.mark.parametrize("name", ["nemo-nemotron4-340b-h100x256-bf16", "nemo-llama3.1-70b-h100x64-fp8"])
def test_a_full_last_stage_makes_the_others_wait_for_the_whole_head(published, name):
    point = published.points[name]
    model, gpu = published.model_of(point), published.gpu_of(point)
    sketch = Sketch.of(configuration(point, model), gpu)
    ops = list(systems.as_run(operations(sketch, ours=False), systems.POLICIES["none"]))
    ops = [*systems_passes.as_multiplied(ops, point), systems_passes.loss_op(point, sketch)]
    last = at_the_end(ops, ops)
    assert {op.layer for op in last} == {"head"}
    head = point.mesh.pipeline * kernel_seconds(last, Kernels.of(gpu))  # formulas deal it out over all stages
    cost = predict(point, published).cost
    assert cost.compute["other"] == pytest.approx(head, rel=0.01) and "head" not in cost.compute


def test_ends_that_count_as_layers_and_further_rounds(published):
    small = predict(published.points["megatron-llama3.1-405b-h100x1024-fp8"], published).cost
    assert "other" not in small.compute  # the head takes less than the layer that it stands for
    modules = published.points["bridge-deepseek-v3-mtp-gb200x256-mxfp8-26.02"]
    ops = []
    for further in (1, 0):
        model = dataclasses.replace(published.model_of(modules), mtp_modules=further)
        ops.append(operations(Sketch.of(configuration(modules, model), published.gpu_of(modules)), ours=False))
    last = at_the_end(*ops)
    assert "join" in {op.what for op in last} and {"attention", "moe", "head"} <= {op.layer for op in last}
    point = published.points["automodel-kimi-k2-h100x256"]
    once = predict(dataclasses.replace(point, rounds=1), published).cost
    twice = predict(point, published).cost
    layers = sum(once.compute[kind] for kind in ("attention", "mlp", "moe", "norm"))
    layers += sum(one.exposed_seconds for one in once.comms if one.sent.why == "tokens sent")
    # Seven stages more, each of two layers, of one of 16 microbatches; a device has 61 / 8 layers.
    assert twice.step_seconds - once.step_seconds == pytest.approx(7 * 2 * layers / (61 / 8) / 16, rel=0.01)
