"""Qwen3-Next (https://qwenlm.github.io/blog/qwen3_next) and Qwen 3.5 (https://qwen.ai/blog?id=qwen3.5), the part that
reads text: three of four layers are Gated DeltaNet, the others attention whose output is gated and a quarter of whose
heads is rotated; dense, or experts and a gated shared one."""

import dataclasses

from shardlm.errors import ShardlmError
from shardlm.layers.attention import AttentionConfig
from shardlm.layers.block import BlockConfig
from shardlm.layers.delta_net import DeltaNetConfig
from shardlm.layers.mlp import MlpConfig
from shardlm.layers.moe import MoeConfig
from shardlm.layers.mtp import MtpConfig
from shardlm.layers.norm import NormConfig
from shardlm.layers.stack import segments_of
from shardlm.models import hf_decoder
from shardlm.models.hf_options import Options, rope_of
from shardlm.models.naming import LAYER, OF_MODULES, Modules, Names, Tensor, experts, gated, standard
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.rope import Rope
from shardlm.ops.routing import Router

ROTATED = 0.25  # of each head, where config.json does not say
ASIDE = ("mamba_ssm_dtype", "head_dim")  # how states are held, which are float32 here; and what is read below
MODULES = Modules("mtp.", "mtp_num_hidden_layers")


