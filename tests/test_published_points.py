"""Published measurements: every point is complete and agrees with itself, and its model with the source's figures."""

import dataclasses
import json
import math
import pathlib

import pytest

from shardlm.errors import ShardlmError
from shardlm.flops import mfu
from shardlm.plan import published
from shardlm.plan.published_models import model_flops, parameters, step_seconds, transformer

FILE = pathlib.Path(__file__).parent.parent / "benchmarks" / "published.json"
DATA = json.loads(FILE.read_text())
ALL = published.load(FILE)


def test_the_points_cover_gpus_models_and_meshes():
    points = ALL.points.values()
    assert len(points) >= 40
    hopper, blackwell = {"h100", "h100-hbm2e-500w", "h200"}, {"b200", "gb200", "b300", "gb300"}
    assert {"a100", "a100-40gb"} | hopper | blackwell == {p.gpu for p in points}
    assert {"bf16", "fp16", "fp8", "mxfp8"} == {p.precision for p in points}
    for axis in ("data", "fsdp", "context", "pipeline", "expert", "tensor"):
        assert any(p.mesh.size(axis) > 1 for p in points), axis
    assert {p.model for p in points} == set(ALL.models), "a model without a point"


def test_known_gpus_keep_their_figures_and_others_say_theirs():
    ours, theirs = ALL.hardware.gpu("h100"), ALL.hardware.gpu("h100-hbm2e-500w")
    assert (theirs.watts, theirs.hbm_bytes_per_second, theirs.peak) == (500, 2.4e12, ours.peak)
    assert ALL.hardware.cluster("grand-teton-500w").nic_bytes_per_second == 50e9


def test_models_have_the_parameters_their_sources_count():
    for model in ALL.models.values():
        if model.parameters:  # sources round to two digits
            assert parameters(model, 2048) == pytest.approx(model.parameters, rel=0.03), model.name
    exact = {m.name: m.parameters for m in ALL.models.values() if m.name.startswith("mpt-")}
    assert len(exact) == 6
    for name, count in exact.items():  # but for biases and norms
        assert parameters(ALL.models[name], 2048) == pytest.approx(count, rel=2e-3)


def test_experts_latents_windows_and_further_tokens_reach_the_decoder():
    deepseek = transformer(ALL.models["deepseek-v3-mtp"], 4096)
    assert [s.num_layers for s in deepseek.segments] == [3, 58] and deepseek.mtp.depth == 1
    assert deepseek.segments[1].pattern[0].mlp.shared_dim == 2048
    windows = [block.attention.window for block in transformer(ALL.models["gpt-oss-20b"], 4096).blocks()]
    assert windows == [128, 0] * 12
    assert transformer(ALL.models["mpt-7b"], 8192).max_positions == 8192


def test_tokens_and_flops_of_a_source_agree_by_the_convention_it_counts():
    both = [p for p in ALL.points.values() if p.counted and p.measured.tokens_per_s_per_gpu]
    assert len(both) > 20 and {p.counted.causal for p in both} == {"half", "full"}
    for point in both:
        model, measured = ALL.model_of(point), point.measured
        flops = model_flops(model, point.tokens, point.seq_len, point.counted.causal == "full") / point.tokens
        theirs = measured.tflops_per_s_per_gpu * 1e12 / measured.tokens_per_s_per_gpu
        assert flops == pytest.approx(theirs, rel=0.015), point.name


def test_no_step_is_faster_than_the_gpu_or_absurdly_slow():
    for point in ALL.points.values():
        seconds, model = step_seconds(point, ALL.model_of(point)), ALL.model_of(point)
        if seconds is None:
            assert point.counted is None and point.measured.tflops_per_s_per_gpu
            continue
        peak = ALL.gpu_of(point).peak.of("fp8" if "fp8" in point.precision else "bf16")
        used = mfu(model_flops(model, point.tokens, point.seq_len), seconds, peak, point.num_gpus)
        assert 0.04 < used < 0.65, f"{point.name}: {used}"


def test_the_recomputed_pass_of_the_megatron_paper_is_counted_as_its_equation_does():
    point = ALL.points["megatron2021-145.6b-a100x1536"]
    l, h, s, v, b = 80, 12288, 2048, 51200, 2304
    theirs = 96 * b * s * l * h**2 * (1 + s / (6 * h) + v / (16 * l * h))  # arXiv 2104.04473, equation 3
    assert step_seconds(point, ALL.model_of(point)) == pytest.approx(theirs / (148e12 * 1536), rel=1e-3)
    unknown = dataclasses.replace(point, remat="selective")
    assert step_seconds(unknown, ALL.model_of(point)) is None


def edited(tmp_path, **changes):
    """The file with the first two points, the first of them changed."""
    first, second = (dict(point) for point in DATA["points"][:2])
    first.update(changes)
    path = tmp_path / "published.json"
    path.write_text(json.dumps(DATA | {"points": [first, second]}))
    return published.load(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mesh": {"fsdp": 4}}, r"mesh fsdp=4 is not num_gpus=8 devices"),
        ({"mesh": {"fdsp": 8}}, r"MeshSpec has no field 'fdsp'; did you mean fsdp\?"),
        ({"microbatch": 3}, r"microbatch x microbatches x groups = 3 x 1 x 8 groups is not global_batch=16"),
        ({"rounds": 2}, "microbatches=1 do not divide into rounds=2"),
        ({"microbatch": None}, "give both microbatch and microbatches, or neither"),
        (
            {"global_batch": 12, "microbatch": None, "microbatches": None},
            "global_batch=12 does not divide over 8 groups",
        ),
        ({"schedule": "1f1b"}, "a schedule belongs to a pipeline"),
        ({"mesh": {"expert": 8}}, "mesh.expert=8, but llama2-7b has no experts"),
        ({"model": "lama2-7b"}, r"there is no model 'lama2-7b'; did you mean llama2-7b\?"),
        ({"gpu": "h10"}, r"no figures are known for a GPU 'h10'; did you mean h100\?"),
        ({"cluster": "dgx-a100"}, "gpu=h100 is not that of cluster=dgx-a100, a100"),
        ({"cluster": "dgx-h10"}, r"no cluster is known as 'dgx-h10'; did you mean dgx-h100\?"),
        ({"measured": {}}, "nothing was measured"),
        ({"measured": {"step_seconds": -1}}, "numbers, rates and seconds must be positive"),
        ({"measured": {"step_secs": 1}}, r"Measured has no field 'step_secs'; did you mean step_seconds\?"),
        ({"precision": "bf17"}, r"precision: expected one of 'bf16', .* did you mean bf16\?"),
        ({"source": " "}, "source and at must say where the figure stands"),
        ({"name": DATA["points"][1]["name"]}, "is there twice"),
        (DATA["points"][1] | {"name": "another"}, "are the same measurement; keep one"),
    ],
)
def test_a_point_that_contradicts_itself_is_refused(tmp_path, changes, message):
    with pytest.raises(ShardlmError, match=message):
        edited(tmp_path, **changes)


def test_the_rest_of_a_file_is_checked_too(tmp_path):
    path = tmp_path / "published.json"
    with pytest.raises(ShardlmError, match="does not exist"):
        published.load(path)
    for text, message in (("{", "is not JSON"), ("[]", "expected an object with models and points")):
        path.write_text(text)
        with pytest.raises(ShardlmError, match=message):
            published.load(path)
    assert math.isclose(edited(tmp_path).points["maxtext-llama2-7b-h100x8"].measured.step_seconds, 0.721)
