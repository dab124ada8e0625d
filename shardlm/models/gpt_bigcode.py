"""StarCoder (https://arxiv.org/abs/2305.06161) and SantaCoder (https://arxiv.org/abs/2301.03988): GPT-2 with one head
of keys and values."""

from shardlm.layers.attention import AttentionConfig
from shardlm.layers.block import BlockConfig
from shardlm.models import gpt2
from shardlm.models.hf_options import Options
from shardlm.models.naming import Names, Tensor, fused, fused_by_head, linear
from shardlm.models.transformer_config import TransformerConfig

LAYER = "transformer.h.{layer}."
# How softmax and caches of the first code ran: not what is computed.
RUN = (
    *("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "inference_runner", "max_batch_size"),
    *("max_sequence_length", "pad_key_length", "pre_allocate_kv_cache", "runner_max_sequence_length"),
    "validate_runner_input",
)


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` gpt_bigcode."""
    for name in (*RUN, "num_key_value_heads"):  # the last repeats multi_query
        options(name, None)
    options.where_absent(activation_function="gelu_pytorch_tanh")
    return gpt2.decoder(options, kv_heads=1 if options("multi_query", True) else options("n_head"))


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    found = gpt2.names(config, block)
    found |= linear("attention.wo", f"{LAYER}attn.c_proj", "o")
    found |= linear("mlp.up", f"{LAYER}mlp.c_fc", "into") | linear("mlp.down", f"{LAYER}mlp.c_proj", "out")
    return found | _made_together(block.attention, f"{LAYER}attn.c_attn")


def _made_together(attention: AttentionConfig, name: str) -> Names:
    """All heads of queries, then the one of keys and of values; or each head's three."""
    if attention.num_kv_heads > 1:
        return fused_by_head(name, attention.head_dim, 1)
    sizes, found = {"q": attention.num_heads * attention.head_dim, "k": attention.head_dim, "v": attention.head_dim}, {}
    for kind, layout, end in (("w", "(N H) D -> D N H", "weight"), ("b", "(N H) -> N H", "bias")):
        of_each = {f"attention.{kind}{letter}": size for letter, size in sizes.items()}
        found |= fused(dict.fromkeys(of_each, Tensor("", layout)), f"{name}.{end}", of_each)
    return found