@dataclasses.dataclass(frozen=True)
class QwenHybridConfig:
    """Sizes of a dense decoder as Qwen 3.5's; the defaults are those of 9B. Every `attend_every`-th layer attends to
    tokens, the others are Gated DeltaNet, whose sizes begin with linear_. `mtp`: modules that predict further tokens
    (layers/mtp.py), of which there may be one."""

    vocab_size: int = 248_320
    embed_dim: int = 4096
    num_layers: int = 32
    attend_every: int = 4
    num_heads: int = 16
    num_kv_heads: int = 4
    head_dim: int = 256
    mlp_dim: int = 12_288
    linear_num_heads: int = 32
    linear_num_kv_heads: int = 16
    linear_head_dim: int = 128
    linear_value_dim: int = 128
    conv_width: int = 4
    rope_theta: float = 10_000_000.0
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    mtp: int = 0

    def transformer(self) -> TransformerConfig:
        """The decoder these sizes describe."""
        norm, rope = NormConfig("rms", self.norm_eps, 1.0), Rope(self.rope_theta, dim=int(self.head_dim * ROTATED))
        heads = self.num_heads, self.num_kv_heads, self.head_dim
        attention = AttentionConfig(*heads, rope, qk_norm="head", norm=norm, gate=True)
        linear_heads = self.linear_num_heads, self.linear_num_kv_heads, self.linear_head_dim, self.linear_value_dim
        memory = DeltaNetConfig(*linear_heads, self.conv_width, NormConfig("rms", self.norm_eps))
        attends = [(layer + 1) % self.attend_every == 0 for layer in range(self.num_layers)]
        blocks = [BlockConfig(attention if each else memory, MlpConfig(self.mlp_dim)) for each in attends]
        return TransformerConfig(
            vocab_size=self.vocab_size,
            embed_dim=self.embed_dim,
            segments=segments_of(blocks),
            norm=norm,
            tie_embeddings=self.tie_embeddings,
            mtp=_modules(self.mtp, BlockConfig(attention, MlpConfig(self.mlp_dim))),
        )

    def to_hf(self) -> dict:
        """config.json of this model as `transformers` reads it."""
        published = hf_decoder.published(self, "Qwen3_5ForCausalLM", "qwen3_5_text", self.mlp_dim)
        rope = {"rope_type": "default", "rope_theta": published.pop("rope_theta"), "partial_rotary_factor": ROTATED}
        attends = [(layer + 1) % self.attend_every == 0 for layer in range(self.num_layers)]
        return published | {
            "rope_parameters": rope,
            "layer_types": ["full_attention" if each else "linear_attention" for each in attends],
            "linear_num_value_heads": self.linear_num_heads,
            "linear_num_key_heads": self.linear_num_kv_heads,
            "linear_key_head_dim": self.linear_head_dim,
            "linear_value_head_dim": self.linear_value_dim,
            "linear_conv_kernel_dim": self.conv_width,
            **({MODULES.option: self.mtp} if self.mtp else {}),
        }


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` qwen3_next, qwen3_5_text and qwen3_5_moe_text."""
    kind = options("model_type")
    options.only("attn_output_gate", True)
    options.only("norm_topk_prob", True)
    options.aside(*ASIDE)
    norm = hf_decoder.rms(options, offset=1.0)
    linear = linear_layers(options)
    attention, memory = _attention(options, norm, length), memory_of(options, norm)
    sparse = None if kind == "qwen3_5_text" else mixture(options)
    step, plain = options("decoder_sparse_step", 1), options("mlp_only_layers", [])
    routed = [bool(sparse) and i not in plain and (i + 1) % step == 0 for i in range(len(linear))]
    dense = None if all(routed) else hf_decoder.mlp(options)
    options("intermediate_size", None)  # of which a model of experts alone makes no use

    def block(layer: int) -> BlockConfig:
        return BlockConfig(memory if linear[layer] else attention, sparse if routed[layer] else dense)

    count = options(MODULES.option, 0) or 0
    if count:
        options.only("mtp_use_dedicated_embeddings", False)
    options("mtp_use_dedicated_embeddings", False)
    further = BlockConfig(attention, sparse if routed[0] else dense)  # as vLLM has it: by the rule for the first layer
    return hf_decoder.decoder(options, block, norm, mtp=_modules(count, further))


def _modules(count: int, block: BlockConfig) -> MtpConfig | None:
    """Modules whose one layer attends to tokens."""
    if count > 1:
        raise ShardlmError(
            f"{count} modules that predict further tokens: published checkpoints of the family have one at most, which "
            "drafts all tokens; choose 0 or 1"
        )
    return MtpConfig(block, count, normed=True) if count else None


def linear_layers(options: Options) -> list[bool]:
    """Which layers are linear attention: by `layer_types`, or all but every `full_attention_interval`-th."""
    layers, every = options("num_hidden_layers"), options("full_attention_interval", 4)
    kinds = options("layer_types", None)
    if kinds is None:
        return [(layer + 1) % every > 0 for layer in range(layers)]
    known = {"linear_attention", "full_attention"}
    if len(kinds) != layers or not known.issuperset(kinds):
        raise ShardlmError(
            f"config.json has layer_types={kinds!r}; it needs num_hidden_layers={layers} of {', '.join(sorted(known))}"
        )
    return [kind == "linear_attention" for kind in kinds]


def _attention(options: Options, norm: NormConfig, length: int) -> AttentionConfig:
    head_dim = options("head_dim", 256)
    rope = rope_of(options, head_dim, length=length)
    said = (options("rope_parameters", None) or {}).get("partial_rotary_factor", options("partial_rotary_factor", None))
    if said is None:
        rope = dataclasses.replace(rope, dim=int(head_dim * ROTATED))
    own = {"head_dim": head_dim, "qk_norm": "head", "norm": norm, "gate": True}
    return hf_decoder.attention(options, length, rope=rope, **own)


def memory_of(options: Options, norm: NormConfig) -> DeltaNetConfig:
    options.only("hidden_act", "silu")
    return DeltaNetConfig(
        num_heads=options("linear_num_value_heads"),
        num_kv_heads=options("linear_num_key_heads"),
        head_dim=options("linear_key_head_dim"),
        value_dim=options("linear_value_head_dim"),
        conv_width=options("linear_conv_kernel_dim", 4),
        norm=NormConfig("rms", norm.eps),
    )


def mixture(options: Options, normalize: bool = True) -> MoeConfig:
    """Routed ones and one that is shared, through a gate; `normalize`: weights of the chosen ones sum to 1."""
    return MoeConfig(
        num_experts=options("num_experts"),
        top_k=options("num_experts_per_tok"),
        expert_dim=options("moe_intermediate_size"),
        shared_dim=options("shared_expert_intermediate_size"),
        shared_gate=True,
        router=Router(normalize=normalize),
        balance_loss=float(options("router_aux_loss_coef", 0.001)),
    )


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    found = layer_names(block)
    found |= expert_names() if isinstance(block.mlp, MoeConfig) else {}
    return found | (_further_names(config.embed_dim) if config.mtp else {})


def layer_names(block: BlockConfig) -> Names:
    """With those of either kind of attention."""
    found = standard()
    if isinstance(block.attention, DeltaNetConfig):
        return found | _memory_names(block.attention)
    H = block.attention.head_dim
    query = f"{LAYER}self_attn.q_proj"
    for path, first in (("attention.wq", 0), ("attention.wg", H)):
        found[path] = Tensor(f"{query}.weight", "(N H) D -> D N H", inner=("H", first, 2 * H))
    return found


def _further_names(D: int) -> Names:
    """Of the module beside the decoder, whose matrix takes the embedding first."""
    own = {"embed_norm": "pre_fc_norm_embedding", "hidden_norm": "pre_fc_norm_hidden", "norm": "norm"}
    halves = {"from_embedding": 0, "from_hidden": D}
    return {
        OF_MODULES: Tensor(f"{MODULES.prefix}layers.{{layer}}."),
        **{f"mtp.{ours}.scale": Tensor(f"{MODULES.prefix}{theirs}.weight") for ours, theirs in own.items()},
        **{
            f"mtp.{ours}": Tensor(f"{MODULES.prefix}fc.weight", "O I -> I O", part=(1, first, first + D, 1))
            for ours, first in halves.items()
        },
    }


def _memory_names(memory: DeltaNetConfig) -> Names:
    inside = f"{LAYER}linear_attn."
    found, first = {}, 0
    of_keys, of_values = memory.num_kv_heads * memory.head_dim, memory.num_heads * memory.value_dim
    for letter, size in (("q", of_keys), ("k", of_keys), ("v", of_values)):
        part = (0, first, first + size, 1)
        found[f"attention.w{letter}"] = Tensor(f"{inside}in_proj_qkv.weight", "(N H) D -> D N H", part)
        found[f"attention.taps_{letter}"] = Tensor(f"{inside}conv1d.weight", "(N H) 1 W -> N H W", part)
        first += size
    return found | {
        "attention.wg": Tensor(f"{inside}in_proj_z.weight", "(N H) D -> D N H"),
        "attention.wo": Tensor(f"{inside}out_proj.weight", "D (N H) -> N H D"),
        "attention.decay": Tensor(f"{inside}in_proj_a.weight", "N D -> D N"),
        "attention.beta": Tensor(f"{inside}in_proj_b.weight", "N D -> D N"),
        "attention.decay_bias": Tensor(f"{inside}dt_bias"),
        "attention.log_rate": Tensor(f"{inside}A_log"),
        "attention.out_norm.scale": Tensor(f"{inside}norm.weight"),
    }


def expert_names() -> Names:
    """Experts beside a shared one with a gate."""
    found = experts("mlp")
    found["mlp.shared_gate"] = Tensor(f"{LAYER}mlp.shared_expert_gate.weight", "1 D -> D")
    return found | gated("mlp.shared.", f"{LAYER}mlp.shared_expert.")
