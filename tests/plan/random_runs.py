"""Small runs, most drawn at random: dense models, mixtures and latent attention on all axes, and what was counted in
their compiled steps for H100s. random_runs.json keeps it, so that formulas are held to programs without compiling any;
of some, what the program as it is trained holds, and its seconds, is there too. What it lacks is drawn or taken from
PICKED, compiled and added by

    JAX_PLATFORMS=cpu python tests/plan/random_runs.py NAME NAME ...

where a name is a seed or one of PICKED: one or two minutes each on two cores, ten where there are experts. Bytes and
seconds need the program with all its optimisations: `python tests/plan/random_runs.py --whole NAME NAME ...`

One compiled run is not foreseen and not in the record: latent attention with heads of 192 in a ring over context=2,
with tensor=2: 3% in FLOPs, 4% in the bytes that tensor scatters, 2.4% in those of the ring."""

import json
import math
import pathlib
import random
import sys
from typing import Any

import more_families

from shardlm.errors import ShardlmError
from shardlm.hardware import GPUS
from shardlm.hlo.bill import Bill
from shardlm.hlo.collectives import collectives
from shardlm.hlo.flops import matmul_flops
from shardlm.mesh import MeshSpec
from shardlm.models.deepseek import DeepseekConfig
from shardlm.models.llama import LlamaConfig
from shardlm.models.mixtral import MixtralConfig
from shardlm.models.pretrained import Pretrained
from shardlm.models.qwen_hybrid import QwenHybridConfig
from shardlm.plan.cluster import Cluster
from shardlm.plan.sketch import Sketch
from shardlm.plan.verify import compile_step
from shardlm.topology import topology
from shardlm.train.config import PipelineConfig, RunConfig, TrainConfig
from shardlm.train.program import Program

# The kernels are not optimised, and matmuls are cuBLAS's: half the time to compile, and the same collectives and FLOPs.
FAST = {
    "xla_gpu_enable_triton_gemm": False,
    "xla_llvm_disable_expensive_passes": True,
    "xla_backend_optimization_level": 0,
}
RECORD = pathlib.Path(__file__).with_suffix(".json")
Settings = dict[str, Any]


def _entries(kinds: str, **sizes) -> Pretrained:
    """DeepSeek V4 with layers of these kinds: H for entries of 128 tokens, C for those of 4 that are chosen, S none."""
    names = {"H": "heavily_compressed_attention", "C": "compressed_sparse_attention", "S": "sliding_attention"}
    own = {"num_hidden_layers": len(kinds), "layer_types": [names[kind] for kind in kinds]}
    return Pretrained("unread", config=json.dumps(_V4 | own | sizes))


def _channels(layers: int, linear_heads: int, **sizes) -> Pretrained:
    """Kimi Linear: decays by channel in three of four layers, latent attention in the fourth."""
    numbers = range(1, layers + 1)
    kinds = {"kda_layers": [n for n in numbers if n % 4], "full_attn_layers": [n for n in numbers if n % 4 == 0]}
    linear = {"num_heads": linear_heads, "head_dim": 128, "short_conv_kernel_size": 4} | kinds
    own = {"num_hidden_layers": layers, "linear_attn_config": linear, "mla_use_nope": True, "moe_renormalize": True}
    return Pretrained(
        "unread", config=json.dumps(_LATENT | {"model_type": "kimi_linear", "rms_norm_eps": 1e-5} | own | sizes)
    )


def _chosen(layers: int, **sizes) -> Pretrained:
    """DeepSeek V3.2."""
    own = {"num_hidden_layers": layers, "model_type": "deepseek_v32", "norm_topk_prob": True, "n_shared_experts": 1}
    own |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_group": 1, "topk_group": 1}
    own |= {"routed_scaling_factor": 2.5}
    return Pretrained("unread", config=json.dumps(_LATENT | own | sizes))


