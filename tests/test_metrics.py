"""The logs, the live line and the loss curve of a run, after restarts, kills and a full disk too."""

import contextlib
import io
import json
import os
import resource
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console
from tensorboardX.proto.event_pb2 import Event

from shardlm.errors import ShardlmError
from shardlm.metrics import jsonl
from shardlm.metrics.curves import plot_curves, smooth
from shardlm.metrics.log import MetricsLog
from shardlm.metrics.progress import ProgressLine, RateMeter, Rates, format_duration, format_flops


@pytest.fixture
def write(tmp_path):
    def session(steps, resume_step=0):
        with MetricsLog(tmp_path, resume_step) as log:
            for step in steps:
                log.write(step, {"loss": 10.0 - step, "tokens_per_second": 100.0})

    return session


def events(run_dir):
    """The TensorBoard events of every file of a run: length, checksum, protocol buffer, checksum."""
    for path in sorted((run_dir / "tensorboard").iterdir()):
        data = path.read_bytes()
        while len(data) >= 16:
            (length,) = struct.unpack("Q", data[:8])
            if len(data) < 16 + length:  # of which a full disk took the beginning
                break
            yield Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]


def test_both_logs_hold_the_same_numbers(tmp_path, write):
    write([1, 2])
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"], line["tokens_per_second"]) for line in lines] == [
        (1, 9.0, 100.0),
        (2, 8.0, 100.0),
    ]
    logged = [event for event in events(tmp_path) if event.summary.value]
    assert [(event.step, event.summary.value[0].tag, event.summary.value[0].simple_value) for event in logged] == [
        (1, "loss", 9.0),
        (2, "loss", 8.0),
    ]
    assert [event.wall_time for event in logged] == [line["time"] for line in lines]


@pytest.mark.parametrize(
    ("resume_step", "steps", "purged_from"),
    [(3, [0, 1, 2, 3, 4, 5, 6], 4), (0, [4, 5, 6], 0), (9, [0, 1, 2, 3, 4, 5, 4, 5, 6], 10)],
)
def test_a_resumed_run_drops_the_steps_that_it_does_again(tmp_path, write, resume_step, steps, purged_from):
    write(range(6))
    write([4, 5, 6], resume_step)
    assert [line["step"] for line in jsonl.read(tmp_path / "metrics.jsonl")] == steps
    assert [event.step for event in events(tmp_path) if event.HasField("session_log")] == [0, purged_from]


def test_the_other_processes_write_nothing(tmp_path):
    with MetricsLog(tmp_path / "run", enabled=False) as log:
        log.write(1, {"loss": 1.0})
    assert not (tmp_path / "run").exists()


def test_numbers_that_are_not_finite_stay_json(tmp_path):
    with MetricsLog(tmp_path) as log:
        log.write(1, {"loss": float("nan"), "grad_norm": float("inf")})
    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert line["loss"] is None and line["grad_norm"] is None


ENTRIES = st.lists(
    st.dictionaries(st.text(max_size=3), st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=3))
)


@given(ENTRIES, st.data())
def test_a_file_cut_anywhere_keeps_its_whole_lines(tmp_path_factory, entries, data):
    path = tmp_path_factory.mktemp("jsonl") / "log.jsonl"
    writer = jsonl.JsonLines(path)
    for entry in entries:
        writer.append(entry)
    content = path.read_bytes()
    cut = data.draw(st.integers(0, len(content)))
    path.write_bytes(content[:cut])  # what a kill in the middle of a write leaves
    whole = entries[: content[:cut].count(b"\n")]
    assert jsonl.read(path) == whole
    jsonl.JsonLines(path).append({"new": 1})
    assert jsonl.read(path) == [*whole, {"new": 1}]


def test_a_damaged_line_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1}\n\0\0\0\0\n{"step":3}\n')
    with pytest.raises(ShardlmError, match=r"Line 2 of .*metrics\.jsonl is not a JSON object .* Delete that line"):
        MetricsLog(tmp_path, resume_step=3)


