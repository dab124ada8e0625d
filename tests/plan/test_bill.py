"""The bill of planted programs, by hand: what each kernel and each collective takes, and what hides behind what."""

import dataclasses

import pytest
from gpu_programs import on_gpus

from shardlm.hardware import GPUS
from shardlm.hlo.kernels import kernel
from shardlm.hlo.text import parse
from shardlm.mesh import MeshSpec
from shardlm.models.llama import LlamaConfig
from shardlm.plan.bill import CompiledStep, compiled_step, link
from shardlm.plan.cluster import Cluster
from shardlm.plan.constants import NVLINK
from shardlm.plan.kernels import Kernels
from shardlm.plan.links import Route
from shardlm.plan.op import Op
from shardlm.topology import topology
from shardlm.train.config import RunConfig, TrainConfig
from shardlm.train.program import Program

MESH = MeshSpec(fsdp=8)
CLUSTER = Cluster.of(GPUS["h100"], 8)
N = 4096
KERNELS = Kernels.of(CLUSTER.gpu)
MATMUL = KERNELS.one_seconds(Op("mlp", "", "matmul", 2.0 * N**3, 3 * 2 * N**2, 1, dims=(N, N, N)))
TAKEN = NVLINK.cores  # of a GPU's cores, by a collective
GROUPS = "replica_groups={{0,1,2,3,4,5,6,7}}"

PROGRAM = f"""HloModule m

%body (c: (s32[], bf16[{N},{N}], bf16[ROWS,{N}])) -> (s32[], bf16[{N},{N}], bf16[ROWS,{N}]) {{
  %c = (s32[], bf16[{N},{N}], bf16[ROWS,{N}]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %x = bf16[{N},{N}] get-tuple-element(%c), index=1
  %w = bf16[ROWS,{N}] get-tuple-element(%c), index=2
  %ag = (bf16[ROWS,{N}], bf16[WHOLE,{N}]) all-gather-start(%w), {GROUPS}, dimensions={{0}}, \
metadata={{op_name="jit(step)/jvp()/gather"}}, backend_config={{"collective_backend_config":{{"is_sync":SYNC}}}}
  %y = bf16[{N},{N}] dot(%x, %x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}NOTE
  %agd = bf16[WHOLE,{N}] all-gather-done(%ag)
  ROOT %r = (s32[], bf16[{N},{N}], bf16[ROWS,{N}]) tuple(%next, %y, %w)
}}

%cond (c: (s32[], bf16[{N},{N}], bf16[ROWS,{N}])) -> pred[] {{
  %c = (s32[], bf16[{N},{N}], bf16[ROWS,{N}]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %five = s32[] constant(5)
  ROOT %less = pred[] compare(%i, %five), direction=LT
}}

ENTRY %main (x: bf16[{N},{N}], w: bf16[ROWS,{N}]) -> bf16[{N},{N}] {{
  %x = bf16[{N},{N}] parameter(0), metadata={{op_name="x"}}
  %w = bf16[ROWS,{N}] parameter(1), metadata={{op_name="state.params['w']"}}
  %zero = s32[] constant(0)
  %t = (s32[], bf16[{N},{N}], bf16[ROWS,{N}]) tuple(%zero, %x, %w)
  %loop = (s32[], bf16[{N},{N}], bf16[ROWS,{N}]) while(%t), condition=%cond, body=%body
  %y = bf16[{N},{N}] get-tuple-element(%loop), index=1
  ROOT %sum = bf16[{N},{N}] all-reduce(%y), {GROUPS}, to_apply=%add
}}
"""


def step_of(rows: int, sync: str = "false", note: str = "") -> CompiledStep:
    text = PROGRAM.replace("ROWS", str(rows)).replace("WHOLE", str(8 * rows))
    return compiled_step(text.replace("SYNC", sync).replace("NOTE", note), CLUSTER, MESH)


def seconds(kind: str, sent: float) -> float:
    return Route.of(CLUSTER.group(MESH, ("fsdp",)), CLUSTER).seconds(kind, sent, 1)


