"""Qwen 2, 2.5 and 3 (https://arxiv.org/abs/2407.10671, https://arxiv.org/abs/2505.09388): biases on queries, keys and
values, or norms on queries and keys; dense, or experts chosen by a softmax, in 2 beside a shared one with a gate."""

from shardlm.layers.block import BlockConfig
from shardlm.layers.moe import MoeConfig
from shardlm.models import hf_decoder
from shardlm.models.hf_options import Options
from shardlm.models.naming import Names, experts, standard
from shardlm.models.qwen_hybrid import expert_names
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.routing import Router


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` qwen2, qwen2_moe, qwen3 and qwen3_moe."""
    kind = options("model_type")
    norm = hf_decoder.rms(options)
    second = {"bias": bool(options("qkv_bias", True)) if kind == "qwen2_moe" else True, "out_bias": False}
    own = second if kind.startswith("qwen2") else {"qk_norm": "head", "norm": norm}
    windows = _windows(options, kind)
    dense = hf_decoder.mlp(options)
    sparse = experts_of(options, kind) if kind.endswith("_moe") else None
    step, plain = options("decoder_sparse_step", 1), options("mlp_only_layers", [])

    def block(layer: int) -> BlockConfig:
        routed = sparse and layer not in plain and (layer + 1) % step == 0
        attention = hf_decoder.attention(options, length, window=windows[layer], **own)
        return BlockConfig(attention, sparse if routed else dense)

    return hf_decoder.decoder(options, block, norm)


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    if not isinstance(block.mlp, MoeConfig):
        return standard()
    return standard() | (expert_names() if block.mlp.shared_gate else experts("mlp"))


def _windows(options: Options, kind: str) -> list[int]:
    """The first `max_window_layers` layers see everything, but in Qwen 2's mixtures, where every other one of them
    does; all do without `use_sliding_window`."""
    first = options("max_window_layers", 0)
    if options("use_sliding_window", False):
        usual = {"qwen2_moe": lambda layer: layer < first and layer % 2 == 0}
        return hf_decoder.sliding(options, usual.get(kind, lambda layer: layer >= first))
    options("sliding_window", None), options("layer_types", None)
    return [0] * options("num_hidden_layers")


def experts_of(options: Options, kind: str) -> MoeConfig:
    shared = options("shared_expert_intermediate_size") if kind == "qwen2_moe" else 0
    return MoeConfig(
        num_experts=options("num_experts", 0) or options("num_local_experts"),
        top_k=options("num_experts_per_tok"),
        expert_dim=options("moe_intermediate_size"),
        shared_dim=shared,
        shared_gate=bool(shared),
        router=Router(normalize=bool(options("norm_topk_prob", False))),
        balance_loss=float(options("router_aux_loss_coef", 0.001)),
        activation=options.activation(),
    )
