"""What checkpoints of Qwen's models call the weights of their encoders."""

from shardlm.models.naming import Names, Tensor, fused
from shardlm.vision.tower import block_names, linear_names, norm_names

BLOCK = "visual.blocks.{layer}."
# Of feed-forward layers; of a merger its norm and its two products.
GATED = {part: f"mlp.{part}_proj" for part in ("gate", "up", "down")}
FEED_FORWARD = {"qwen2_vl": {"up": "mlp.fc1", "down": "mlp.fc2"}, "qwen2_5_vl": GATED, "exaone4_5": GATED}
MERGER = dict.fromkeys(FEED_FORWARD, ("ln_q", "mlp.0", "mlp.2"))
OF_3 = {"up": "mlp.linear_fc1", "down": "mlp.linear_fc2"}
MERGER_OF_3 = ("norm", "linear_fc1", "linear_fc2")


def qwen_names(config) -> Names:
    """By path, of a qwen.QwenConfig."""
    kind, tower = config.kind, config.tower
    blocks = block_names(
        tower,
        "tower.block",
        BLOCK,
        attention_norm="norm1",
        mlp_norm="norm2",
        **dict.fromkeys(("wq", "wk", "wv"), "attn.qkv"),
        wo="attn.proj",
        **FEED_FORWARD.get(kind, OF_3),
    )
    heads = {"q": tower.heads} | dict.fromkeys("kv", tower.kv_heads or tower.heads)
    for letter, end in (("w", "weight"), ("b", "bias")):
        sizes = {f"tower.block.{letter}{of}": count * tower.each for of, count in heads.items()}
        blocks |= fused(blocks, f"{BLOCK}attn.qkv.{end}", sizes)
    names = {
        "patches": Tensor("visual.patch_embed.proj.weight", "D C T Y X -> T Y X C D"),
        "patches_bias": Tensor("visual.patch_embed.proj.bias"),
        "positions": Tensor("visual.pos_embed.weight"),
        **blocks,
    }
    for path, theirs in (("merger", "visual.merger."), ("deep", "visual.deepstack_merger_list.{layer}.")):
        norm, first, second = MERGER.get(kind, MERGER_OF_3)
        names |= norm_names(tower.norm, f"{path}.norm", theirs + norm)
        names |= linear_names(f"{path}.first", theirs + first, True)
        names |= linear_names(f"{path}.second", theirs + second, True)
    return names
