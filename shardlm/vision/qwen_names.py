"""What checkpoints of Qwen's models call the weights of their encoders."""

from shardlm.models.naming import Names, Tensor, fused
from shardlm.vision.tower import block_names, linear_names, norm_names

BLOCK = "visual.blocks.{layer}."
# Of feed-forward layers; of a merger its norm and its two products.
GATED = {part: f"mlp.{part}_proj" for part in ("gate", "up", "down")}
OMNI, OMNI_3 = "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"
FEED_FORWARD = {
    "qwen2_vl": {"up": "mlp.fc1", "down": "mlp.fc2"},
    **dict.fromkeys(("qwen2_5_vl", "exaone4_5", OMNI), GATED),
}
MERGER = dict.fromkeys((*FEED_FORWARD, OMNI_3), ("ln_q", "mlp.0", "mlp.2"))
OF_3 = {"up": "mlp.linear_fc1", "down": "mlp.linear_fc2"}
MERGER_OF_3 = ("norm", "linear_fc1", "linear_fc2")


def qwen_names(config) -> Names:
    """By path, of a qwen.QwenConfig."""
    kind, tower = config.kind, config.tower
    of_heads = {f"w{letter}": f"attn.{letter}" if kind == OMNI else "attn.qkv" for letter in "qkv"}
    blocks = block_names(
        tower,
        "tower.block",
        BLOCK,
        attention_norm="norm1",
        mlp_norm="norm2",
        **of_heads,
        wo="attn.proj",
        **FEED_FORWARD.get(kind, OF_3),
    )
    heads = {} if kind == OMNI else {"q": tower.heads} | dict.fromkeys("kv", tower.kv_heads or tower.heads)
    for letter, end in (("w", "weight"), ("b", "bias")):
        sizes = {f"tower.block.{letter}{of}": count * tower.each for of, count in heads.items()}
        blocks |= fused(blocks, f"{BLOCK}attn.qkv.{end}", sizes) if sizes else {}
    names = {
        "patches": Tensor("visual.patch_embed.proj.weight", "D C T Y X -> T Y X C D"),
        "patches_bias": Tensor("visual.patch_embed.proj.bias"),
        "positions": Tensor("visual.pos_embed.weight"),
        **blocks,
    }
    deep = "visual.merger_list.{layer}." if kind == OMNI_3 else "visual.deepstack_merger_list.{layer}."
    for path, theirs in (("merger", "visual.merger."), ("deep", deep)):
        norm, first, second = MERGER.get(kind, MERGER_OF_3)
        names |= norm_names(tower.norm, f"{path}.norm", theirs + norm)
        names |= linear_names(f"{path}.first", theirs + first, True)
        names |= linear_names(f"{path}.second", theirs + second, True)
    return names
