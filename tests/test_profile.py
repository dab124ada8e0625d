"""Reading a trace as GPUs write it, and dividing the time of a device among what ran on it."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.profiler import ProfileData

from shardlm.hlo.labels import Labels
from shardlm.profile.device_time import device_times, mean
from shardlm.profile.intervals import Span, divide
from shardlm.profile.report import Profile, table
from shardlm.profile.trace import read

MESH = {"fsdp": 2, "tensor": 1}
# As XLA:GPU prints a step, cut down: a layer gathers its weights for the next one while it multiplies.
TEXT = """HloModule jit_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add.1 = f32[] add(%a, %b)
}

%fused (p.0: f32[4,8], p.1: f32[8,8]) -> f32[4,8] {
  %p.0 = f32[4,8]{1,0} parameter(0)
  %p.1 = f32[8,8]{1,0} parameter(1)
  %dot.1 = f32[4,8]{1,0} dot(%p.0, %p.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(step)/jvp()/while/body/dot_general" source_file="/here/shardlm/layers/mlp.py" source_line=1}
  ROOT %negate.1 = f32[4,8]{1,0} negate(%dot.1), metadata={op_name="jit(step)/jvp()/while/body/neg" source_file="/here/shardlm/layers/norm.py" source_line=1}
}

%body (state: (s32[], f32[4,8], f32[4,8])) -> (s32[], f32[4,8], f32[4,8]) {
  %state = (s32[], f32[4,8]{1,0}, f32[4,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[4,8]{1,0} get-tuple-element(%state), index=1
  %w = f32[4,8]{1,0} get-tuple-element(%state), index=2
  %all-gather-start.1 = (f32[4,8]{1,0}, f32[8,8]{1,0}) all-gather-start(%w), replica_groups={{0,1}}, dimensions={0}, metadata={op_name="jit(step)/jvp()/while/body/reshard" source_file="/here/shardlm/layers/mlp.py" source_line=2}
  %all-gather-done.1 = f32[8,8]{1,0} all-gather-done(%all-gather-start.1)
  %fusion.1 = f32[4,8]{1,0} fusion(%x, %all-gather-done.1), kind=kCustom, calls=%fused
  %copy.1 = f32[4,8]{1,0} copy(%fusion.1)
  ROOT %tuple.1 = (s32[], f32[4,8]{1,0}, f32[4,8]{1,0}) tuple(%i, %copy.1, %w)
}

%condition (state.1: (s32[], f32[4,8], f32[4,8])) -> pred[] {
  %state.1 = (s32[], f32[4,8]{1,0}, f32[4,8]{1,0}) parameter(0)
  ROOT %less.1 = pred[] constant(true)
}

ENTRY %main (init: (s32[], f32[4,8], f32[4,8])) -> f32[4,8] {
  %init = (s32[], f32[4,8]{1,0}, f32[4,8]{1,0}) parameter(0)
  %while.1 = (s32[], f32[4,8]{1,0}, f32[4,8]{1,0}) while(%init), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"2"}}
  %gradient.1 = f32[4,8]{1,0} get-tuple-element(%while.1), index=1
  %all-reduce.1 = f32[4,8]{1,0} all-reduce(%gradient.1), replica_groups={{0,1}}, to_apply=%add, metadata={op_name="jit(step)/transpose(jvp())/dot_general" source_file="/here/shardlm/layers/mlp.py" source_line=3}
  ROOT %update.1 = f32[4,8]{1,0} multiply(%all-reduce.1, %all-reduce.1), metadata={op_name="jit(step)/mul" source_file="/site/optax/transforms.py" source_line=1}
}
"""  # noqa: E501


def trace_of(planes) -> ProfileData:
    """planes: name -> line -> (event, start and length in nanoseconds, stats). Strings are references to names, as the
    profiler writes them."""
    text = ""
    for plane, lines in planes.items():
        names, events = {}, ""
        for number, (line, rows) in enumerate(lines.items()):
            events += f'lines {{ id: {number} name: "{line}" timestamp_ns: 100\n'
            for event, start, length, stats in rows:
                written = ""
                for key, value in stats.items():
                    kind = "ref" if isinstance(value, str) else "int64"
                    value = names.setdefault(value, len(names) + 1) if isinstance(value, str) else value
                    written += f"stats {{ metadata_id: {names.setdefault(key, len(names) + 1)} {kind}_value: {value} }}"
                which = names.setdefault(event, len(names) + 1)
                place = f"offset_ps: {(start - 100) * 1000} duration_ps: {length * 1000}"
                events += f"  events {{ metadata_id: {which} {place} {written} }}\n"
            events += "}\n"
        for kind in ("event_metadata", "stat_metadata"):
            events += "".join(f'{kind} {{ key: {n} value {{ id: {n} name: "{s}" }} }}\n' for s, n in names.items())
        text += f'planes {{ name: "{plane}"\n{events}}}\n'
    return ProfileData.from_text_proto(text)


def of(op: str, **more) -> dict:
    return {"correlation_id": 7, "hlo_module": "jit_step", "program_id": 3, "hlo_op": op} | more


def planes() -> dict:
    """One step of two layers on two GPUs; the first waits for the second in its collectives."""
    gather, nccl = "ncclDevKernel_AllGather_RING_LL", "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
    compute = [
        ("gemm_fusion_dot", 1100, 100, of("fusion.1")),
        ("gemm_fusion_dot", 1250, 100, of("fusion.1")),
        ("loop_copy", 1350, 20, of("copy.1")),
        ("multiply", 1500, 50, of("update.1")),
        ("in_a_graph", 1560, 5, of("not.in.the.text", cuda_graph_id=1)),
        ("in_a_graph", 1565, 5, of("while.1", cuda_graph_id=1)),
        ("memset", 1580, 10, {"correlation_id": 9}),
    ]
    sends = [
        (gather, 1000, 60, of("all-gather-start.1")),  # nothing beside it
        (gather, 1150, 80, of("all-gather-start.1")),  # 50 beside the first matmul, 30 alone
        (nccl, 1370, 120, of("all-reduce.1")),
    ]
    late = [(name, start, length, stats) for name, start, length, stats in compute if start < 1400]
    return {
        "/device:GPU:0": {
            "Stream #13(Compute)": compute,
            "Stream #14(Compute)": sends,
            "Stream #15(MemcpyH2D)": [("MemcpyH2D", 1480, 30, {"correlation_id": 8})],
            "CUPTI overhead": [("Buffer flush", 1000, 600, {})],
        },
        "/device:GPU:1": {"Stream #20(Compute)": late},
        "/host:CPU": {"python": [("train", 900, 900, {"step_num": 1})]},
    }


def test_gpu_streams_are_divided_exactly():
    labels = Labels(TEXT, MESH)
    times = device_times(read(trace_of(planes())), [labels], steps=1)
    first, second = times[0], times[1]
    nanoseconds = lambda rows: {row: round(seconds * 1e9, 6) for row, seconds in rows.items()}  # noqa: E731
    # A fusion is what its matmul is; a copy of which nothing was noted, what it copies: the fusion's last operation.
    layers = {("mlp", "forward"): 200, ("norm", "forward"): 20}
    assert nanoseconds(first.computed) == layers | {("optimizer", "other"): 50, ("other", "other"): 10}
    assert nanoseconds(first.sent) == {"all-gather fsdp": 140, "all-reduce fsdp": 120, "copy host": 30}
    assert nanoseconds(first.exposed) == {"all-gather fsdp": 90, "all-reduce fsdp": 115, "copy host": 15}
    assert sum(first.computed.values()) + sum(first.exposed.values()) == pytest.approx(first.busy)
    assert first.window == second.window == pytest.approx(570e-9)  # the memset afterwards is not the step's
    assert first.idle == pytest.approx(70e-9) and first.unknown == pytest.approx(10e-9)
    assert nanoseconds(second.computed) == layers and second.idle == pytest.approx(350e-9)
    assert mean(times.values()).sent["all-reduce fsdp"] == pytest.approx(60e-9)
    assert labels.flops() == {("mlp", "forward"): 2 * 2 * 4 * 8 * 8}
    assert labels.of("all-gather-done.1") == labels.of("all-gather-start.1")
    assert device_times(read(trace_of(planes())), [labels], steps=5)[0].busy == pytest.approx(first.busy / 5)
    assert device_times(read(trace_of({"/host:CPU": {}})), [labels], steps=1) == {}


def test_another_program_between_two_steps_has_a_row_of_its_own():
    evaluation = {"hlo_module": "jit_evaluate", "program_id": 4, "hlo_op": "fusion.1"}
    step = [("kernel", 0, 10, of("fusion.1")), ("kernel", 90, 10, of("fusion.1"))]
    lines = {"Stream #1(Compute)": [*step, ("kernel", 20, 30, evaluation), ("kernel", 200, 30, evaluation)]}
    time = device_times(read(trace_of({"/device:GPU:0": lines})), [Labels(TEXT, MESH)], steps=2)[0]
    assert time.computed == pytest.approx({("mlp", "forward"): 10e-9, ("other programs", "other"): 15e-9})
    assert (time.busy, time.window) == pytest.approx((25e-9, 50e-9))


def test_of_programs_of_one_name_the_one_that_ran_is_chosen():
    other = Labels(TEXT.replace("%fusion.1", "%fusion.2").replace("layers/mlp", "layers/moe"), MESH)
    assert other.of("fusion.2").row == "moe"
    events = read(trace_of(planes()))
    for programs in ([Labels(TEXT, MESH), other], [other, Labels(TEXT, MESH)]):
        assert device_times(events, programs, steps=1)[0].computed["mlp", "forward"] == pytest.approx(200e-9)


spans = st.builds(
    lambda start, length, row: Span(start, start + length, row, sends=row.startswith("send")),
    st.integers(0, 30),
    st.integers(0, 12),
    st.sampled_from(["a", "b", "send c", "send d"]),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(spans, max_size=12))
def test_every_moment_is_given_away_once(given_spans):
    """Held against a walk over all moments."""
    computed, exposed, sent, busy = Counter(), Counter(), Counter(), 0
    for now in range(45):
        active = [span for span in given_spans if span.start <= now < span.end]
        computing = [span.row for span in active if not span.sends]
        sending = [span.row for span in active if span.sends]
        busy += bool(active)
        for row in computing:
            computed[row] += Fraction(1, len(computing))
        for row in () if computing else sending:
            exposed[row] += Fraction(1, len(sending))
        sent.update(set(sending))
    found = divide(given_spans)
    assert (found.busy, dict(found.sent)) == (busy, dict(sent))
    assert dict(found.computed) == pytest.approx({row: float(time) for row, time in computed.items()})
    assert dict(found.exposed) == pytest.approx({row: float(time) for row, time in exposed.items()})


def test_table_shows_a_prediction_beside_what_was_measured():
    times = device_times(read(trace_of(planes())), [Labels(TEXT, MESH)], steps=1)
    flops = {("mlp", "forward"): 1024.0}
    profile = Profile(10, 12, [3e-6, 1e-6, 2e-6], times, flops, {"own_kernel": 2}, peak=1024 / 200e-9 * 4)
    plan = {"mlp": 0.5, "attention": 0.25, "all-gather fsdp": 0.125, "all-gather fsdp exposed": 0.0625, "step": 7.0}
    text = table(profile, plan)
    cells = {line.split("  ")[1]: line.split() for line in text.splitlines() if line.startswith("  ")}
    assert cells["mlp"][1:8] == ["0.000", "-", "-", "500.000", "0.000", "35.1%", "1024"]
    assert (
        "predicted" in cells["layer"]
        and cells["mlp"][-1] == "25.0%"
        and cells["attention"][4:6] == ["250.000", "0.000"]
    )
    assert cells["all-gather fsdp"][2:6] == ["125.000", "0.000", "62.500", "0.000"]
    assert "busy and idle together in the trace; step is by the host's clock" in text
    assert cells["step"][1:3] == ["7,000.000", "0.002"] and "own_kernel" in text and "CUDA graphs" in text
    assert "predicted" not in table(profile) and profile.rows()["idle"] == pytest.approx(210e-9)
    assert profile.to_json()["seconds_per_step"]["step"] == 2e-6
