"""What families with layers of Mamba 2 (layers/mamba.py) share: their tensors, options and the limits of steps."""

import math

from shardlm.errors import ShardlmError
from shardlm.layers.mamba import MambaConfig
from shardlm.layers.norm import NormConfig
from shardlm.models.hf_options import Options
from shardlm.models.naming import Names, Tensor


def steps_of(options: Options, name: str) -> tuple[float, float]:
    """The least and the largest dt, of an option that may say infinity as JSON does or as transformers 5 writes it."""
    said = options(name, [0.0, math.inf])
    found = [float(n["__float__"]) if isinstance(n, dict) and "__float__" in n else n for n in said]
    if len(found) != 2 or not all(isinstance(n, (int, float)) for n in found) or not 0 <= found[0] <= found[1]:
        raise ShardlmError(f"config.json has {name}={said!r}; it needs two numbers, the least and the largest dt")
    return float(found[0]), float(found[1])


def memory_of(options: Options, norm: NormConfig, inner: int = 0) -> MambaConfig:
    """By the options of Bamba, which Granite 4 and Falcon H1 have too; `inner`: how wide heads are together, 0: so many
    times the stream."""
    options.only("mamba_proj_bias", False)
    options.only("hidden_act", "silu")
    options("mamba_chunk_size", None)  # of tokens that are computed at once
    heads = options("mamba_n_heads", 128)
    expanded = options("mamba_expand", 2) * options("hidden_size")
    by, inner = ("mamba_d_ssm", inner) if inner else ("mamba_expand * hidden_size", expanded)
    width = options("mamba_d_head", "auto")
    width = inner // heads if width == "auto" else width
    if width * heads != inner:
        raise ShardlmError(
            f"config.json has mamba_n_heads={heads} of mamba_d_head={width}; together they need {by}={inner}"
        )
    return MambaConfig(
        num_heads=heads,
        num_kv_heads=options("mamba_n_groups", 1),
        head_dim=options("mamba_d_state", 256),
        value_dim=width,
        conv_width=options("mamba_d_conv", 4),
        norm=norm,
        conv_bias=bool(options("mamba_conv_bias", True)),
        steps=steps_of(options, "time_step_limit"),
    )


def mamba_names(memory: MambaConfig, inside: str) -> Names:
    """Of a layer. One projection makes gate, values, keys, queries and steps, in this order, and one convolution has
    values, keys and queries."""
    of_values, of_keys = memory.num_heads * memory.value_dim, memory.num_kv_heads * memory.head_dim
    found, first = {}, 0
    for letter, size in (("g", of_values), ("v", of_values), ("k", of_keys), ("q", of_keys)):
        part = (0, first, first + size, 1)
        found[f"attention.w{letter}"] = Tensor(f"{inside}in_proj.weight", "(N H) D -> D N H", part=part)
        if letter != "g":
            part = (0, first - of_values, first - of_values + size, 1)
            taps = Tensor(f"{inside}conv1d.weight", "(N H) 1 W -> N H W", part=part)
            found[f"attention.taps_{letter}"] = taps
            found[f"attention.bias_{letter}"] = Tensor(f"{inside}conv1d.bias", "(N H) -> N H", part=part)
        first += size
    part = (0, first, first + memory.num_heads, 1)
    return found | {
        "attention.decay": Tensor(f"{inside}in_proj.weight", "N D -> D N", part=part),
        "attention.decay_bias": Tensor(f"{inside}dt_bias"),
        "attention.log_rate": Tensor(f"{inside}A_log"),
        "attention.skip": Tensor(f"{inside}D"),
        "attention.out_scale": Tensor(f"{inside}norm.weight", "(N H) -> N H"),
        "attention.wo": Tensor(f"{inside}out_proj.weight", "D (N H) -> N H D"),
    }
