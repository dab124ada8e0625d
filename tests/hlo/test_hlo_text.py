"""Ways of writing that small programs on CPU devices do not show: replica groups of other XLA versions and of large
meshes, asynchronous halves, combined arrays, loops without a noted length. Lines are shortened from programs compiled
for GPUs."""

import json
import math

import numpy as np
import pytest

from shardlm.errors import ShardlmError
from shardlm.hlo.collectives import collectives
from shardlm.hlo.groups import device_groups, spanned_axes
from shardlm.hlo.text import Array, Instruction, parse
from shardlm.mesh import AXES

MESH = {"a": 2, "b": 2, "c": 2}


def line(attributes: str) -> Instruction:
    return Instruction("x", "all-reduce", (), (), "", ", " + attributes + ", use_global_device_ids=true", False)


@pytest.mark.parametrize(
    "written,axes",
    [
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", ("a",)),
        ("replica_groups={{0,1,4,5},{2,3,6,7}}", ("a", "c")),
        ("replica_groups={}", ("a", "b", "c")),
        ("replica_groups=[4,2]<=[8]", ("c",)),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", ("a", "b")),
        ("replica_groups=[4,2]<=[2,2,2]T(0,2,1)", ("b",)),
        ("replica_groups=[8,1]<=[8]", ()),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0'}", ("a", "b")),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2,'axis_2'=1] {'axis_1'}", ("c",)),
        ("replica_groups=mesh['axis_0'=8] {'axis_0':(2)2}", ("b",)),
        ("replica_groups=mesh['axis_0'=8] {'axis_0':(1)2,'axis_0':(4)2}", ("a", "c")),
        ("replica_groups=mesh[x=4,y=2], device_ids=([2,4]T(1,0)) {y}", ("a",)),
        ("replica_groups=mesh[x=4,y=2], device_ids=(0,2,1,3,4,6,5,7) {y}", ("b",)),
        ("source_target_pairs={{0,1},{1,0},{2,3},{3,2},{4,5},{5,4},{6,7},{7,6}}", ("c",)),
        ("source_target_pairs={{0,0},{1,1}}", ()),
    ],
)
def test_replica_groups(written, axes):
    assert spanned_axes(line(written), MESH) == axes


def test_groups_in_another_order_are_the_same_devices():
    groups = device_groups(line("replica_groups=[2,4]<=[4,2]T(1,0)"), 8)
    assert np.array_equal(groups, [[0, 2, 4, 6], [1, 3, 5, 7]])
    other = device_groups(line("replica_groups=mesh['x'=4,'y'=2] {'x'}"), 8)
    assert np.array_equal(other, groups)


def test_a_mesh_of_4096_devices():
    mesh = dict(zip(AXES, (128, 8, 1, 1, 1, 4), strict=True))
    assert spanned_axes(line("replica_groups=[1024,4]<=[4096]"), mesh) == ("tensor",)
    assert spanned_axes(line("replica_groups=[32,128]<=[128,32]T(1,0)"), mesh) == ("data",)
    pairs = ",".join(f"{{{i},{i + 4 if i % 32 < 28 else i - 28}}}" for i in range(math.prod(mesh.values())))
    assert spanned_axes(line(f"source_target_pairs={{{pairs}}}"), mesh) == ("pipeline",)


def test_unreadable_groups_are_an_error():
    with pytest.raises(ShardlmError, match="cannot read the replica groups of x: , replica_groups=some"):
        spanned_axes(line("replica_groups=something"), MESH)


def program(*entry: str, more: str = "") -> str:
    body = "\n".join(f"  {text}" for text in entry)
    return f"HloModule m, is_scheduled=true\n\n{more}\nENTRY %main (p: f32[8]) -> f32[8] {{\n{body}\n}}\n"


P = "%p = bf16[512,8]{1,0} parameter(0), metadata={op_name=\"state.params[\\'blocks\\'][0][\\'wk\\']\"}"
KERNEL = "%k = f32[8]{0} fusion(%p), kind=kLoop, calls=%fused"
FUSED = """%fused (q: bf16[512,8]) -> f32[8] {
  %q = bf16[512,8]{1,0} parameter(0)
  ROOT %r = f32[8]{0} reduce(%q, %q), dimensions={0}
}
"""
GROUPS = "replica_groups=mesh['x'=8] {'x'}, dimensions={0}"


def gather(is_sync: bool = False, between: bool = True) -> str:
    config = json.dumps({"collective_backend_config": {"is_sync": is_sync}}, separators=(",", ":"))
    start = (
        f"%s = (bf16[512,8]{{1,0}}, bf16[4096,8]{{1,0:S(1)}}) all-gather-start(%p), {GROUPS}, backend_config={config}"
    )
    done = "ROOT %d = bf16[4096,8]{1,0} all-gather-done(%s)"
    return program(P, start, *([KERNEL] if between else []), done, more=FUSED)


def test_asynchronous_is_what_kernels_run_beside():
    for is_sync, between, expected in ((False, True, True), (True, True, False), (False, False, False)):
        (one,) = collectives(gather(is_sync, between), MESH)
        assert (one.kind, one.bytes, one.count, one.asynchronous) == ("all-gather", 4096 * 8 * 2, 1, expected)
        assert one.argument == "state.params.blocks.0.wk"


def test_a_collective_inside_an_asynchronous_fusion():
    inner = """%wrapped (q: f32[]) -> f32[] {
  %q = f32[] parameter(0)
  ROOT %r = f32[] all-reduce(%q), replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%add
}
"""
    start = "%s = ((f32[]), f32[]) fusion-start(%q), kind=kCustom, calls=%wrapped"
    done = "ROOT %d = f32[] fusion-done(%s), calls=%wrapped"
    text = program(P, "%q = f32[] constant(1)", start, KERNEL, done, more=inner + FUSED)
    (one,) = collectives(text, MESH)
    assert (one.kind, one.axes, one.bytes, one.count, one.asynchronous) == ("all-reduce", ("a",), 4, 1, True)


