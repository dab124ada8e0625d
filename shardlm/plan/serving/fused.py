"""Projections of few tokens as kernels with norm and gate in them (layers/fused.py): which plans have them, and what a
layer's operations are then: of Llama 3 8B 9 kernels for 15, counted in compiled programs. They are taken to read as
products apart do."""

from collections.abc import Sequence

from shardlm.layers.attention import AttentionConfig
from shardlm.layers.block import BlockConfig
from shardlm.layers.mlp import MlpConfig
from shardlm.ops.few_rows import GATES, MOST, is_one
from shardlm.plan.changed import changed
from shardlm.plan.op import Op
from shardlm.plan.serving.case import ServingCase

BETWEEN = "norms, rotation, activation, writes"  # the operation of a layer's small kernels


def possible(case: ServingCase) -> int:
    """Tokens up to which an engine may have them, as serve/try_out.py finds without a GPU; 0: none."""
    engine, blocks = case.engine, case.model.shape.blocks()
    hosts = engine.mesh.size("pipeline", "expert", "tensor") > case.cluster.gpus_per_host
    never = engine.fused_products == "off" or case.dtype != "bfloat16" or case.weights != "dtype" or engine.room.count
    untried = engine.fused_products == "auto" and (engine.mesh.pipeline > 1 or hosts)
    fit = any(isinstance(block.attention, AttentionConfig) and not block.streams for block in blocks)
    return MOST if fit and not never and not untried else 0


def planned(case: ServingCase) -> int:
    """Tokens up to which plans have them; 0: none. Where they are asked for, and where an engine was seen to take them:
    of Llama 3 8B on one H200, a step of 1, 8 and 64 rows 4.43, 4.77 and 6.85 ms for 5.05, 5.41 and 7.81 (measured)."""
    engine = case.engine
    seen = case.cluster.gpu.generation == "hopper" and engine.mesh.size("pipeline", "expert", "tensor") == 1
    return possible(case) if engine.fused_products == "on" or seen else 0


def fused(ops: Sequence[Op], block: BlockConfig, across: bool) -> list[Op]:
    """The operations of a layer whose projections are such kernels: of queries, keys and values one, of gate and up
    one. Norms are in what reads them. `across`: sums of what goes back to the stream cross devices."""
    between = 0
    if isinstance(block.attention, AttentionConfig):
        # A rotation and two writes are one kernel. Sums that cross devices need one before and one after.
        between += int(across) - 2 * block.attention.plain
        ops = _joined(ops, ("wq", "wk", "wv"))
    if isinstance(block.mlp, MlpConfig):
        between += int(across)
        if _plain(block.mlp):
            between -= any(is_one(int(op.dims[1])) for op in ops if op.what == "gate")
            ops = _joined(ops, ("gate", "up"))
    return [changed(op, count=op.count + between) if op.what == BETWEEN else op for op in ops]


def _plain(mlp: MlpConfig) -> bool:
    plain = mlp.gated and not mlp.bias and not mlp.limit and not mlp.sparsity and mlp.gate_scale == 1
    return plain and mlp.activation in GATES


def _joined(ops: Sequence[Op], names: Sequence[str]) -> list[Op]:
    """With one product where several read the same."""
    those = [op for op in ops if op.what in names and op.unit == "matmul"]
    if len(those) < 2:
        return list(ops)
    rows, _, summed = those[0].dims
    sums = {name: sum(getattr(op, name) for op in those) for name in ("flops", "hbm_bytes")}
    dims = (rows, sum(op.dims[1] for op in those), summed)
    return [changed(those[0], what=" ".join(names), dims=dims, **sums), *(op for op in ops if op not in those)]