def _granite(layers: int, **sizes) -> Pretrained:
    """Granite 4: Mamba 2 in three of four layers, whose heads share one group of queries and keys."""
    kinds = ["attention" if number % 4 == 2 else "mamba" for number in range(layers)]
    own = {"num_hidden_layers": layers, "layer_types": kinds, "mamba_n_groups": 1, "mamba_expand": 2}
    own |= {"mamba_d_state": 128, "mamba_d_head": 64, "num_local_experts": 0, "rms_norm_eps": 1e-5}
    return Pretrained(
        "unread", config=json.dumps(_SUMMED | {"model_type": "granitemoehybrid", "hidden_act": "silu"} | own | sizes)
    )


def _nemotron(pattern: str, **sizes) -> Pretrained:
    """Nemotron-H and 3: Mamba 2 in eight groups, attention, and feed-forward layers without gates, each by itself."""
    own = {"hybrid_override_pattern": pattern, "mlp_hidden_act": "relu2", "n_groups": 8, "mamba_head_dim": 64}
    own |= {"ssm_state_size": 128, "head_dim": 128}
    return Pretrained("unread", config=json.dumps(_SUMMED | {"model_type": "nemotron_h"} | own | sizes))


def _inputs(**sizes) -> Pretrained:
    """Gemma 4 E2B's kind: two of four layers read the keys and values of others, and each has inputs of its own."""
    reference = pathlib.Path(__file__).parent.parent / "hf" / "references" / "gemma4" / "config.json"
    wide = {"per_layer_config": {"1": {"head_dim": 512}, "3": {"head_dim": 512}}, "use_double_wide_mlp": True}
    own = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2} | wide
    own |= {"max_position_embeddings": 8192, "sliding_window": 512, "num_kv_shared_layers": 2}
    return Pretrained("unread", config=json.dumps(json.loads(reference.read_text()) | own | sizes))


