"""Nemotron-H (https://arxiv.org/abs/2504.03624) and Nemotron 3 (https://arxiv.org/abs/2512.20856): layers of Mamba 2, a
few that attend to tokens without a rotation, and feed-forward layers or mixtures of experts without gates, each with a
norm of its own, in any order. A block here is a layer that mixes tokens and the feed-forward layer behind it, if there
is one, so that two of their layers are one of ours."""

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from shardlm.errors import ShardlmError
from shardlm.layers.block import BlockConfig
from shardlm.layers.mamba import MambaConfig
from shardlm.layers.mlp import MlpConfig, NoMlpConfig
from shardlm.layers.moe import MoeConfig
from shardlm.layers.norm import NormConfig
from shardlm.layers.stack import segments_of
from shardlm.models import hf_decoder
from shardlm.models.hf_options import Options
from shardlm.models.mamba import mamba_names, steps_of
from shardlm.models.naming import Names, Tensor, standard
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.routing import Router

MEMORY, ATTENTION, MLP, MOE = "linear_attention", "full_attention", "mlp", "moe"
LETTERS = {"M": MEMORY, "*": ATTENTION, "-": MLP, "E": MOE}  # of hybrid_override_pattern
OLDER = {"mamba": MEMORY, "attention": ATTENTION}
LAYER = "backbone.layers.{layer}."
FIXED = {
    "attention_bias": False,
    "mamba_hidden_act": "silu",
    "mamba_proj_bias": False,
    "mlp_bias": False,
    "n_shared_experts": 1,
    "residual_in_fp32": False,
    "sliding_window": None,
    "use_bias": False,
}
# How weights begin, how it is computed, rotations that no layer has, and modules that predict further tokens.
ASIDE = ("chunk_size", "expand", "hidden_dropout", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap", "norm_eps")
ASIDE += ("num_logits_to_keep", "partial_rotary_factor", "rescale_prenorm_residual", "rms_norm_eps", "rope_theta")
ASIDE += ("time_step_floor", "time_step_limit", "time_step_max", "use_mamba_kernels", "num_hidden_layers")
ASIDE += ("num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern")


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` nemotron_h."""
    del length
    options.only_all(FIXED)
    options.aside(*ASIDE)
    norm = NormConfig("rms", options("layer_norm_epsilon", 1e-5))
    head_dim = options("head_dim", 0) or options("attention_head_dim", 128)
    options("attention_head_dim", None)
    attention = hf_decoder.attention(options, rope=None, head_dim=head_dim, bias=False, out_bias=False)
    kinds, memory = _kinds(options.values), _memory(options, norm)
    options.asked |= {"layers_block_type", "layer_types", "hybrid_override_pattern", "intermediate_size"}
    made = {MLP: _mlp(options), MOE: _experts(options) if MOE in kinds else None, None: NoMlpConfig()}
    mixers = {MEMORY: memory, ATTENTION: attention}
    return TransformerConfig(
        vocab_size=options("vocab_size"),
        embed_dim=options("hidden_size"),
        segments=segments_of([BlockConfig(mixers[mixer], made[rest]) for mixer, rest in _blocks(kinds)]),
        norm=norm,
        tie_embeddings=bool(options("tie_word_embeddings", False)),
    )


def _kinds(values: Mapping[str, Any]) -> list[str]:
    """Of each of their layers."""
    said = values.get("layers_block_type") or values.get("layer_types")
    if said is None:
        said = values.get("hybrid_override_pattern")
    if not said:
        raise ShardlmError(
            "config.json has no layers_block_type and no hybrid_override_pattern, of which a 'nemotron_h' model needs "
            "one: what each layer is"
        )
    of = LETTERS if isinstance(said, str) else {kind: kind for kind in LETTERS.values()} | OLDER
    if unknown := next((kind for kind in said if kind not in of), None):
        raise ShardlmError(f"config.json has a layer {unknown!r} in {said!r}; layers are of {', '.join(of)}")
    return [of[kind] for kind in said]


def _blocks(kinds: Sequence[str]) -> list[tuple[str, str | None]]:
    """(what mixes tokens, the feed-forward layer behind it or None) of each of our blocks."""
    found: list[tuple[str, str | None]] = []
    for number, kind in enumerate(kinds):
        if kind in (MEMORY, ATTENTION):
            found.append((kind, None))
        elif found and found[-1][1] is None:
            found[-1] = found[-1][0], kind
        else:
            where = f"layer {number}, {kind!r}, behind {kinds[number - 1]!r}" if number else f"{kind!r} as first layer"
            raise ShardlmError(
                f"config.json has {where}: each {MLP} and {MOE} has to stand behind a {MEMORY} or {ATTENTION}, "
                "as in published models"
            )
    return found


def _memory(options: Options, norm: NormConfig) -> MambaConfig:
    """As transformers has it dt is at least `time_step_min`, and has no upper limit."""
    steps_of(options, "time_step_limit")
    return MambaConfig(
        num_heads=options("mamba_num_heads", 128),
        num_kv_heads=options("n_groups", 8),
        head_dim=options("ssm_state_size", 128),
        value_dim=options("mamba_head_dim", 64),
        conv_width=options("conv_kernel", 4),
        norm=norm,
        conv_bias=bool(options("use_conv_bias", True)),
        steps=(float(options("time_step_min", 0.001)), float("inf")),
    )


def _mlp(options: Options) -> MlpConfig:
    return hf_decoder.mlp(options, "mlp_hidden_act", gated=False)


def _experts(options: Options) -> MoeConfig:
    groups = options("n_group", 1), options("topk_group", 1)
    scale = float(options("routed_scaling_factor", 1.0))
    return MoeConfig(
        num_experts=options("n_routed_experts"),
        top_k=options("num_experts_per_tok"),
        expert_dim=options("moe_intermediate_size"),
        shared_dim=options("moe_shared_expert_intermediate_size"),
        router=Router("sigmoid", bool(options("norm_topk_prob", True)), *groups, scale),
        activation=options.activation("mlp_hidden_act"),
        gated=False,
        latent_dim=options("moe_latent_size", 0),
        load_bias=True,
    )


def unused(text: Mapping[str, Any]) -> re.Pattern | None:
    """Modules that predict further tokens, as transformers leaves them aside."""
    del text
    return re.compile(r"mtp\.")


def published_name(name: str) -> str:
    """The published name of a tensor of transformers' module."""
    return re.sub(r"^model\.(?=layers\.|embeddings\.|norm_f\.)", "backbone.", name)


def module_name(name: str) -> str:
    """And back."""
    return re.sub(r"^backbone\.", "model.", name)


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    blocks = list(config.blocks())
    mixers = tuple(itertools.accumulate((1 + b.mlp.there for b in blocks[:-1]), initial=0))
    found = {
        "embedding": Tensor("backbone.embeddings.weight"),
        "head": Tensor("lm_head.weight", "V D -> D V"),
        "final_norm.scale": Tensor("backbone.norm_f.weight"),
    }
    behind = _mlp_names() | (_experts_names() if isinstance(block.mlp, MoeConfig) else {})
    return found | _numbered(_mixer_names(block), mixers) | _numbered(behind, tuple(n + 1 for n in mixers))


def _numbered(names: Names, numbers: tuple[int, ...]) -> Names:
    return {path: dataclasses.replace(tensor, numbers=numbers) for path, tensor in names.items()}


def _mixer_names(block: BlockConfig) -> Names:
    inside, found = f"{LAYER}mixer.", {"attention_norm.scale": Tensor(f"{LAYER}norm.weight")}
    if isinstance(block.attention, MambaConfig):
        return found | mamba_names(block.attention, inside)
    usual = {path: tensor for path, tensor in standard().items() if path.startswith("attention.w")}
    return found | {
        path: dataclasses.replace(tensor, name=f"{inside}{tensor.name.partition('self_attn.')[2]}")
        for path, tensor in usual.items()
    }


def _mlp_names() -> Names:
    inside = f"{LAYER}mixer."
    found = {"mlp_norm.scale": Tensor(f"{LAYER}norm.weight")}
    for path, name in (("mlp.", inside), ("mlp.shared.", f"{inside}shared_experts.")):
        found[f"{path}up"] = Tensor(f"{name}up_proj.weight", "F D -> D F")
        found[f"{path}down"] = Tensor(f"{name}down_proj.weight", "D F -> F D")
    return found


def _experts_names() -> Names:
    inside = f"{LAYER}mixer."
    each = f"{inside}experts.{{expert}}."
    return {
        "mlp.up": Tensor(f"{each}up_proj.weight", "F D -> E D F"),
        "mlp.down": Tensor(f"{each}down_proj.weight", "D F -> E F D"),
        "mlp.router": Tensor(f"{inside}gate.weight", "E D -> D E"),
        "mlp.router_bias": Tensor(f"{inside}gate.e_score_correction_bias"),
        "mlp.latent_down": Tensor(f"{inside}fc1_latent_proj.weight", "L D -> D L"),
        "mlp.latent_up": Tensor(f"{inside}fc2_latent_proj.weight", "D L -> L D"),
    }
