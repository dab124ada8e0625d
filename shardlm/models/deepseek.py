"""DeepSeek V2 and V3 (https://arxiv.org/abs/2405.04434, https://arxiv.org/abs/2412.19437): latent attention, a few
dense layers, then many small experts with shared ones beside them."""

import dataclasses
from collections.abc import Callable

from shardlm.errors import ShardlmError
from shardlm.layers.attention import AttentionConfig
from shardlm.layers.block import BlockConfig
from shardlm.layers.mla import MlaConfig
from shardlm.layers.mlp import MlpConfig
from shardlm.layers.moe import MoeConfig
from shardlm.layers.mtp import MtpConfig
from shardlm.layers.norm import NormConfig
from shardlm.layers.stack import Segment
from shardlm.models import hf_decoder
from shardlm.models.hf_options import Options, growth_of, mscale, rope_of
from shardlm.models.naming import LAYER, Names, Tensor, experts, gated, standard
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.rope import Rope
from shardlm.ops.routing import Router, Scoring


@dataclasses.dataclass(frozen=True)
class DeepseekConfig:
    """Sizes of a DeepSeek-style decoder; the defaults are V3's 671B (section 4.2 there).

    dense_layers  first layers with a dense MLP of mlp_dim instead of experts
    num_shared    experts that every token goes through
    groups, top_groups, scoring, routed_scale  see ops/routing.py
    load_bias     even the load by a bias instead of a loss
    mtp           modules that predict further tokens (layers/mtp.py); the published V3 has one
    """

    vocab_size: int = 129_280
    embed_dim: int = 7168
    num_layers: int = 61
    dense_layers: int = 3
    num_heads: int = 128
    q_latent_dim: int = 1536
    kv_latent_dim: int = 512
    nope_dim: int = 128
    rope_dim: int = 64
    value_dim: int = 128
    mlp_dim: int = 18_432
    num_experts: int = 256
    top_k: int = 8
    expert_dim: int = 2048
    num_shared: int = 1
    scoring: Scoring = "sigmoid"
    groups: int = 8
    top_groups: int = 4
    routed_scale: float = 2.5
    balance_loss: float = 1e-4
    load_bias: bool = True
    capacity_factor: float = 0.0
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    mtp: int = 0

    def transformer(self) -> TransformerConfig:
        """The decoder these sizes describe."""
        attention = MlaConfig(
            num_heads=self.num_heads,
            q_latent_dim=self.q_latent_dim,
            kv_latent_dim=self.kv_latent_dim,
            nope_dim=self.nope_dim,
            rope_dim=self.rope_dim,
            value_dim=self.value_dim,
            rope=Rope(self.rope_theta),
            norm=NormConfig(eps=self.norm_eps),
        )
        normalize = self.scoring == "sigmoid"  # V2 takes the softmax over all experts as it is
        experts = MoeConfig(
            num_experts=self.num_experts,
            top_k=self.top_k,
            expert_dim=self.expert_dim,
            shared_dim=self.num_shared * self.expert_dim,
            router=Router(self.scoring, normalize, self.groups, self.top_groups, self.routed_scale),
            balance_loss=self.balance_loss,
            load_bias=self.load_bias,
            capacity_factor=self.capacity_factor,
        )
        dense = Segment((BlockConfig(attention, MlpConfig(self.mlp_dim)),), self.dense_layers)
        sparse = Segment((BlockConfig(attention, experts),), self.num_layers - self.dense_layers)
        return TransformerConfig(
            vocab_size=self.vocab_size,
            embed_dim=self.embed_dim,
            segments=(dense, sparse) if self.dense_layers else (sparse,),
            norm=NormConfig(eps=self.norm_eps),
            tie_embeddings=self.tie_embeddings,
            mtp=MtpConfig(sparse.pattern[0], self.mtp) if self.mtp else None,
        )

    def to_hf(self) -> dict:
        """config.json of this model as `transformers` reads it: V3 with sigmoid scores, V2 with softmax ones."""
        third = self.scoring == "sigmoid"
        if third != self.load_bias:
            raise ShardlmError(
                f"scoring={self.scoring!r} with load_bias={self.load_bias} is neither DeepSeek V2 (softmax, False) nor "
                "V3 (sigmoid, True), and cannot be written as either"
            )
        method = "noaux_tc" if third else "group_limited_greedy"
        return {
            "architectures": ["DeepseekV3ForCausalLM" if third else "DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v3" if third else "deepseek_v2",
            "vocab_size": self.vocab_size,
            "hidden_size": self.embed_dim,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_heads,
            "first_k_dense_replace": self.dense_layers,
            "q_lora_rank": self.q_latent_dim or None,
            "kv_lora_rank": self.kv_latent_dim,
            "qk_nope_head_dim": self.nope_dim,
            "qk_rope_head_dim": self.rope_dim,
            "v_head_dim": self.value_dim,
            "intermediate_size": self.mlp_dim,
            "n_routed_experts": self.num_experts,
            "num_experts_per_tok": self.top_k,
            "moe_intermediate_size": self.expert_dim,
            "n_shared_experts": self.num_shared,
            "scoring_func": self.scoring,
            "topk_method": method if self.groups > 1 or third else "greedy",
            "n_group": self.groups,
            "topk_group": self.top_groups,
            "norm_topk_prob": third,
            "routed_scaling_factor": self.routed_scale,
            "aux_loss_alpha": self.balance_loss,
            "hidden_act": "silu",
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.norm_eps,
            "tie_word_embeddings": self.tie_embeddings,
            "num_nextn_predict_layers": self.mtp,
        }


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` deepseek (MoE 16B), deepseek_v2 and deepseek_v3; as the last kimi_k2, glm4_moe_lite, youtu, which
    has no experts, and mistral4, whose scores are softmax and whose queries grow with their position."""
    kind = options("model_type")
    options.only("moe_layer_freq", 1)
    options.only("attention_bias", False)
    options.only("rope_interleave", True)
    attention = hf_decoder.attention(options, length) if kind == "deepseek" else latent(options, length)
    options("mlp_bias", False), options("qk_head_dim", 0), options("head_dim", 0)  # repeated from other options
    options("num_key_value_heads", 0)
    if kind == "youtu":
        options("embedding_initializer_range", None)
        return decoder(options, lambda layer: attention, None, tied=True)
    third = kind in ("deepseek_v3", "kimi_k2", "glm4_moe_lite")
    later = kind in ("glm4_moe_lite", "mistral4")
    experts = experts_of(options, third, normalize=later)
    return decoder(options, lambda layer: attention, experts, first=int(kind == "glm4_moe_lite"))


def decoder(
    options: Options,
    attention: Callable[[int], AttentionConfig | MlaConfig],
    sparse: MoeConfig | None,
    first: int = 0,
    tied: bool = False,
):
    """A few dense layers, then such experts, and the modules that predict further tokens, whose layers are as the last;
    `attention` is each layer's, `first` how many dense ones the family usually has."""
    mixed = mixed_layers(options, first) if sparse else [False] * options("num_hidden_layers")
    width = options("intermediate_size", 0) if all(mixed) else options("intermediate_size")
    dense = MlpConfig(width, options.activation()) if width else None
    layers = [sparse if own else dense for own in mixed]

    def block(layer: int) -> BlockConfig:
        return BlockConfig(attention(layer), layers[min(layer, len(layers) - 1)])

    further = options("num_nextn_predict_layers", 0)
    mtp = MtpConfig(block(options("num_hidden_layers")), further) if further else None
    return hf_decoder.decoder(options, block, hf_decoder.rms(options), tied, mtp=mtp)


def mixed_layers(options: Options, first: int) -> list[bool]:
    """Which layers have experts."""
    layers, kinds = options("num_hidden_layers"), options("mlp_layer_types", None)
    first = options("first_k_dense_replace", first)
    if kinds is None:
        return [layer >= first for layer in range(layers)]
    if len(kinds) != layers or not {"dense", "sparse"}.issuperset(kinds):
        raise ShardlmError(
            f"config.json has mlp_layer_types={kinds!r}; it needs num_hidden_layers={layers} of dense, sparse"
        )
    return [kind == "sparse" for kind in kinds]


def latent(options: Options, length: int) -> MlaConfig:
    nope, rope = options("qk_nope_head_dim"), options("qk_rope_head_dim")
    scaling = options.values.get("rope_parameters") or options.values.get("rope_scaling") or {}
    scale = 0.0
    if scaling.get("mscale_all_dim") and scaling.get("rope_type", scaling.get("type")) != "default":
        scale = (nope + rope) ** -0.5 * mscale(scaling["factor"], scaling["mscale_all_dim"]) ** 2
    growing = options("model_type") == "mistral4"  # whose rotation is told as part of the whole head
    head_dim, partial = (nope + rope, rope / (nope + rope)) if growing else (rope, 1.0)
    return MlaConfig(
        num_heads=options("num_attention_heads"),
        q_latent_dim=options("q_lora_rank", 0),
        kv_latent_dim=options("kv_lora_rank"),
        nope_dim=nope,
        rope_dim=rope,
        value_dim=options("v_head_dim"),
        rope=rope_of(options, head_dim, length=length, partial=partial),
        scale=scale,
        query_growth=growth_of(options, scaling) if growing else None,
    )


def experts_of(options: Options, third: bool, normalize: bool = False) -> MoeConfig:
    """Experts by DeepSeek's option names, chosen as V3 does (`third`) or as those before; `normalize` is the family's
    default."""
    options.only("scoring_func", "sigmoid" if third else "softmax")
    method = options("topk_method", "noaux_tc" if third else "greedy")
    if method not in ("noaux_tc", "greedy", "group_limited_greedy") or third != (method == "noaux_tc"):
        options.only("topk_method", "noaux_tc" if third else "greedy")
    grouped = method != "greedy"
    count = next(filter(None, (options(name, 0) for name in ("n_routed_experts", "num_experts"))), 0)
    width = options("moe_intermediate_size")
    router = Router(
        "sigmoid" if third else "softmax",
        bool(options("norm_topk_prob", normalize)),
        options("n_group", 1) if grouped else 1,
        options("topk_group", 1) if grouped else 1,
        float(options("routed_scaling_factor", 0.0) or options("router_scaling_factor", 1.0)),
    )
    options("n_group", 1), options("topk_group", 1)
    return MoeConfig(
        num_experts=count or options("num_local_experts"),
        top_k=options("num_experts_per_tok"),
        expert_dim=width,
        shared_dim=width * (options("n_shared_experts", 0) or options("num_shared_experts", 0)),
        router=router,
        balance_loss=float(options("aux_loss_alpha", 0.0)),
        activation=options.activation(),
        load_bias=third,
    )


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    found = standard() | (_further_names(config) if config.mtp else {})
    if isinstance(block.attention, MlaConfig):
        found |= latent_names(block.attention)
    if isinstance(block.mlp, MoeConfig):
        found |= experts("mlp") | gated("mlp.shared.", f"{LAYER}mlp.shared_experts.")
        found["mlp.router_bias"] = Tensor(f"{LAYER}mlp.gate.e_score_correction_bias")
    return found


def _further_names(config: TransformerConfig) -> Names:
    """Of the layers after the last. The last two are copies of what all share (weight_copies.py)."""
    D = config.embed_dim
    norms = {"embed_norm": "enorm", "hidden_norm": "hnorm", "norm": "shared_head.norm"}
    halves = {"from_embedding": 0, "from_hidden": D}
    return {
        **{f"mtp.{ours}.scale": Tensor(f"{LAYER}{theirs}.weight") for ours, theirs in norms.items()},
        **{
            f"mtp.{ours}": Tensor(f"{LAYER}eh_proj.weight", "O I -> I O", part=(1, first, first + D, 1))
            for ours, first in halves.items()
        },
        "mtp.copy.embedding": Tensor(f"{LAYER}embed_tokens.weight"),
        "mtp.copy.head": Tensor(f"{LAYER}shared_head.head.weight", "V D -> D V"),
    }


def latent_names(config: MlaConfig) -> Names:
    """Rotated dimensions are in adjacent pairs; keys and values of a head are made by one matrix."""
    theirs, R = f"{LAYER}self_attn.", config.kv_latent_dim
    both = config.nope_dim + config.value_dim
    rotated = ("H", config.nope_dim, config.rope_dim) if config.rope else None
    return {
        "attention.wq": Tensor(f"{theirs}q_proj.weight", "(N H) D -> D N H", pairs=rotated),
        "attention.wq_down": Tensor(f"{theirs}q_a_proj.weight", "Q D -> D Q"),
        "attention.q_norm.scale": Tensor(f"{theirs}q_a_layernorm.weight"),
        "attention.wq_up": Tensor(f"{theirs}q_b_proj.weight", "(N H) Q -> Q N H", pairs=rotated),
        "attention.wkv_down": Tensor(
            f"{theirs}kv_a_proj_with_mqa.weight",
            "X D -> D X",
            pairs=("X", R, config.rope_dim) if config.rope else None,
        ),
        "attention.kv_norm.scale": Tensor(f"{theirs}kv_a_layernorm.weight"),
        "attention.wk_up": Tensor(f"{theirs}kv_b_proj.weight", "(N H) R -> R N H", inner=("H", 0, both)),
        "attention.wv_up": Tensor(f"{theirs}kv_b_proj.weight", "(N H) R -> R N H", inner=("H", config.nope_dim, both)),
        "attention.wo": Tensor(f"{theirs}o_proj.weight", "D (N H) -> N H D"),
    }