def test_what_a_kernel_covers_is_hidden_and_the_rest_waits():
    adding = KERNELS.one_seconds(Op("norm", "", "memory", 0, 12, 1))  # the loop's counter: a kernel of its own
    reduced = seconds("all-reduce", 2 * 7 / 8 * 2 * N * N)
    for rows, sync in ((512, "false"), (8192, "false"), (512, "true")):
        step = step_of(rows, sync)
        whole, once = 2 * 8 * rows * N * 7 / 8, seconds("all-gather", 2 * 8 * rows * N * 7 / 8)
        # Beside the gather the product has 1 - TAKEN of the cores: it is longer by what it could not do meanwhile.
        beside = sync == "false"
        slowed = min(once * TAKEN, MATMUL * TAKEN / (1 - TAKEN)) if beside else 0.0
        waited = max(0.0, once - MATMUL - slowed) if beside else once
        assert (waited == 0) == (rows == 512 and sync == "false"), "the cases are to differ"
        gather = next(row for row in step.rows if row.kind == "all-gather")
        assert (gather.cause, gather.link, gather.phase, gather.count) == ("state.params.w", "NVLink", "forward", 5)
        assert gather.nbytes == pytest.approx(5 * whole) and gather.seconds == pytest.approx(5 * once)
        assert gather.exposed_seconds == pytest.approx(5 * waited)
        assert gather.hidden_seconds == pytest.approx(5 * (once - waited))
        assert step.compute_seconds == pytest.approx(5 * (MATMUL + adding))
        assert step.exposed == {"fsdp": pytest.approx(5 * waited + reduced)}
        assert step.contention_seconds == pytest.approx(5 * slowed)
        assert step.step_seconds == pytest.approx(5 * (MATMUL + adding + slowed + waited) + reduced)
        assert step.rows[0].exposed_seconds == max(row.exposed_seconds for row in step.rows)
        assert step.xla_compute_seconds is None and not step.unknown


TWO = f"""HloModule m

%wrapped (a: bf16[{N},{N}]) -> bf16[512,{N}] {{
  %a = bf16[{N},{N}] parameter(0)
  ROOT %s = bf16[512,{N}] reduce-scatter(%a), {GROUPS}, dimensions={{0}}, to_apply=%add
}}

ENTRY %main (x: bf16[{N},{N}], w: bf16[65536,{N}]) -> bf16[{N},{N}] {{
  %x = bf16[{N},{N}] parameter(0)
  %w = bf16[65536,{N}] parameter(1)
  %long = (bf16[65536,{N}], bf16[524288,{N}]) all-gather-start(%w), {GROUPS}, dimensions={{0}}
  %short = ((bf16[{N},{N}]), bf16[512,{N}]) async-start(%x), calls=%wrapped
  %y = bf16[{N},{N}] dot(%x, %x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  %shorted = bf16[512,{N}] async-done(%short)
  %z = bf16[{N},{N}] dot(%y, %x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  %longed = bf16[524288,{N}] all-gather-done(%long)
  ROOT %r = bf16[{N},{N}] bitcast(%z)
}}
"""


def test_collectives_under_way_together_share_a_link_and_no_kernel_twice():
    step = compiled_step(TWO, CLUSTER, MESH)
    long = seconds("all-gather", 2 * 524288 * N * 7 / 8)
    short = seconds("reduce-scatter", 2 * N * N * 7 / 8)
    exposed = {row.kind: row.exposed_seconds for row in step.rows}
    # The first kernel runs beside the long one, which the short one waits for; the second beside nothing.
    first = MATMUL / (1 - TAKEN)
    assert exposed["all-gather"] == pytest.approx(long - first)
    assert exposed["reduce-scatter"] == pytest.approx(short)
    assert step.step_seconds == pytest.approx(first + (long - first) + short + MATMUL)


def test_what_stays_inside_an_island_waits_for_the_network():
    """Over fsdp, between hosts, and tensor, inside one: the short one begins as the long one ends."""
    mesh, cluster = MeshSpec(fsdp=2, tensor=8), Cluster.of(GPUS["h100"], 16)
    inside = "replica_groups={{0,1,2,3,4,5,6,7},{8,9,10,11,12,13,14,15}}"
    across = "replica_groups={{0,8},{1,9},{2,10},{3,11},{4,12},{5,13},{6,14},{7,15}}"
    text = TWO.replace(f"reduce-scatter(%a), {GROUPS}", f"reduce-scatter(%a), {inside}")
    text = text.replace(GROUPS, across).replace("524288", "131072")
    step = compiled_step(text, cluster, mesh)

    def route(axis: str) -> Route:
        return Route.of(cluster.group(mesh, (axis,)), cluster)

    long = route("fsdp").seconds("all-gather", 2 * 131072 * N / 2, 1)
    short = route("tensor").seconds("reduce-scatter", 2 * N * N * 7 / 8, 1)
    first = MATMUL / (1 - route("fsdp").cores)
    assert short < first < long
    assert {row.link: row.exposed_seconds for row in step.rows} == {
        "network": pytest.approx(long - first),
        "NVLink": pytest.approx(short),
    }
    assert step.contention_seconds == pytest.approx(first - MATMUL)
    assert step.step_seconds == pytest.approx(long + short + MATMUL)


