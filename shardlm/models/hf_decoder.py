"""What the families' readers of config.json share: the usual options of attention, feed-forward layer and decoder."""

from collections.abc import Callable
from typing import Any

from shardlm.errors import ShardlmError
from shardlm.layers.attention import AttentionConfig
from shardlm.layers.block import BlockConfig
from shardlm.layers.mlp import MlpConfig
from shardlm.layers.norm import NormConfig
from shardlm.layers.stack import segments_of
from shardlm.models.hf_options import Options, rope_of
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.rope import Rope


def attention(options: Options, length: int = 0, partial: float = 1.0, **changes: Any) -> AttentionConfig:
    """Grouped-query attention with rotary embedding, by Llama's option names. `partial` is the part of each head that
    the family usually rotates; `changes` are fields set otherwise."""
    heads = options("num_attention_heads")
    head_dim = options("head_dim", 0) or options("hidden_size") // heads
    bias = bool(options("attention_bias", False))
    fields = {
        "num_heads": heads,
        "num_kv_heads": options("num_key_value_heads", heads),
        "head_dim": head_dim,
        "bias": bias,
        "out_bias": bias,
    }
    if "rope" not in changes:
        fields["rope"] = rope_of(options, head_dim, length=length, partial=partial)
    return AttentionConfig(**fields | changes)


def rope_of_kind(options: Options, windowed: bool, length: int) -> Rope:
    """Of the layers with a window, or of those without, where each kind has its own in `rope_parameters`. By the older
    options layers with a window are not stretched."""
    head_dim = options("head_dim", 0) or options("hidden_size") // options("num_attention_heads")
    if windowed and not options("rope_parameters", None):
        return Rope(float(options("rope_theta", 10_000.0)))
    return rope_of(options, head_dim, "sliding_attention" if windowed else "full_attention", length)


def mlp(options: Options, activation: str = "hidden_act", **changes: Any) -> MlpConfig:
    """The gated feed-forward layer, by Llama's option names."""
    fields = {
        "mlp_dim": options("intermediate_size"),
        "activation": options.activation(activation),
        "bias": bool(options("mlp_bias", False)),
    }
    return MlpConfig(**fields | changes)


def rms(options: Options, offset: float = 0.0) -> NormConfig:
    return NormConfig("rms", options("rms_norm_eps"), offset)


def decoder(
    options: Options, block: Callable[[int], BlockConfig], norm: NormConfig, tied: bool = False, **changes: Any
):
    """The decoder whose layer i is block(i); `tied` is the family's default."""
    layers = options("num_hidden_layers")
    return TransformerConfig(
        vocab_size=options("vocab_size"),
        embed_dim=options("hidden_size"),
        segments=segments_of([block(i) for i in range(layers)]),
        norm=norm,
        tie_embeddings=bool(options("tie_word_embeddings", tied)),
        **changes,
    )


def sliding(options: Options, usual: Callable[[int], bool]) -> list[int]:
    """The window of each layer, 0 for those that see everything: by `layer_types`, or as the family's layers usually
    are where that is absent. A window includes the token itself, as that of `transformers` does."""
    layers, window = options("num_hidden_layers"), options("sliding_window", 0)
    kinds = options("layer_types", None)
    if kinds is None:
        return [window if window and usual(i) else 0 for i in range(layers)]
    known = {"full_attention", "sliding_attention"}
    if len(kinds) != layers or not known.issuperset(kinds):
        raise ShardlmError(
            f"config.json has layer_types={kinds!r}; it needs num_hidden_layers={layers} of {', '.join(sorted(known))}"
        )
    return [window if kind == "sliding_attention" else 0 for kind in kinds]


def published(sizes: Any, architecture: str, model_type: str, intermediate_size: int) -> dict[str, Any]:
    """config.json of a Llama-like decoder from our own fields: `sizes` has those of models/llama.py but for the width
    of its feed-forward layers."""
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.embed_dim,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "intermediate_size": intermediate_size,
        "hidden_act": "silu",
        "rope_theta": sizes.rope_theta,
        "rms_norm_eps": sizes.norm_eps,
        "tie_word_embeddings": sizes.tie_embeddings,
    }
