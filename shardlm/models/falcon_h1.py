"""Falcon H1 (https://arxiv.org/abs/2507.22448): in each layer attention and Mamba 2 read the same norm and are added,
and numbers are multiplied by constants wherever a projection makes some (section 3.2 there). Those of attention are a
scale of its scores and one of its values."""

import dataclasses

from shardlm.errors import ShardlmError
from shardlm.layers.block import BlockConfig
from shardlm.layers.mamba import Factors, MambaConfig
from shardlm.models import hf_decoder
from shardlm.models.hf_options import Options
from shardlm.models.mamba import mamba_names, memory_of
from shardlm.models.naming import LAYER, Names, Tensor, linear, standard
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.cross_entropy import LogitsConfig

FIXED = {"attention_bias": False, "projectors_bias": False, "mlp_bias": False}
# What transformers leaves aside, or makes of other options: layers are all alike.
ASIDE = ("num_logits_to_keep", "layer_types", "layers_block_type", "mamba_use_mlp", "mlp_expansion_factor")


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` falcon_h1."""
    options.only_all(FIXED)
    options.aside(*ASIDE)
    factor = lambda name: float(options(f"{name}_multiplier", 1.0))  # noqa: E731
    attention, into = hf_decoder.attention(options, length), factor("attention_in")
    scale = attention.head_dim**-0.5 * into * into * factor("key")
    attention = dataclasses.replace(attention, scale=scale, value_scale=into * factor("attention_out"))
    gate, out = _numbers(options, "mlp_multipliers", "gate, output")
    feed_forward = hf_decoder.mlp(options, gate_scale=gate, out_scale=out)
    block = BlockConfig(attention, feed_forward, memory=_memory(options, factor("ssm_in"), factor("ssm_out")))
    return hf_decoder.decoder(
        options,
        lambda layer: block,
        hf_decoder.rms(options),
        embed_scale=factor("embedding"),
        logits=LogitsConfig(scale=factor("lm_head")),
    )


def _memory(options: Options, into: float, out: float) -> MambaConfig:
    """Whose heads are together as wide as `mamba_d_ssm` says, where it does."""
    first = bool(options("mamba_norm_before_gate", True))
    norms = ("before_gate" if first else "after_gate") if options("mamba_rms_norm", False) else "none"
    gate, values, keys, queries, steps = (
        into * n for n in _numbers(options, "ssm_multipliers", "gate, values, keys, queries, steps")
    )
    return dataclasses.replace(
        memory_of(options, hf_decoder.rms(options), options("mamba_d_ssm", 0)),
        norms=norms,
        factors=Factors(queries, keys, values, gate, steps, out),
    )


def _numbers(options: Options, name: str, of: str) -> list[float]:
    """As many as things are named in `of`."""
    count = len(of.split(", "))
    found = options(name, None) or [1.0] * count
    if len(found) != count or not all(isinstance(n, int | float) for n in found):
        raise ShardlmError(f"config.json has {name}={found!r}; it needs {count} numbers, of {of}")
    return [float(n) for n in found]


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    found = standard(mlp_norm="pre_ff_layernorm") | {"final_norm.scale": Tensor("model.final_layernorm.weight")}
    for part, kind in (("gate", "into"), ("up", "into"), ("down", "out")):
        found |= linear(f"mlp.{part}", f"{LAYER}feed_forward.{part}_proj", kind)
    memory = mamba_names(block.memory, f"{LAYER}mamba.")
    return found | {path.replace("attention.", "memory."): tensor for path, tensor in memory.items()}
