"""The record of a program's collectives and what is said of a difference."""

import dataclasses
import json

import pytest

from shardlm.hlo.bill import Bill, Entry, compare
from shardlm.hlo.collectives import Collective
from shardlm.hlo.text import Frame

MIB = 2**20
FRAMES = (Frame("/x/shardlm/layers/param.py", 91, "project"), Frame("/x/shardlm/layers/mlp.py", 45, "Mlp.__call__"))
GATHER = Collective(
    kind="all-gather",
    axes=("fsdp",),
    group_size=8,
    dtype="bf16",
    bytes=8 * MIB,
    count=32,
    combined=1,
    asynchronous=True,
    depth=1,
    phase="forward",
    argument="state.params.up",
    op_name="jvp()/reshard",
    frames=FRAMES,
    guess="",
)
SCATTER = dataclasses.replace(
    GATHER, kind="reduce-scatter", phase="backward", argument="", op_name="transpose(jvp())/x"
)
SUM = dataclasses.replace(SCATTER, kind="all-reduce", axes=("data", "fsdp"), group_size=16, dtype="f32", count=2)


def test_bytes_are_those_that_a_device_sends():
    bill = Bill.of([GATHER, SCATTER, SUM])
    assert bill.by_axis() == {
        "fsdp": {"all-gather": 32 * 7 * MIB, "reduce-scatter": 32 * 7 * MIB},
        "data+fsdp": {"all-reduce": 2 * 2 * 8 * 15 // 16 * MIB},
    }
    assert bill.bytes == 2 * 32 * 7 * MIB + 30 * MIB


def test_entries_of_one_cause_are_one_and_the_costliest_comes_first():
    last = dataclasses.replace(GATHER, count=1, combined=3, asynchronous=False, depth=0)
    bill = Bill.of([SUM, GATHER, last])
    assert [(e.source, e.count) for e in bill.entries] == [
        ("state.params.up", 33),
        ("project < Mlp.__call__", 2),
    ]
    assert bill.entries[0].where == "layers/param.py:91 < layers/mlp.py:45 [jvp()/reshard]"


def test_json_round_trip():
    bill = Bill.of([GATHER, SCATTER, SUM])
    rows = json.loads(json.dumps(bill.to_json()))
    assert Bill.from_json(rows) == bill and compare(Bill.from_json(rows), bill) == []
    assert rows[1] == {
        "kind": "all-gather",
        "axes": ["fsdp"],
        "dtype": "bf16",
        "phase": "forward",
        "source": "state.params.up",
        "count": 32,
        "bytes": 32 * 7 * MIB,
    }


def test_a_guess_is_recorded():
    bill = Bill.of([dataclasses.replace(GATHER, guess="the costliest branch of a conditional")])
    (row,) = bill.to_json()
    assert row["guess"] == "the costliest branch of a conditional" and Bill.from_json([row]) == bill


def test_a_new_collective_is_named_with_what_causes_it():
    (message,) = compare(Bill.of([GATHER]), Bill.of([GATHER, SUM]))
    assert message == (
        "new: backward all-reduce of f32 over data+fsdp, 2 times, 30.000 MiB a device; recorded 0 times, 0.000 MiB\n"
        "    project < Mlp.__call__ at layers/param.py:91 < layers/mlp.py:45 [transpose(jvp())/x] (2 times)"
    )


def test_a_larger_one_names_what_grew_only():
    other = dataclasses.replace(GATHER, argument="state.params.down")
    wider = dataclasses.replace(other, bytes=2 * other.bytes)
    (message,) = compare(Bill.of([GATHER, other]), Bill.of([GATHER, wider]))
    assert message.startswith("more: forward all-gather of bf16 over fsdp, 64 times, 672.000 MiB a device; recorded 64")
    assert "state.params.down" in message and "state.params.up" not in message


def test_a_wider_type_is_new():
    messages = compare(Bill.of([GATHER]), Bill.of([dataclasses.replace(GATHER, dtype="f32", bytes=2 * GATHER.bytes)]))
    assert [message.split(" over")[0] for message in messages] == [
        "gone: forward all-gather of bf16",
        "new: forward all-gather of f32",
    ]


def test_fewer_are_told_too():
    (message,) = compare(Bill.of([GATHER]), Bill.of([dataclasses.replace(GATHER, count=31)]))
    assert message.startswith("less: forward all-gather of bf16 over fsdp, 31 times")


@pytest.mark.parametrize("scale,passes", [(1.04, True), (1.06, False), (0.96, True), (0.94, False)])
def test_bytes_may_differ_a_little(scale, passes):
    near = dataclasses.replace(GATHER, bytes=round(GATHER.bytes * scale))
    assert (compare(Bill.of([GATHER]), Bill.of([near])) == []) == passes


def test_names_of_causes_do_not_decide():
    renamed = dataclasses.replace(SCATTER, frames=FRAMES[1:])
    assert compare(Bill.of([SCATTER]), Bill.of([renamed])) == []


def test_another_xla_may_count_otherwise():
    tiny = dataclasses.replace(SUM, bytes=1024)
    recorded, found = Bill.of([GATHER]), Bill.of([dataclasses.replace(GATHER, count=16, bytes=2 * GATHER.bytes), tiny])
    assert compare(recorded, found, counts=False) == []
    assert len(compare(recorded, found)) == 2


def test_an_entry_is_equal_wherever_its_lines_are():
    entry = Entry("all-gather", ("fsdp",), "bf16", "forward", "state.params.up", 1, 2, where="a.py:1")
    assert entry == dataclasses.replace(entry, where="a.py:2")
