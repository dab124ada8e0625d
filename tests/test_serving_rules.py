"""Where weights of a served model rest: over the expert axis, what divides is split, and nothing is gathered."""

import dataclasses

import pytest
from jax.sharding import PartitionSpec as P

from shardlm.errors import ShardlmError
from shardlm.mesh import MeshSpec
from shardlm.models.deepseek import DeepseekConfig
from shardlm.models.mixtral import MixtralConfig
from shardlm.models.transformer_config import Segment, TransformerConfig
from shardlm.serving_rules import serving_rules, split_pages

BOTH = ("expert", "tensor")
V3, MIXTRAL = DeepseekConfig(), MixtralConfig()
FEW_KV = dataclasses.replace(MIXTRAL, num_kv_heads=4)
LATENTS, ALL_KV, FEW = (config.transformer() for config in (V3, MIXTRAL, FEW_KV))


def of_window(tokens: int) -> TransformerConfig:
    """Every other layer of FEW_KV with a window."""
    [block] = FEW.segments[0].pattern
    first = dataclasses.replace(block, attention=dataclasses.replace(block.attention, window=tokens))
    return dataclasses.replace(FEW, segments=(Segment((first, block), FEW.num_layers // 2),))


@pytest.mark.parametrize(
    ("config", "mesh", "spread"),
    [
        (V3, MeshSpec(expert=8, tensor=4), {"heads", "kv_heads", "mlp", "vocab"}),
        (MIXTRAL, MeshSpec(expert=4, tensor=2), {"heads", "kv_heads", "mlp", "vocab"}),
        (FEW_KV, MeshSpec(expert=8), {"heads", "kv_heads", "mlp", "vocab"}),  # kv heads are whole as they were
        (FEW_KV, MeshSpec(expert=4, tensor=2), {"mlp", "vocab"}),  # and would not be half of them any more
        (dataclasses.replace(V3, num_heads=12, vocab_size=1001), MeshSpec(expert=8), {"mlp"}),
        (dataclasses.replace(V3, mlp_dim=1000), MeshSpec(expert=16), {"heads", "kv_heads", "vocab"}),
    ],
)
def test_what_divides_is_split_over_both_axes(config, mesh, spread):
    rules = serving_rules(config.transformer(), mesh)
    for name in ("heads", "kv_heads", "mlp", "vocab"):
        wanted = BOTH if name in spread else ("tensor",)
        wanted = tuple(axis for axis in wanted if mesh.size(axis) > 1)
        assert rules.rest.axes(name) == rules.use.axes(name) == rules.act.axes(name) == wanted, name
    experts = ("experts", "expert_embed", "expert_mlp")
    assert rules.rest.spec(*experts) == rules.use.spec(*experts)
    assert rules.use.axes("experts") == ("expert",) and "expert" not in rules.use.axes("expert_mlp")
    for names in (("embed", "heads", "head_dim"), ("latent", "heads"), ("embed", "router"), ("vocab", "embed")):
        assert rules.rest.spec(*names) == rules.use.spec(*names)
    assert rules.act.spec("batch", "seq", "embed") == P(None, None, None)


def test_groups_of_few_bits_stay_whole():
    """Of 512 numbers in groups of 64, 16 devices would have half a group each."""
    config, mesh = dataclasses.replace(V3, mlp_dim=512, expert_dim=512), MeshSpec(expert=16)
    assert serving_rules(config.transformer(), mesh).rest.axes("mlp") == ("expert",)
    assert serving_rules(config.transformer(), mesh, "int8").rest.axes("mlp") == ()


@pytest.mark.parametrize(
    ("shape", "mesh", "ways", "axes"),
    [
        (LATENTS, MeshSpec(expert=8), 8, ("expert",)),
        (LATENTS, MeshSpec(expert=4, tensor=2), 8, BOTH),
        (LATENTS, MeshSpec(expert=4, tensor=2), 4, ("expert",)),
        (LATENTS, MeshSpec(expert=4, tensor=2), 2, ("tensor",)),
        (FEW, MeshSpec(expert=8), 8, ("expert",)),
        (LATENTS, MeshSpec(expert=8), 1, ()),
        (of_window(64), MeshSpec(expert=8), 8, ("expert",)),
    ],
)
def test_pages_are_split_over_devices_that_have_copies(shape, mesh, ways, axes):
    rules = split_pages(serving_rules(shape, mesh), shape, ways, 16)
    assert rules.act.axes("slots") == axes


@pytest.mark.parametrize(
    ("shape", "mesh", "ways", "page_size", "why"),
    [
        (LATENTS, MeshSpec(expert=8), 4, 16, "keys and values; choose from 1, 8, or a mesh such as expert=2 tensor=4$"),
        (LATENTS, MeshSpec(expert=8), 3, 16, "copies of keys and values; choose from 1, 8$"),
        (LATENTS, MeshSpec(expert=8), 8, 20, "not divide pages of block_size=20 tokens; choose a block_size of 40"),
        (LATENTS, MeshSpec(), 2, 16, "choose from 1"),
        (ALL_KV, MeshSpec(tensor=4), 4, 16, "kv heads of its own of 8 already"),
        (of_window(56), MeshSpec(expert=8), 8, 16, "see 56 tokens, .* of block_size=16; choose a block_size of 8$"),
        (of_window(20), MeshSpec(expert=8), 8, 16, "see 20 tokens, .* of block_size=16; set it to 1$"),
        (FEW, MeshSpec(expert=8), 2, 16, "from 1, 8. Each of them has all kv heads, so that 8 hold a position once"),
    ],
)
def test_what_cannot_be_split_so_is_refused(shape, mesh, ways, page_size, why):
    with pytest.raises(ShardlmError, match=why):
        split_pages(serving_rules(shape, mesh), shape, ways, page_size)
