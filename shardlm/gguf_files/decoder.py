"""What the architectures of GGUF files share: options of attention, rotation, windows and experts that nearly all of
them tell, as config.json has them."""

from collections.abc import Mapping
from typing import Any

from shardlm.errors import ShardlmError
from shardlm.gguf_files.header import Gguf
from shardlm.gguf_files.rotation import rotation
from shardlm.gguf_files.told import Told

KEYS = "attention.head_count_kv"


def heads(metadata: Mapping[str, Any]) -> tuple[int, int, int]:
    """(of queries, of keys and values, size of each). Layers that do not attend have none of keys."""
    told = Told(metadata, metadata["general.architecture"])
    of_some_layers(told, KEYS)
    queries = told.count("attention.head_count")
    keys = told.count(KEYS, queries)
    return queries, keys, told.count("attention.key_length", told.count("embedding_length") // queries)


def of_some_layers(told: Told, name: str) -> None:
    """Of a list with 0 for the layers that have none of it, the others count."""
    if of_layers := told.list(name):
        told.values[name] = [count for count in of_layers if count] or of_layers


def rows(gguf: Gguf, name: str) -> int:
    if name not in gguf.tensors:
        raise ShardlmError(f"the GGUF file has no tensor {name}; download it again, or give the file of a whole model")
    return gguf.tensors[name].shape[0]


def decoder(told: Told, gguf: Gguf, model_type: str, theta: float = 10_000.0, eps: str = "rms_norm_eps") -> dict:
    """What nearly all of them have; `eps` is what config.json calls that of norms, rms_norm_eps or one of layer norms.
    Layers that predict further tokens are not counted."""
    queries, keys, size = heads(gguf.metadata)
    told.asked |= {"attention.head_count", KEYS, "attention.key_length"}
    told.only("attention.value_length", size)
    told.only("attention.causal", True)
    own, other = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
    if eps != "rms_norm_eps":
        own, other = other, own
    told(other, None)  # of another kind of norm
    return {
        "model_type": model_type,
        "hidden_size": told.count("embedding_length"),
        "num_hidden_layers": told.count("block_count") - told.count("nextn_predict_layers", 0),
        "num_attention_heads": queries,
        "num_key_value_heads": keys,
        "head_dim": size,
        "intermediate_size": told.count("feed_forward_length"),
        eps: told.number(own),
        "max_position_embeddings": told.count("context_length"),
        "hidden_act": "silu",
        **rotation(told, gguf, size, theta),
    }


def biases(gguf: Gguf, **parts: str) -> dict[str, bool]:
    """Which there are, by the first layer's tensors; `parts`: those of options other than Llama's."""
    parts = parts or {"attention_bias": "attn_q", "mlp_bias": "ffn_up"}
    return {name: True for name, part in parts.items() if f"blk.0.{part}.bias" in gguf.tensors}


def windows(told: Told, layers: int, period: int, window: int) -> dict[str, Any]:
    """The layers that see no further back than `window` tokens: all but every so manieth where the file does not list
    them; `period` is llama.cpp's own where it does not say that either."""
    by_layer = told.list("attention.sliding_window_pattern")
    if by_layer is None:
        every = told.count("attention.sliding_window_pattern", period)
        by_layer = [(layer + 1) % every != 0 for layer in range(layers)]
    kinds = ["sliding_attention" if windowed else "full_attention" for windowed in by_layer[:layers]]
    return {"sliding_window": window, "layer_types": kinds}


def no_experts(told: Told) -> None:
    told.only("expert_count", 0)
    told.only("expert_used_count", 0)


def usual_routing(told: Told, *scored: int) -> None:
    """By a softmax, of those that are chosen made to sum to 1; `scored`: numbers of llama.cpp's for that."""
    told.only("expert_gating_func", 1, *scored)
    told.only("expert_weights_norm", True)
    told.only("expert_weights_scale", 1.0, 0.0)
    for name in ("expert_shared_count", "expert_shared_feed_forward_length"):
        told.only(name, 0)
    for name in ("expert_group_count", "expert_group_used_count"):
        told.only(name, 0, 1)
