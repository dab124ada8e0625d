"""How long a chunk's program takes for weights in few bits, by the model and by what multiplies them: what prompts are
cut for (chunk_programs.py). Engine and planner ask it here."""

from shardlm.layers.moe import MoeConfig
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.grouped_weights import FEW_ROWS, FEW_ROWS_OF_EXPERT, GroupedProducts
from shardlm.ops.weight_format import DYNAMIC, AsPublished, WeightFormat, groups_of
from shardlm.serve.chunk_programs import WHILE_WEIGHTS_ARE_READ, FewBits

BLOCK = 128  # rows for which the kernel reads a weight once: two of its blocks, which run beside each other
IN_USE = 2  # bytes of a number in the compute dtype
SIXTEEN_BITS = WHILE_WEIGHTS_ARE_READ["gpu"]  # tokens that take as long as reading weights that each of them multiplies


def few_bits_of(shape: TransformerConfig, weights: WeightFormat, products: GroupedProducts) -> tuple[FewBits, ...]:
    """Of projections and of experts; () where none are in few bits, and where all are made anew for any tokens."""
    if products != "pallas" or weights == "dtype":
        return ()
    moes = [block.mlp for block in shape.blocks() if isinstance(block.mlp, MoeConfig)]
    one = [len(moe.projections) * moe.read_dim(shape.embed_dim) * moe.expert_dim for moe in moes]  # expert
    active = sum(of * moe.top_k for of, moe in zip(one, moes, strict=True))
    each = sum(block.parameters_per_token(shape.embed_dim) for block in shape.blocks())
    found = []
    if (nbytes := _bytes(weights, experts=False)) and weights not in DYNAMIC:
        found.append(_part((each - active) / each, nbytes, FEW_ROWS, BLOCK))
    if moes and (nbytes := _bytes(weights, experts=True)):
        tokens = min(moe.num_experts / moe.top_k for moe in moes)  # for which each expert has a row
        total = sum(of * moe.num_experts for of, moe in zip(one, moes, strict=True))
        found.append(_part(total / each, nbytes, FEW_ROWS_OF_EXPERT * tokens, BLOCK * tokens))
    return tuple(found)


def _part(share: float, nbytes: float, most: float, block: float) -> FewBits:
    """share: numbers for each that a token multiplies."""
    whole = SIXTEEN_BITS * share
    return FewBits(most, block, whole * nbytes / IN_USE, whole, whole * (nbytes + IN_USE) / IN_USE)


def _bytes(weights: WeightFormat, experts: bool) -> float:
    """Of a number, on average of the kinds of weights; 0: they are in the compute dtype."""
    if isinstance(weights, AsPublished):
        found = [groups for key, groups in weights.kinds if ("experts." in key) == experts]
    else:
        found = [groups] if (groups := groups_of(weights, "")) else []
    return sum(1 / groups.a_byte for groups in found) / len(found) if found else 0.0