_SUMMED = {"tie_word_embeddings": False, "max_position_embeddings": 65_536}
_LATENT = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 65_536, "first_k_dense_replace": 1}
_LATENT |= {"tie_word_embeddings": False, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_V4 = {"model_type": "deepseek_v4", "hidden_act": "silu", "num_key_value_heads": 1, "rms_norm_eps": 1e-6}
_V4 |= {"max_position_embeddings": 65_536, "o_groups": 8, "tie_word_embeddings": False, "hc_sinkhorn_iters": 2}
MODELS = {"llama": LlamaConfig, "mixtral": MixtralConfig, "deepseek": DeepseekConfig, "hybrid": QwenHybridConfig}
MODELS |= {"entries": _entries, "channels": _channels, "chosen": _chosen, "granite": _granite, "nemotron": _nemotron}
MODELS |= {"inputs": _inputs, **more_families.MODELS}


_DENSE = {"vocab_size": 16_384, "embed_dim": 1024, "num_layers": 6, "num_heads": 16, "tie_embeddings": False}
_DENSE |= {"num_kv_heads": 4, "head_dim": 128, "mlp_dim": 6144}
_STAGES = {"schedule": "circular", "rounds": 1}


def _picked(mesh: dict[str, int], rules: str, remat: str, rows: int, accumulation: int, tied: bool = False) -> Settings:
    return {
        "model": "llama",
        "sizes": _DENSE | {"tie_embeddings": tied},
        "mesh": mesh,
        "rules": rules,
        "remat": remat,
        "context_attention": "ring",
        "train": {"global_batch": rows, "seq_len": 2048, "accumulation": accumulation},
        "pipeline": _STAGES,
    }


# Three of four layers are linear attention, in two repeats.
_HYBRID = {"vocab_size": 16_384, "embed_dim": 1024, "num_layers": 8, "num_heads": 8, "num_kv_heads": 4, "head_dim": 128}
_HYBRID |= {"mlp_dim": 4096, "linear_num_heads": 16, "linear_num_kv_heads": 8}


def _linear(mesh: dict[str, int], remat: str, rows: int, accumulation: int = 1, seq_len: int = 2048) -> Settings:
    train = {"global_batch": rows, "seq_len": seq_len, "accumulation": accumulation}
    own = {"model": "hybrid", "sizes": _HYBRID, "context_attention": "auto", "train": train}
    return _picked(mesh, "zero3", remat, rows, accumulation) | own


# Attention to entries that stand for several tokens, and four streams.
_SMALL = {"vocab_size": 16_384, "hidden_size": 1024, "num_attention_heads": 16, "head_dim": 256, "q_lora_rank": 512}
_SMALL |= {"o_lora_rank": 256, "n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 512}
_SMALL |= {"index_topk": 256, "index_n_heads": 16, "index_head_dim": 64, "partial_rotary_factor": 0.25}
_SMALL |= {"kinds": "HCHC", "num_hash_layers": 0}
_LARGE = {"vocab_size": 129_280, "hidden_size": 4096, "num_attention_heads": 64, "head_dim": 512, "q_lora_rank": 1024}
_LARGE |= {"o_lora_rank": 1024, "n_routed_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 2048}
_LARGE |= {"index_topk": 512, "index_n_heads": 64, "index_head_dim": 128, "partial_rotary_factor": 0.125}
_LARGE |= {"kinds": "HCHCHCH", "num_hash_layers": 1}


def _of_entries(sizes, mesh: dict[str, int], rows: int, seq_len: int = 4096, remat: str = "full") -> Settings:
    train = {"global_batch": rows, "seq_len": seq_len, "accumulation": 1}
    own = {"model": "entries", "sizes": sizes, "context_attention": "auto", "train": train}
    return _picked(mesh, "zero3", remat, rows, 1) | own


# Latent attention beside linear attention with decays by channel, and to chosen tokens.
_OF_LATENTS = {"vocab_size": 16_384, "hidden_size": 1024, "num_attention_heads": 8, "kv_lora_rank": 256}
_OF_LATENTS |= {"intermediate_size": 4096, "moe_intermediate_size": 512}
_KIMI = _OF_LATENTS | {"layers": 9, "linear_heads": 8, "num_experts": 16, "num_experts_per_token": 4}
_KIMI |= {"num_shared_experts": 1}
_SPARSE = _OF_LATENTS | {"layers": 6, "q_lora_rank": 512, "n_routed_experts": 16, "num_experts_per_tok": 4}
_SPARSE |= {"index_n_heads": 8, "index_head_dim": 64, "index_topk": 1024}


def _latent(
    model: str, mesh: dict[str, int], rows: int, remat: str = "full", accumulation: int = 1, **sizes
) -> Settings:
    of, seq_len = (_KIMI, 2048) if model == "channels" else (_SPARSE, 4096)
    train = {"global_batch": rows, "seq_len": seq_len, "accumulation": accumulation}
    own = {"model": model, "sizes": of | sizes, "context_attention": "auto", "train": train}
    return _picked(mesh, "zero3", remat, rows, accumulation) | own


# Mamba 2: with groups that devices share, with feed-forward layers that are missing behind some, and with experts.
_MAMBA = {"vocab_size": 16_384, "hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4}
_GRANITE = _MAMBA | {"layers": 8, "mamba_n_heads": 32, "shared_intermediate_size": 4096}
_GRANITE_EXPERTS = {"num_local_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 512}
_GRANITE_EXPERTS |= {"shared_intermediate_size": 1024}
_NEMOTRON = _MAMBA | {"mamba_num_heads": 32, "intermediate_size": 4096}
_NEMOTRON_EXPERTS = {"n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 512}
_NEMOTRON_EXPERTS |= {"moe_shared_expert_intermediate_size": 1024}
DENSE, SPARSE = "M-M-M*-", "MEMEM*E"  # of Nemotron's patterns


def _summed(
    mesh: dict[str, int], rows: int, remat: str = "full", accumulation: int = 1, seq_len: int = 2048, **sizes
) -> Settings:
    model = "nemotron" if "pattern" in sizes else "granite"
    of = _NEMOTRON | (_NEMOTRON_EXPERTS if "E" in sizes.get("pattern", "") else {})
    train = {"global_batch": rows, "seq_len": seq_len, "accumulation": accumulation}
    sizes = (of if model == "nemotron" else _GRANITE) | sizes
    own = {"model": model, "sizes": sizes, "context_attention": "auto", "train": train}
    return _picked(mesh, "zero3", remat, rows, accumulation) | own


_E2B = {"hidden_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256}
_E2B |= {"intermediate_size": 6144, "vocab_size": 65_536, "vocab_size_per_layer_input": 65_536}


def _of_inputs(mesh: dict[str, int], rows: int, dim: int) -> Settings:
    train = {"global_batch": rows, "seq_len": 2048, "accumulation": 1}
    sizes = _E2B | {"hidden_size_per_layer_input": dim}
    own = {"model": "inputs", "sizes": sizes, "context_attention": "auto", "train": train}
    return _picked(mesh, "zero3", "full", rows, 1) | own


PICKED = {  # what chance left out
    "inputs-tensor": _of_inputs({"fsdp": 2, "tensor": 2}, 2, 256),
    "reads-tensor": _of_inputs({"fsdp": 2, "tensor": 2}, 2, 0),
    "groups-fsdp": _summed({"fsdp": 2}, 2),
    "groups-deep": _summed({"fsdp": 2}, 2, layers=16),
    "groups-deep-tensor": _summed({"fsdp": 2, "tensor": 2}, 4, layers=16),
    "groups-tensor": _summed({"fsdp": 2, "tensor": 2}, 4, accumulation=2),
    "groups-context": _summed({"context": 2}, 1),
    "groups-none": _summed({"fsdp": 2}, 2, "none"),
    "groups-deep-none": _summed({"fsdp": 2}, 2, "none", layers=16),
    "groups-experts": _summed({"fsdp": 2}, 2, **_GRANITE_EXPERTS),
    "groups-experts-deep": _summed({"expert": 2, "fsdp": 2}, 4, layers=16, **_GRANITE_EXPERTS),
    "summed-fsdp": _summed({"fsdp": 2}, 2, pattern=2 * DENSE),
    "summed-tensor": _summed({"fsdp": 2, "tensor": 2}, 4, pattern=2 * DENSE),
    "summed-context": _summed({"context": 2, "tensor": 2}, 2, seq_len=4096, pattern=2 * DENSE),
    "summed-long": _summed({"fsdp": 2, "context": 2}, 4, seq_len=8192, pattern=4 * DENSE),
    "summed-deep-tensor": _summed({"fsdp": 2, "tensor": 2}, 2, seq_len=4096, pattern=3 * DENSE),
    "summed-dots": _summed({"fsdp": 2}, 2, "dots", pattern=4 * DENSE),
    "summed-none": _summed({"data": 2}, 4, "none", 2, pattern=2 * DENSE) | {"rules": "replicated"},
    "summed-stages": _summed({"pipeline": 2}, 4, "names", 4, pattern=2 * DENSE),
    "summed-experts": _summed({"expert": 2, "fsdp": 2}, 4, pattern=2 * SPARSE),
    "summed-latent": _summed({"expert": 2, "tensor": 2}, 2, pattern=2 * SPARSE, moe_latent_size=512),
    "summed-sent": _summed({"expert": 8}, 8, pattern=2 * SPARSE),
    "channels-fsdp": _latent("channels", {"fsdp": 2}, 2),
    "channels-deep": _latent("channels", {"fsdp": 2}, 2, layers=17),
    "channels-deep-experts": _latent("channels", {"expert": 2, "fsdp": 2}, 4, layers=17),
    "channels-tensor": _latent("channels", {"fsdp": 2, "tensor": 2}, 4, accumulation=2),
    "channels-context": _latent("channels", {"context": 2}, 1),
    "channels-experts": _latent("channels", {"expert": 2, "fsdp": 2}, 4),
    "channels-sent": _latent("channels", {"expert": 8}, 8),
    "channels-none": _latent("channels", {"fsdp": 2}, 2, "none"),
    "channels-stages": _latent("channels", {"pipeline": 2}, 4, "names", 4),
    "chosen-fsdp": _latent("chosen", {"fsdp": 2}, 2),
    "chosen-tensor": _latent("chosen", {"fsdp": 2, "tensor": 2}, 4, accumulation=2),
    "chosen-context": _latent("chosen", {"context": 2}, 1),
    "chosen-experts": _latent("chosen", {"expert": 2, "fsdp": 2}, 4, "names"),
    "chosen-none": _latent("chosen", {"fsdp": 2}, 2, "none"),
    "entries-fsdp": _of_entries(_SMALL, {"fsdp": 2}, 2),
    "entries-tensor": _of_entries(_SMALL, {"tensor": 2}, 2),
    "entries-context": _of_entries(_SMALL, {"context": 2}, 2),
    "entries-experts": _of_entries(_SMALL, {"expert": 2, "fsdp": 2}, 4),
    "entries-dots": _of_entries(_SMALL, {"fsdp": 2}, 2, 2048, "dots"),
    "entries-none": _of_entries(_SMALL, {"data": 2}, 2, 2048, "none"),
    "entries-sent": _of_entries(_LARGE, {"fsdp": 8, "expert": 8}, 64),
    "entries-hashed": _of_entries(_LARGE, {"fsdp": 8, "tensor": 4, "expert": 2}, 16),
    "names": _picked({"fsdp": 2, "tensor": 2}, "zero3", "names", 4, 1),
    "stages-dots": _picked({"pipeline": 2, "tensor": 2}, "zero1", "dots", 8, 4),
    "stages-names": _picked({"pipeline": 2, "tensor": 2}, "zero1", "names", 8, 4),
    "stages-none": _picked({"pipeline": 2, "tensor": 2}, "zero1", "none", 8, 4),
    "stages-context": _picked({"pipeline": 2, "context": 2, "tensor": 2}, "zero1", "full", 8, 4),
    "stages-full": _picked({"pipeline": 2, "fsdp": 2, "tensor": 2}, "zero3", "full", 16, 4),
    "hybrid-tied": _picked({"data": 2, "fsdp": 2}, "hybrid", "full", 16, 2, tied=True),
    "zero2": _picked({"data": 2, "fsdp": 2}, "zero2", "full", 16, 2),
    "linear-tensor": _linear({"fsdp": 2, "tensor": 2}, "full", 4, 2),
    "linear-context": _linear({"context": 2, "tensor": 2}, "full", 1, seq_len=4000),
    "linear-dots": _linear({"context": 2}, "dots", 2),
    "linear-none": _linear({"fsdp": 2}, "none", 2),
    "linear-stages": _linear({"pipeline": 2}, "names", 4, 4),
    "replicated": _picked({"data": 2, "fsdp": 2}, "replicated", "full", 16, 2),
    **more_families.PICKED,
}


def draw(seed: int) -> Settings:
    """Settings of a run that passes every check."""
    dice = random.Random(seed)
    while True:
        settings = _draw(dice)
        try:
            Sketch.of(run_of(settings), GPUS["h100"])
        except ShardlmError:
            continue
        return settings


def run_of(settings: Settings) -> RunConfig:
    """The run that settings describe."""
    parts = {"mesh": MeshSpec, "train": TrainConfig, "pipeline": PipelineConfig}
    given = {name: make(**settings[name]) for name, make in parts.items()}
    plain = {name: settings[name] for name in ("rules", "remat", "context_attention")}
    return RunConfig(MODELS[settings["model"]](**settings["sizes"]), **given, **plain)


def _draw(dice: random.Random) -> Settings:
    model = dice.choice(("llama", "llama", "mixtral", "deepseek"))
    axes = ["data", "fsdp", "context", "pipeline", "tensor"] + (["expert"] * 2 if model != "llama" else [])
    mesh: dict[str, int] = {}
    for _ in range(dice.choice((3, 3, 4))):
        axis = dice.choice(axes)
        mesh[axis] = 2 * mesh.get(axis, 1)
    accumulation = dice.choice((1, 2, 4)) * (mesh.get("pipeline", 1) if "pipeline" in mesh else 1)
    batch = accumulation * math.prod(mesh.get(axis, 1) for axis in ("data", "fsdp", "expert")) * dice.choice((1, 2))
    schedule = {"schedule": dice.choice(("circular", "circular", "1f1b")), "rounds": dice.choice((1, 2))}
    if schedule["schedule"] == "1f1b":
        schedule["rounds"] = 1
    return {
        "model": model,
        "sizes": _sizes(dice, model),
        "mesh": mesh,
        "rules": dice.choice(("replicated", "zero1", "zero2", "zero3", "zero3", "hybrid")),
        "remat": dice.choice(("none", "full", "full", "dots", "names")),
        "context_attention": dice.choice(("auto", "ring")),
        "train": {"global_batch": batch, "seq_len": dice.choice((2048, 4096)), "accumulation": accumulation},
        "pipeline": schedule,
    }


def _sizes(dice: random.Random, model: str) -> dict[str, Any]:
    heads = dice.choice((8, 16))
    sizes = {
        "vocab_size": dice.choice((16_384, 32_768)),
        "embed_dim": dice.choice((1024, 2048)),
        "num_layers": dice.choice((4, 6, 8)),
        "num_heads": heads,
        "tie_embeddings": dice.random() < 0.3,
    }
    if model == "deepseek":
        own = {"dense_layers": dice.choice((0, 1)), "q_latent_dim": dice.choice((0, 512)), "kv_latent_dim": 256}
        own |= {"nope_dim": 64, "rope_dim": 32, "value_dim": 64}  # heads that cuDNN has kernels for
        own |= {"mlp_dim": 4096, "num_experts": 16, "top_k": dice.choice((2, 4)), "expert_dim": 512, "groups": 4}
        own |= {"top_groups": 2, "num_shared": dice.choice((0, 1)), "mtp": dice.choice((0, 0, 1))}
        return sizes | own | {"capacity_factor": dice.choice((0.0, 2.0))}
    sizes |= {"num_kv_heads": dice.choice((2, 4, heads)), "head_dim": 128}
    if model == "mixtral":
        own = {"num_experts": 8, "top_k": 2, "expert_dim": 2048, "capacity_factor": dice.choice((0.0, 2.0))}
        return sizes | own
    return sizes | {"mlp_dim": dice.choice((4096, 6144))}


def counted(settings: Settings) -> dict[str, Any]:
    """What is counted in the run's compiled step: bytes and operations of one GPU."""
    config = run_of(settings)
    gpus = config.mesh.size(*config.mesh.sizes())
    hosts = max(1, gpus // 8)
    program = Program.make(config, config.mesh.build(topology("h100", hosts, gpus // hosts)))
    text = program.compile("step", dict(program.xla_options().options) | FAST).as_text()
    work = matmul_flops(text)
    return {
        "flops": work.flops,
        "uncounted": dict(work.uncounted),
        "sent": Bill.of(collectives(text, config.mesh.sizes())).by_axis(),
    }


def whole(settings: Settings) -> dict[str, float]:
    """Bytes and seconds of the run's step, compiled as it is trained."""
    config = run_of(settings)
    cluster = Cluster.of(GPUS["h100"], config.mesh.size(*config.mesh.sizes()))
    found = compile_step(config, cluster)
    sizes = {"argument_bytes": found.argument_bytes, "temporary_bytes": found.temporary_bytes}
    return sizes | {"seconds": round(found.step.step_seconds, 5)}


def recorded() -> list[dict[str, Any]]:
    """Name, settings and what was counted of each."""
    return json.loads(RECORD.read_text())


def write(runs: list[dict[str, Any]]) -> None:
    """One run a line."""
    RECORD.write_text("[\n" + ",\n".join(json.dumps(run) for run in runs) + "\n]\n")


if __name__ == "__main__":
    runs = {run["name"]: run for run in recorded()}
    count = whole if "--whole" in sys.argv else counted
    for name in (word for word in sys.argv[1:] if word != "--whole"):
        settings = PICKED[name] if name in PICKED else draw(int(name))
        runs[name] = runs.get(name, {}) | {"name": name, "settings": settings} | count(settings)
        write(list(runs.values()))
