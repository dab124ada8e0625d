"""Projections of few tokens as kernels with norm and gate in them (layers/fused.py): which plans have them, and what a
layer's operations are then: of Llama 3 8B 11 kernels for 15, counted in compiled programs. How fast they read is not
measured; they are taken to read as products apart do."""

from collections.abc import Sequence

from shardlm.layers.attention import AttentionConfig
from shardlm.layers.block import BlockConfig
from shardlm.layers.mlp import MlpConfig
from shardlm.ops.few_rows import GATES, MOST, PAIRS, TILE
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


def fused(ops: Sequence[Op], block: BlockConfig, tokens: float) -> list[Op]:
    """The operations of a layer whose projections of so many tokens are such kernels: of queries, keys and values one,
    of gate and up one, which gates too where it has columns enough. Norms are in what reads them, and residuals, which
    were in the norms, are kernels in their place."""
    if isinstance(block.attention, AttentionConfig):
        ops = _joined(ops, ("wq", "wk", "wv"))
    mlp = block.mlp
    if not isinstance(mlp, MlpConfig) or not _plain(mlp):
        return list(ops)
    columns = max((op.dims[1] for op in ops if op.what == "gate"), default=0)
    ops = _joined(ops, ("gate", "up"))
    gates = columns / (32 if tokens <= TILE else 64) >= PAIRS
    return [changed(op, count=op.count - 1) if gates and op.what == BETWEEN else op for op in ops]


def _plain(mlp: MlpConfig) -> bool:
    return mlp.gated and not mlp.bias and not mlp.limit and mlp.gate_scale == 1 and mlp.activation in GATES


def _joined(ops: Sequence[Op], names: Sequence[str]) -> list[Op]:
    """With one product where several read the same."""
    those = [op for op in ops if op.what in names and op.unit == "matmul"]
    if len(those) < 2:
        return list(ops)
    rows, _, summed = those[0].dims
    sums = {name: sum(getattr(op, name) for op in those) for name in ("flops", "hbm_bytes")}
    dims = (rows, sum(op.dims[1] for op in those), summed)
    return [changed(those[0], what=" ".join(names), dims=dims, **sums), *(op for op in ops if op not in those)]
