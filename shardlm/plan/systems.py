"""What other training systems do that a configuration of this one has no word for, as their sources say: what a remat
policy keeps, which attention kernels run, what is hidden, and where the ends of a pipeline count."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from shardlm.layers.attention import AttentionConfig
from shardlm.plan.constants import HOST
from shardlm.plan.op import Op
from shardlm.plan.published import Model, Point
from shardlm.plan.traffic import GATHER, REDUCE, SCATTER, Sent, share

# Its ZeRO-3 of early 2021 gathers each weight by itself and waits for it: every gather synchronised the device, and
# copied what came from each rank apart, as did the scatters of gradients
# (https://github.com/deepspeedai/DeepSpeed/pull/1188). Layers of over stage3_max_live_parameters, 1e9, are dropped at
# once, so that forward, repeated forward and backward pass each gather them.
DEEPSPEED = "Megatron-LM with DeepSpeed ZeRO-3"
COPIES = 2  # operations for each rank's part: a slice and a copy
BRIDGE, AUTOMODEL = "Megatron Bridge", "NeMo AutoModel"
MEGATRON = ("Megatron-LM", DEEPSPEED, "NeMo", BRIDGE)
# Checkpoints that run the whole layer again: Megatron's own, and PyTorch's before 2.1, which came to stop early.
WHOLE_LAYERS = (*MEGATRON, "Composer FSDP")
# Attention besides cuDNN's: PyTorch's scaled_dot_product_attention is FlashAttention-2 on Hopper too; llm-foundry's
# benchmarks took attn_impl=triton by default (scripts/train/benchmarking/submit_benchmarks.py@12a63191).
KERNELS: Mapping[str, str] = MappingProxyType({"torchtitan": "flash2", "Composer FSDP": "triton"})
# tp_comm_overlap and grad_reduce_in_fp32=False in the recipes.
RECIPES = ("NeMo", BRIDGE)
# And reduce_dtype=torch.bfloat16 (foundation-model-stack/fms-fsdp@2e76f991 pretraining/policies/mixed_precision.py).
SUMS_IN_16_BITS = (*RECIPES, "fms-fsdp")
ADAPTED = "adapters of all projections"  # else their source does not say of which
COMBINED = "gradients are summed 64 MiB at a time"
# Each operation of PyTorch a kernel of its own: read and written of a number, forward and for its gradient by PyTorch's
# formulas, by fms.modules of IBM's foundation-model-stack (layernorm.py@0790a150: float32, each cast a pass, and the
# residual's sum; feedforward.py@00af7304; positions.py@01cadbc3: float32 2x2 matrices of queries and keys). Compiled
# it is 10 to 23% faster (pytorch/pytorch.github.io@d3e59b8e _posts/2024-05-21-maximizing-training-throughput.md).
EAGER = "not compiled"
APART: Mapping[str, tuple[float, float]] = MappingProxyType(
    {"norms and residuals": (42 / 8, 98 / 8), "activation": (10 / 6, 18 / 6)}  # of ours
)
ROTATION = (36, 36)


@dataclasses.dataclass(frozen=True)
class Recomputed:
    """Shares of a layer's forward work that the backward pass repeats, by Op.unit.

    last  of its last product, whose result no gradient asks for: jax and PyTorch leave it out
    """

    matmul: float
    attention: float
    memory: float
    last: float = 0.0

    def again(self, op: Op) -> float:
        return self.last if op.what.endswith("down") else getattr(self, op.unit)


POLICIES: Mapping[str, Recomputed] = MappingProxyType(
    {"none": Recomputed(0, 0, 0), "full": Recomputed(1, 1, 1), "offload": Recomputed(0, 0, 0)}
)
# Of the others, by the words in Point.note. The three projections are a tenth of a Llama layer's weights.
SELECTIVE: Mapping[str, Recomputed] = MappingProxyType(
    {
        "minimal_flash": Recomputed(0, 0, 1),
        "save_qkv_proj": Recomputed(0.9, 1, 1),
        "every second matmul": Recomputed(0.5, 0, 1),
        "attention core is recomputed": Recomputed(0, 1, 0),
        "SAVE_DOT_WITH_NO_BATCH_DIM": Recomputed(0, 1, 1),
        # Of a Llama's products but the MLP's last, its first two are three quarters.
        "save_dot_with_context_except_mlp": Recomputed(0.75, 0, 1),
        "up projection": Recomputed(0.1, 0, 0),
        "recompute of norms": Recomputed(0, 0, 1),
    }
)


def recomputed(point: Point) -> Recomputed | None:
    """None where the source does not say what is kept."""
    if point.remat == "full" and point.framework in WHOLE_LAYERS:
        return Recomputed(1, 1, 1, 1)
    if point.remat in POLICIES:
        return POLICIES[point.remat]
    return next((policy for words, policy in SELECTIVE.items() if words in point.note), None)


def attention_kernel(point: Point) -> str:
    """As kernels.py names them."""
    if point.attention == "unfused":
        return "xla"
    if "FlexAttention" in point.note or "SDPA" in point.note:  # the first is Triton's, not faster than FlashAttention-2
        return "flash2"
    return KERNELS.get(point.framework, "cudnn")


def overlaps_tensor(point: Point) -> bool:
    """Whether what tensor parallelism sends runs behind the matmuls that need it, in parts."""
    if "tensor parallel not overlapped" in point.note:
        return False
    said = ("tensor parallel overlapped", "AsyncTP")
    return point.framework in RECIPES or any(words in point.note for words in said)


def ends_are_layers(point: Point) -> bool:
    """Whether embedding and loss take the place of a layer each in the pipeline."""
    return "embedding and loss count as layers" in point.note


def with_ends(model: Model) -> Model:
    """The pipeline is as long as if they were."""
    return dataclasses.replace(model, num_layers=model.num_layers + 2)


def as_run(ops: Iterable[Op], policy: Recomputed) -> Iterator[Op]:
    """Our operations, repeated as their system repeats them."""
    for op in ops:
        if op.layer not in ("head", "embedding", "optimizer"):
            again = op.forward * policy.again(op)
            op = dataclasses.replace(op, again=again, count=op.count - op.again + again)
        yield op


def as_apart(ops: list[Op], point: Point, attention: AttentionConfig) -> Iterator[Op]:
    """With memory moved by every operation where nothing is compiled."""
    for op in ops:
        if EAGER in point.note and op.what in APART:
            forward, gradient = (times * op.hbm_bytes for times in APART[op.what])
            yield dataclasses.replace(op, hbm_bytes=forward, gradient_bytes=gradient)
            if op.layer == "norm":
                heads = attention.num_heads + attention.num_kv_heads
                rotated = point.microbatch * point.seq_len * heads * attention.head_dim
                forward, gradient = (nbytes * rotated for nbytes in ROTATION)
                yield dataclasses.replace(
                    op, layer="attention", what="positions", hbm_bytes=forward, gradient_bytes=gradient
                )
        else:
            yield op


def as_sent(sent: list[Sent], point: Point) -> Iterator[Sent]:
    """Our traffic as theirs: stages keep their weights, interleaved ones send behind other microbatches
    (overlap_p2p_comm), some sum gradients in 16 bits, and sums of a fixed size are many where their steps are long.
    """
    hidden = {("tensor",)} if overlaps_tensor(point) else set()
    if point.framework in MEGATRON and point.schedule == "interleaved":
        hidden.add(("pipeline",))
    for one in sent:
        if one.why.endswith("to its stage and back"):
            continue
        if point.adapters and one.why.endswith((": scatters", ": sum of gradients")):
            continue  # weights that are not trained
        if one.axes in hidden:
            one = dataclasses.replace(one, beside=True)
        if point.framework == DEEPSPEED and one.kind in (GATHER, SCATTER):
            one = _awaited(one, point.mesh.size(*one.axes))
        if point.framework in SUMS_IN_16_BITS and one.kind == REDUCE:
            one = dataclasses.replace(one, nbytes=one.nbytes / 2)
        if COMBINED in point.note and one.kind == REDUCE:
            one = dataclasses.replace(one, count=one.nbytes / (2 * share(point.mesh.size(*one.axes)) * 2**26))
        yield one


def _awaited(sent: Sent, ranks: int) -> Sent:
    """As DEEPSPEED moves weights and gradients; queries, keys and values are one weight of Megatron's."""
    times = 1.5 if sent.kind == GATHER else 1
    host = 0.0 if sent.why.partition(":")[0].endswith((".wk", ".wv")) else COPIES * ranks * HOST
    return dataclasses.replace(sent, nbytes=times * sent.nbytes, count=times * sent.count, beside=False, host=host)
