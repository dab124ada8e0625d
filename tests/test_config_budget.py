"""A law: the list of configuration fields is frozen here, so that a new one is a deliberate change with its reason."""

import pathlib

import pytest

from shardlm import config as configuration
from shardlm.config_json import from_json, to_json
from shardlm.train.config import RunConfig

ROOT = pathlib.Path(__file__).parent.parent
COMMON = {"vocab_size", "embed_dim", "num_layers", "num_heads", "rope_theta", "norm_eps", "tie_embeddings"}
EXPERTS = {"num_experts", "top_k", "expert_dim", "balance_loss", "capacity_factor"}
MODELS = {
    "Pretrained": {"folder", "length", "config", "mtp"},
    "LlamaConfig": COMMON | {"num_kv_heads", "head_dim", "mlp_dim"},
    "MixtralConfig": COMMON | EXPERTS | {"num_kv_heads", "head_dim", "router_z_loss"},
    "DeepseekConfig": COMMON | EXPERTS | {
        "dense_layers", "mlp_dim", "q_latent_dim", "kv_latent_dim", "nope_dim", "rope_dim", "value_dim", "num_shared",
        "scoring", "groups", "top_groups", "routed_scale", "load_bias", "mtp",
    },
}  # fmt: skip
FIELDS = {
    "data": {
        "train", "validation", "tokenizer", "chat_template", "max_pixels", "text_key", "packing", "on_bad_utf8",
        "cache_dir", "seed", "weights",
    },
    "mesh": {"data", "fsdp", "context", "pipeline", "expert", "tensor"},
    "optim": {
        "name", "learning_rate", "schedule", "warmup_steps", "final_fraction", "weight_decay", "b1", "b2", "eps",
        "clip_norm", "ema_decay", "load_bias_rate", "encoder_rate", "moments",
    },
    "train": {
        "steps", "global_batch", "seq_len", "accumulation", "shares", "z_loss", "mtp_loss", "encoder", "seed",
        "log_every", "eval_every", "eval_batches", "max_bad_steps", "stuck_seconds", "baselines", "sample_prompt",
    },
    "pipeline": {"schedule", "rounds"},
    "lora": {"rank", "alpha", "targets", "base"},
    "preference": {"beta", "loss", "gamma", "label_smoothing", "sft_weight", "desirable_weight", "undesirable_weight"},
    "grpo": {
        "reward", "group_size", "max_tokens", "updates", "beta", "clip_low", "clip_high", "loss", "scale_rewards",
        "mask_truncated", "tensor", "kv_cache_gib",
    },
    "distill": {"teacher", "weight", "temperature", "kind", "beta"},
    "offload": {"optimizer", "params"},
    "slow_link": {"compression", "rank"},
    "local_sgd": {"inner_steps", "outer_learning_rate", "outer_momentum", "fragments", "overlap", "mixing"},
    "checkpoint": {"every_steps", "keep", "keep_best"},
    "": {
        "rules", "precision", "remat", "attention", "context_attention", "matmul", "unroll", "xla_profile", "trackers",
        "run_dir", "cpu_devices",
    },
}  # fmt: skip
CONFIGS = sorted((ROOT / "configs").glob("*.py"))


def by_group(config) -> dict[str, set[str]]:
    groups: dict[str, set[str]] = {}
    for path in configuration.leaves(config):
        group, _, field = path.rpartition(".")
        groups.setdefault(group, set()).add(field)
    return groups


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_the_fields_of_every_shipped_config(path):
    config = configuration.load(str(path))
    assert by_group(config) == FIELDS | {"model": MODELS[type(config.model).__name__]}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_shipped_config_survives_json(path):
    config = configuration.load(str(path))
    assert from_json(RunConfig, to_json(config)) == config


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_shipped_config_opens_with_its_command(path):
    opening = path.read_text().split('"""')[1]
    assert f"--config=configs/{path.name}" in opening and "Hardware" in opening