def test_a_collective_among_the_kernels_waits_for_its_own_link_alone():
    """Over tensor beside a gather over the network, and over fsdp behind it."""
    mesh, cluster = MeshSpec(fsdp=2, tensor=8), Cluster.of(GPUS["h100"], 16)
    inside = "replica_groups={{0,1,2,3,4,5,6,7},{8,9,10,11,12,13,14,15}}"
    across = "replica_groups={{0,8},{1,9},{2,10},{3,11},{4,12},{5,13},{6,14},{7,15}}"
    among = TWO.replace("%short = ((bf16[4096,4096]), bf16[512,4096]) async-start(%x), calls=%wrapped\n", "")
    assert among != TWO
    long = Route.of(cluster.group(mesh, ("fsdp",)), cluster).seconds("all-gather", 2 * 131072 * N / 2, 1)
    for axis, groups in (("tensor", inside), ("fsdp", across)):
        summed = f"%shorted = bf16[{N},{N}] all-reduce(%x), {groups}, to_apply=%add"
        text = among.replace("%shorted = bf16[512,4096] async-done(%short)", summed)
        step = compiled_step(text.replace(GROUPS, across).replace("524288", "131072"), cluster, mesh)
        found = Route.of(cluster.group(mesh, (axis,)), cluster)
        short = found.seconds("all-reduce", found_bytes(axis) * N * N, 1)
        exposed = {row.kind: row.exposed_seconds for row in step.rows}
        assert exposed["all-reduce"] == pytest.approx(short)
        assert step.step_seconds < long + short if axis == "tensor" else step.step_seconds > long + short


def found_bytes(axis: str) -> float:
    return 2 * 2 * (7 / 8 if axis == "tensor" else 1 / 2)


def test_xlas_own_estimate_stands_beside():
    cost = '"reification_cost":[{"exec_time_us":250.0,"name":""},{"exec_time_us":1e9,"name":"sol"}]'
    step = step_of(512, note=f", backend_config={{{cost}}}")
    assert step.xla_compute_seconds == pytest.approx(5 * 250e-6)
    assert step.compute_seconds == step_of(512).compute_seconds


FUSIONS = """HloModule m

%sliced (stack: f32[32,64,64], i: s32[]) -> bf16[64,64] {
  %stack = f32[32,64,64] parameter(0)
  %i = s32[] parameter(1)
  %same = f32[32,64,64] bitcast(%stack)
  %one = f32[1,64,64] dynamic-slice(%same, %i, %i, %i), dynamic_slice_sizes={1,64,64}
  %flat = f32[64,64] bitcast(%one)
  ROOT %cast = bf16[64,64] convert(%flat)
}

%updated (stack: f32[32,64,64], x: f32[64,64], i: s32[]) -> f32[32,64,64] {
  %stack = f32[32,64,64] parameter(0)
  %x = f32[64,64] parameter(1)
  %i = s32[] parameter(2)
  %new = f32[1,64,64] bitcast(%x)
  ROOT %u = f32[32,64,64] dynamic-update-slice(%stack, %new, %i, %i, %i)
}

%cast_first (stack: f32[32,64,64]) -> bf16[1,64,64] {
  %stack = f32[32,64,64] parameter(0)
  %whole = bf16[32,64,64] convert(%stack)
  ROOT %last = bf16[1,64,64] slice(%whole), slice={[31:32], [0:64], [0:64]}
}

%updated_and_used (stack: f32[32,64,64], x: bf16[64,64], i: s32[]) -> f32[32,64,64] {
  %stack = f32[32,64,64] parameter(0)
  %x = bf16[64,64] parameter(1)
  %i = s32[] parameter(2)
  %new = f32[1,64,64] convert(%x)
  %u = f32[32,64,64] dynamic-update-slice(%stack, %new, %i, %i, %i)
  ROOT %twice = f32[32,64,64] add(%u, %u)
}

ENTRY %main (stack: f32[32,64,64], i: s32[], x: f32[64,64]) -> bf16[64,64] {
  %stack = f32[32,64,64] parameter(0)
  %i = s32[] parameter(1)
  %x = f32[64,64] parameter(2)
  %slice = bf16[64,64] fusion(%stack, %i), kind=kLoop, calls=%sliced
  %update = f32[32,64,64] fusion(%stack, %x, %i), kind=kLoop, calls=%updated
  %beside = ((f32[32,64,64], f32[64,64], s32[]), f32[32,64,64], u32[]) fusion-start(%stack, %x, %i), calls=%updated
  %ended = f32[32,64,64] fusion-done(%beside)
  %cast = bf16[1,64,64] fusion(%stack), kind=kLoop, calls=%cast_first
  %changed = f32[32,64,64] fusion(%stack, %slice, %i), kind=kLoop, calls=%updated_and_used
  %rows = bf16[100,64] custom-call(%i, %slice, %stack), MOSAIC
  %blackwell = bf16[100,48] custom-call(%slice, %stack, %i, %i), MOSAIC
  %grads = bf16[8,64,64] custom-call(%slice, %x, %i), TRITON, metadata={op_name="a/ragged_dot.x"}
  %few_bits = bf16[64,64] custom-call(%slice, %x), TRITON
  ROOT %o = bf16[64,64] custom-call(%slice, %slice), custom_call_target="own"
}
"""