def test_combined_arrays_are_listed_apart_with_their_own_cause():
    made = [
        f'%{n} = bf16[4096,{n[1:]}]{{1,0}} dot(%p, %p), metadata={{op_name="transpose(jvp())/{n}" stack_frame_id=2}}'
        for n in ("g8", "g16")
    ]
    both = "(bf16[4096,8]{1,0}, /*index=1*/bf16[4096,16]{1,0}), (bf16[512,8]{1,0}, bf16[512,16]{1,0})"
    start = f'%s = ({both}) reduce-scatter-start(%g8, %g16), {GROUPS}, metadata={{op_name="of both"}}'
    done = "ROOT %d = (bf16[512,8]{1,0}, bf16[512,16]{1,0}) reduce-scatter-done(%s)"
    tables = (
        'FileNames\n1 "/x/shardlm/layers/mlp.py"\n2 "/x/shardlm/layers/param.py"\n\n'
        'FunctionNames\n1 "Mlp.__call__"\n2 "project"\n\n'
        "FileLocations\n1 {file_name_id=1 function_name_id=1 line=50 column=1}\n"
        "2 {file_name_id=2 function_name_id=2 line=9 column=1}\n\n"
        "StackFrames\n1 {file_location_id=1 parent_frame_id=1}\n2 {file_location_id=2 parent_frame_id=2}\n\n"
    )
    found = collectives(program(P, *made, start, done, more=tables), MESH)
    assert [(one.bytes, one.combined, one.op_name) for one in found] == [
        (4096 * 8 * 2, 2, "transpose(jvp())/g8"),
        (4096 * 16 * 2, 2, "transpose(jvp())/g16"),
    ]
    assert {one.phase for one in found} == {"backward"}
    assert [str(frame) for frame in found[0].frames] == ["layers/param.py:9", "layers/mlp.py:50"]
    assert found[0].frames[1].function == "Mlp.__call__"


def test_an_all_to_all_of_parts_is_one_array():
    parts = ", ".join(["f32[2,8]{1,0}"] * 4)
    text = program(
        "%p = f32[2,8]{1,0} parameter(0)",
        f"ROOT %x = ({parts}) all-to-all(%p, %p, %p, %p), replica_groups=[2,4]<=[8]",
    )
    (one,) = collectives(text, MESH)
    assert (one.axes, one.bytes, one.combined) == (("b", "c"), 4 * 2 * 8 * 4, 1)


PLAIN = {
    "next": "add(%i, %by)",
    "less": "compare(%i, %n), direction=LT",
}
IN_FUSIONS = {
    "next": "fusion(%i), kind=kLoop, calls=%fused_add",
    "less": "fusion(%i), kind=kLoop, calls=%fused_compare",
}


@pytest.mark.parametrize("how", [PLAIN, IN_FUSIONS], ids=["plain", "in fusions"])
@pytest.mark.parametrize("start,limit,step,trips", [(0, 7, 1, 7), (1, 8, 2, 4), (3, 3, 1, 0)])
def test_the_length_of_a_loop_from_its_counter(start, limit, step, trips, how):
    loop = f"""%fused_add (q: s32[]) -> s32[] {{
  %q = s32[] parameter(0)
  %c = s32[] constant({step})
  ROOT %r = s32[] add(%c, %q)
}}
%fused_compare (q: s32[]) -> pred[] {{
  %q = s32[] parameter(0)
  %c = s32[] constant({limit})
  ROOT %r = pred[] compare(%q, %c), direction=LT
}}
%body (c: (f32[8], s32[])) -> (f32[8], s32[]) {{
  %c = (f32[8]{{0}}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=1
  %by = s32[] constant({step})
  %next = s32[] {how["next"]}
  %x = f32[8]{{0}} get-tuple-element(%c), index=0
  %y = f32[8]{{0}} all-reduce(%x), replica_groups=[4,2]<=[8], to_apply=%sum
  ROOT %t = (f32[8]{{0}}, s32[]) tuple(%y, %next)
}}
%condition (c: (f32[8], s32[])) -> pred[] {{
  %c = (f32[8]{{0}}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=1
  %n = s32[] constant({limit})
  ROOT %less = pred[] {how["less"]}
}}
"""
    text = program(
        "%p = f32[8]{0} parameter(0)",
        f"%first = s32[] constant({start})",
        "%zero = s32[] copy(%first)",
        "%init = (f32[8]{0}, s32[]) tuple(%p, %zero)",
        "ROOT %w = (f32[8]{0}, s32[]) while(%init), condition=%condition, body=%body",
        more=loop,
    )
    found = collectives(text, MESH)
    assert [(one.count, one.guess) for one in found] == ([(trips, "")] if trips else [])


@pytest.mark.parametrize(
    "dtype,nbytes", [("f32", 40), ("bf16", 20), ("pred", 10), ("s4", 5), ("f8e4m3fn", 10), ("u64", 80), ("c64", 80)]
)
def test_bytes_of_an_array(dtype, nbytes):
    assert Array(dtype, (2, 5)).nbytes == nbytes


def test_names_and_attributes():
    module = parse(gather())
    start = module.computations["main"].named["s"]
    assert (start.opcode, start.operands, start.arrays) == (
        "all-gather-start",
        ("p",),
        (Array("bf16", (512, 8)), Array("bf16", (4096, 8))),
    )
    assert module.computations["main"].root.name == "d"
    assert module.computations["main"].named["p"].op_name == "state.params['blocks'][0]['wk']"
