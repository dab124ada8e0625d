"""The Llama family (https://arxiv.org/abs/2302.13971, https://arxiv.org/abs/2407.21783)."""

import dataclasses

from shardlm.errors import ShardlmError
from shardlm.layers.attention import AttentionConfig
from shardlm.layers.block import BlockConfig
from shardlm.layers.mlp import MlpConfig
from shardlm.layers.norm import NormConfig
from shardlm.layers.stack import Segment
from shardlm.models import hf_decoder
from shardlm.models.hf_options import Options
from shardlm.models.naming import Names, standard
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.rope import Rope


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama-style decoder; the defaults are Llama 3 8B."""

    vocab_size: int = 128_256
    embed_dim: int = 4096
    num_layers: int = 32
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    mlp_dim: int = 14_336
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False

    def transformer(self) -> TransformerConfig:
        """The decoder these sizes describe."""
        attention = AttentionConfig(self.num_heads, self.num_kv_heads, self.head_dim, Rope(self.rope_theta))
        block = BlockConfig(attention, MlpConfig(self.mlp_dim))
        return TransformerConfig(
            vocab_size=self.vocab_size,
            embed_dim=self.embed_dim,
            segments=(Segment((block,), self.num_layers),),
            norm=NormConfig(eps=self.norm_eps),
            tie_embeddings=self.tie_embeddings,
        )

    def to_hf(self) -> dict:
        """config.json of this model as `transformers` reads it."""
        return hf_decoder.published(self, "LlamaForCausalLM", "llama", self.mlp_dim)


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` llama: Llama 2, 3 and later text models, DeepSeek LLM, and whoever shares their architecture;
    iquestcoder (https://github.com/IQuestLab/IQuest-Coder-V1) and internlm3 (https://github.com/InternLM/InternLM),
    which are one; arcee (AFM 4.5B, https://huggingface.co/arcee-ai/AFM-4.5B), whose feed-forward layers have no gate.
    """
    if options("model_type") == "internlm3":
        return _internlm3(options, length)
    feed_forward = hf_decoder.mlp(options, gated=options("model_type") != "arcee")
    block = BlockConfig(hf_decoder.attention(options, length), feed_forward)
    return hf_decoder.decoder(options, lambda layer: block, hf_decoder.rms(options))


def _internlm3(options: Options, length: int) -> TransformerConfig:
    """Its first checkpoints say of biases `qkv_bias` and `bias`."""
    found = {name: bool(options(name, False)) for name in ("qkv_bias", "bias", "attention_bias", "mlp_bias")}
    biased = found["qkv_bias"] or found["attention_bias"]
    if biased != (found["bias"] or found["mlp_bias"]):
        shown = ", ".join(f"{name}={value}" for name, value in found.items() if name in options.values)
        raise ShardlmError(f"config.json has {shown}; supported: biases of all projections, or of none")
    attention = hf_decoder.attention(options, length, bias=biased, out_bias=biased)
    block = BlockConfig(attention, hf_decoder.mlp(options, bias=biased))
    return hf_decoder.decoder(options, lambda layer: block, hf_decoder.rms(options))


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    return standard()