def test_what_kernels_read_and_write():
    of_experts = 'custom_call_target="mosaic_gpu_v2", metadata={op_name="a/ragged_dot.x"}'
    text = FUSIONS.replace("MOSAIC", of_experts).replace("TRITON", 'custom_call_target="__gpu$xla.gpu.triton"')
    module = parse(text)
    entry = module.computations[module.entry]
    names = ("slice", "update", "beside", "ended", "cast", "changed", "rows", "blackwell", "grads", "few_bits", "i")
    found = {name: kernel(module, entry, entry.named[name]) for name in names}
    assert found["i"] is None and found["ended"] is None
    assert found["slice"].nbytes == 64 * 64 * (4 + 2) + 4  # a slice of what is stacked, and its index
    assert found["update"].nbytes == 64 * 64 * (4 + 4) + 4  # what is new; the rest stays in its place
    assert found["beside"] == found["update"]  # on a stream of its own: its tuple names the same arrays
    assert found["cast"].nbytes == 64 * 64 * (4 + 2)  # of what is cast, the slice
    assert found["changed"].nbytes == 32 * 64 * 64 * (4 + 4) + 64 * 64 * 2 + 4  # all of it is read and written
    assert found["rows"].grouped and found["rows"].flops == 2 * 64 * 64 * 64
    assert found["blackwell"].flops == 2 * 64 * 64 * 48 and found["blackwell"].dtype == "bf16"
    assert found["grads"].grouped and found["grads"].flops == 2 * 64 * 64 * 64 and not found["few_bits"].grouped
    step = compiled_step(text, CLUSTER, MESH)
    assert dict(step.unknown) == {"own": 1, "__gpu$xla.gpu.triton": 1}