@contextlib.contextmanager
def full_disk(limit):
    """The file size limit stands for the disk: the system takes a part of a line and refuses the rest."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_lines_wait_for_room_on_a_full_disk(tmp_path, caplog):
    log = jsonl.JsonLines(tmp_path / "metrics.jsonl")
    log.append({"step": 1})
    with full_disk(20):
        log.append({"step": 2})
        log.append({"step": 3})
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}/metrics.jsonl: File too large; its lines wait for room, and the run goes on"
    ]
    assert jsonl.read(tmp_path / "metrics.jsonl") == [{"step": 1}]
    log.append({"step": 4})
    log.close()
    assert jsonl.read(tmp_path / "metrics.jsonl") == [{"step": step} for step in range(1, 5)]


def test_a_disk_that_stays_full_is_said_and_loses_no_line(tmp_path, monkeypatch):
    refused = pytest.raises(ShardlmError, match=r"Cannot write .*metrics\.jsonl: .* GiB free .* Free some space")
    log = jsonl.JsonLines(tmp_path / "metrics.jsonl")
    with full_disk(5), refused:
        log.append({"step": 1})  # of the first nothing is known
    log.append({"step": 2})
    monkeypatch.setattr(jsonl, "WAITING", 29)
    with full_disk(25):
        log.append({"step": 3})
        log.append({"step": 4})
        with refused:
            log.append({"step": 5})
        with refused:
            log.close()
    jsonl.JsonLines(tmp_path / "metrics.jsonl").append({"step": 3})
    assert jsonl.read(tmp_path / "metrics.jsonl") == [{"step": 1}, {"step": 2}, {"step": 3}]


def test_events_that_find_no_room_end_no_run(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("shardlm.metrics.log.FLUSH_SECONDS", 0.0)
    monkeypatch.setattr("shardlm.metrics.log.AGAIN_SECONDS", 0.0)
    with MetricsLog(tmp_path) as log:
        log.write(1, {"loss": 1.0})
        with full_disk(220):  # which the lines are far from
            for step in range(2, 5):
                log.write(step, {"loss": 1.0})
        log.write(5, {"loss": 1.0})
    [told] = [record.getMessage() for record in caplog.records if "events are missing" in record.getMessage()]
    assert told.startswith(f"{tmp_path}/tensorboard: File too large; ")
    assert [line["step"] for line in jsonl.read(tmp_path / "metrics.jsonl")] == [*range(1, 6)]
    assert {1, 5} <= {event.step for event in events(tmp_path) if event.summary.value}


def test_rates_are_means_over_the_window():
    meter = RateMeter(peak_flops_per_second=1e9, devices=2, window=2)
    meter.add(1, tokens=100, flops=1e9, seconds=100.0)  # leaves the window
    meter.add(1, tokens=100, flops=1e9, seconds=1.0)
    assert meter.add(3, tokens=300, flops=3e9, seconds=3.0) == Rates(100.0, 1e9, 1.0, 0.5)
    assert RateMeter(None, devices=2).add(1, 100, 1e9, 1.0).mfu is None


def show(terminal, monkeypatch, width=100):
    clock = iter(range(100, 1000, 4))  # four seconds a step
    monkeypatch.setattr("shardlm.metrics.progress.time.monotonic", lambda: float(next(clock)))
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=width, legacy_windows=False)
    with ProgressLine(10, console=console) as line:
        for step in range(1, 11):
            line.update(step, 3.25, Rates(12345.6, 4.5e12, 0.1, 0.41) if step > 1 else None)
        line.note("validation loss 3.5")
    return out.getvalue()


def test_without_a_terminal_there_is_a_line_now_and_then(monkeypatch):
    lines = show(False, monkeypatch, width=20).splitlines()
    assert lines == [
        "step 1/10  loss 3.2500",
        "step 4/10  loss 3.2500  12,346 tok/s  4.5 TFLOP/s  MFU 41.0%  0:24 left",
        "step 7/10  loss 3.2500  12,346 tok/s  4.5 TFLOP/s  MFU 41.0%  0:12 left",
        "step 10/10  loss 3.2500  12,346 tok/s  4.5 TFLOP/s  MFU 41.0%",
        "validation loss 3.5",
    ]


def test_on_a_terminal_one_line_stays_in_place(monkeypatch):
    shown = show(True, monkeypatch)
    assert "step 10/10" in shown and "12,346 tok/s" in shown and "validation loss 3.5" in shown
    assert shown.count("\n") == 2  # the note and the end


@pytest.mark.parametrize("full", [False, True], ids=["nobody reads", "full disk"])
def test_output_that_nobody_takes_ends_no_run(full):
    reads, writes = os.pipe()
    if full:
        os.dup2(os.open("/dev/full", os.O_WRONLY), writes)
    os.close(reads)
    file = open(writes, "w")  # noqa: SIM115
    line = ProgressLine(10, console=Console(file=file))
    line.note("saved")
    line.update(1, 2.0)
    with pytest.raises(OSError, match=r"No space left|Broken pipe"):  # so it was not taken
        file.close()


def test_units():
    assert [format_flops(x) for x in (12, 3.4e6, 5.25e9, 989e12, 1.2e15)] == [
        "12 FLOP",
        "3.4 MFLOP",
        "5.25 GFLOP",
        "989 TFLOP",
        "1.2 PFLOP",
    ]
    assert [format_duration(x) for x in (4.4, 65, 3725)] == ["0:04", "1:05", "1:02:05"]


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=30), st.integers(0, 10))
def test_smoothing_stays_within_the_values_and_keeps_straight_lines(values, reach):
    assert all(min(values) - 1e-9 <= x <= max(values) + 1e-9 for x in smooth(values, reach))
    line = [float(i) for i in range(40)]
    assert smooth(line, reach)[: 40 - reach] == pytest.approx(line[: 40 - reach])


def test_the_curve_is_a_picture_with_the_baselines_on_it(tmp_path):
    with MetricsLog(tmp_path) as log:
        for step in range(1, 40):
            log.write(step, {"loss": 9 / step, **({"validation_loss": 10 / step} if step % 10 == 0 else {})})
        log.write(40, {"loss": float("nan")})
    plain = Image.open(plot_curves(tmp_path)).tobytes()
    picture = Image.open(plot_curves(tmp_path, {"bigram": 4.2}))
    assert picture.format == "PNG" and picture.width > 1000
    assert picture.tobytes() != plain


def test_a_run_without_losses_has_no_curve(tmp_path):
    with pytest.raises(ShardlmError, match="holds no 'loss' or 'validation_loss' to draw"):
        plot_curves(tmp_path)
