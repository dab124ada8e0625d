"""What XLA:CPU's kernels move besides what layers compute, where that is more than measured.py's multiple of what
formulas have: in a ring, around gathers of the sequence, and in stages of a single layer. Of a GPU it is
program_memory.py's."""

from collections.abc import Iterator

from shardlm.flops import attention_pairs
from shardlm.layers.attention import AttentionConfig
from shardlm.layers.block import BlockConfig
from shardlm.layers.mla import MlaConfig
from shardlm.plan.changed import changed
from shardlm.plan.op import Op
from shardlm.plan.program_memory import meetings, ring
from shardlm.plan.sketch import Sketch

# Each pass is counted: of these nothing is left in several kernels.
OF_EXPERTS = ("rows of experts", "weights turned")  # expert_memory.py
COPIES = ("heads turned", "sequence turned", "weights of a stage", "stacks of a stage", *OF_EXPERTS)
# Bytes that take memory as long as a core takes to choose the mask or the position of one number anew, forward, again
# and for gradients: 5 ns, where a kernel that is given them takes 0.3 (data=2 x pipeline=4, circular, traced).
CHOSEN = 40


def of_block(sketch: Sketch, block: BlockConfig) -> Iterator[Op]:
    """Of a layer, forward, once."""
    for mixer in block.mixers:
        if isinstance(mixer, AttentionConfig | MlaConfig):
            yield from _attention(sketch, mixer)
    if sketch.mesh.tensor > 1 and sketch.rows > 1:
        # Two gathers of tokens that lie in the middle of an array, and two scatters.
        turned = 4 * 2 * sketch.itemsize * sketch.tokens * sketch.shape.embed_dim
        yield Op("other", "sequence turned", "memory", 0, turned, 1, gradient_bytes=turned)


def _attention(sketch: Sketch, attention: AttentionConfig | MlaConfig) -> Iterator[Op]:
    mesh = sketch.mesh
    if mesh.context > 1 and sketch.execution.context_attention == "ring":
        whole, times = ring(sketch, attention), meetings(sketch, attention)
        parts = {"hbm_bytes": whole.hbm_bytes / times, "gradient_bytes": whole.gradient_bytes / times}
        yield changed(whole, count=times, **parts)
    if mesh.pipeline > 1 and sketch.schedule.slots == 1:
        # Without a loop over a stage's layers XLA fuses the choice of the tick's microbatch into each kernel that asks
        # for its documents or positions.
        heads = attention.num_heads / mesh.tensor
        scores = sketch.rows * attention_pairs([sketch.config.train.seq_len], attention.window or None) / mesh.context
        turned = 2 * sketch.tokens * attention.head_dim
        chosen = CHOSEN * heads * (scores + turned)
        yield Op("attention", "chosen anew", "memory", 0, chosen, 1, gradient_bytes=chosen)