OFFLOADED = """HloModule m

%fetched (stack: f32[4,1024,1024], i: s32[]) -> f32[1,1024,1024] {
  %stack = f32[4,1024,1024]{2,1,0:S(5)} parameter(0)
  %i = s32[] parameter(1)
  ROOT %one = f32[1,1024,1024]{2,1,0} dynamic-slice(%stack, %i, %i, %i), dynamic_slice_sizes={1,1024,1024}
}

%returned (stack: f32[4,1024,1024], x: f32[1,1024,1024], i: s32[]) -> f32[4,1024,1024] {
  %stack = f32[4,1024,1024]{2,1,0:S(5)} parameter(0)
  %x = f32[1,1024,1024]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %u = f32[4,1024,1024]{2,1,0:S(5)} dynamic-update-slice(%stack, %x, %i, %i, %i)
}

ENTRY %main (stack: f32[4,1024,1024], whole: f32[1024,1024], i: s32[], x: bf16[4096,4096]) -> bf16[4096,4096] {
  %stack = f32[4,1024,1024]{2,1,0:S(5)} parameter(0), metadata={op_name="state.opt_state['mu']"}
  %whole = f32[1024,1024]{1,0:S(5)} parameter(1)
  %i = s32[] parameter(2)
  %x = bf16[4096,4096]{1,0} parameter(3)
  %f = ((f32[4,1024,1024]{2,1,0:S(5)}, s32[]), f32[1,1024,1024]{2,1,0}, u32[]) fusion-start(%stack, %i), calls=%fetched
  %fd = f32[1,1024,1024]{2,1,0} fusion-done(%f)
  %c = (f32[1024,1024]{1,0}, f32[1024,1024]{1,0:S(5)}, u32[]) copy-start(%whole)
  %g = ((f32[4,1024,1024]{2,1,0:S(5)}, f32[1,1024,1024]{2,1,0}, s32[]), f32[4,1024,1024]{2,1,0:S(5)}, u32[]) \
fusion-start(%stack, %fd, %i), calls=%returned
  %y = bf16[4096,4096]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %cd = f32[1024,1024]{1,0} copy-done(%c)
  %gd = f32[4,1024,1024]{2,1,0:S(5)} fusion-done(%g)
  ROOT %r = bf16[4096,4096]{1,0} bitcast(%y)
}
"""


def test_copies_to_the_host_and_from_it_take_its_link_both_ways_at_once():
    step = compiled_step(OFFLOADED, CLUSTER, MESH)
    once = 4 * 1024**2 / CLUSTER.host_bytes_per_second + KERNELS.gap
    assert once < MATMUL, "what begins before the product is to end beside it"
    assert CLUSTER.host_bytes_per_second < CLUSTER.gpu.pcie_bytes_per_second < KERNELS.memory
    assert {(row.kind, row.axes, row.link) for row in step.rows} == {("copy", ("host",), "PCIe")}
    waits = {row.cause: (row.count, row.nbytes, row.seconds, row.exposed_seconds) for row in step.rows}
    slice_bytes, mu = 4 * 1024**2, "state.opt_state.mu"
    assert waits[f"{mu}, from the host"] == (1, slice_bytes, pytest.approx(once), pytest.approx(once))
    assert waits[f"{mu}, to the host"] == (1, slice_bytes, pytest.approx(once), 0)
    assert step.compute_seconds == pytest.approx(MATMUL)  # the copies are no kernels
    assert step.step_seconds == pytest.approx(MATMUL + once)


def test_links():
    two_hosts, mesh = Cluster.of(GPUS["h100"], 16), MeshSpec(fsdp=2, tensor=8)
    assert [link(two_hosts, mesh, axes) for axes in (("tensor",), ("fsdp",))] == ["NVLink", "network"]
    assert link(Cluster.of(GPUS["l40s"], 8), MESH, ("fsdp",)) == "PCIe"


@on_gpus
def test_a_real_step():
    model = LlamaConfig(vocab_size=8192, embed_dim=1024, num_layers=4, num_heads=8, num_kv_heads=8, mlp_dim=4096)
    config = RunConfig(model, mesh=MESH, train=TrainConfig(global_batch=8, seq_len=2048))
    program = Program.make(config, MESH.build(topology("h100", 1, 8)))
    # Matmuls by cuBLAS and no optimisation of other kernels: faster to compile, and none of it matters here.
    fast = {"xla_gpu_enable_triton_gemm": False, "xla_backend_optimization_level": 0}
    text = program.compile("step", dict(program.xla_options().options) | fast).as_text()
    step = compiled_step(text, CLUSTER, MESH)
    gathered = [row for row in step.rows if row.kind == "all-gather" and ".segments." in row.cause]
    assert {row.cause.rpartition(".")[2] for row in gathered} == {"wq", "wk", "wv", "wo", "gate", "up", "down"}
    assert sum(row.count for row in gathered) == 4 * 7 * 2  # of each layer, forward and backward
    assert 0 < step.exposed_seconds < sum(row.seconds for row in step.rows)
    # Twice the bandwidth of every link leaves the kernels as they are.
    fast_gpu = dataclasses.replace(GPUS["h100"], nvlink_bytes_per_second=2 * GPUS["h100"].nvlink_bytes_per_second)
    faster = compiled_step(text, Cluster.of(fast_gpu, 8), MESH)
    assert faster.compute_seconds == step.compute_seconds and faster.exposed_seconds < step.exposed_seconds
