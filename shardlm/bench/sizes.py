"""What `launch.bench gpu` measures: of `full` sizes on a GPU of 80 GB or more, and of `tiny` ones anywhere in seconds,
to see that everything runs."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from shardlm.bench.kernel_cases import FULL as FULL_KERNELS
from shardlm.bench.kernel_cases import TINY as TINY_KERNELS
from shardlm.bench.kernel_cases import KernelCases
from shardlm.errors import ShardlmError
from shardlm.mesh import MeshSpec
from shardlm.models.llama import LlamaConfig
from shardlm.serve.engine_config import EngineConfig
from shardlm.train.config import OffloadConfig, RunConfig, TrainConfig


@dataclasses.dataclass(frozen=True)
class Served:
    """An engine, and what it is asked for: `batches` of requests together, and `prefill` (rows, tokens) of prompts.
    environment: variables of its process."""

    model: LlamaConfig
    engine: EngineConfig
    batches: tuple[int, ...]
    prompt_len: int
    output_len: int
    prefill: tuple[int, int]
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Cases by part and name.

    kernels        by family (kernel_cases.py)
    profile        of what the machine's profile is measured with, where that is not survey.machine_profile's own
    warmup, steps  of training
    step_seconds   of the timed steps together, after which no further one begins
    workers        of pytest
    seconds        the most that a process may take for each case that it has
    apart          cases in processes by what they are worth (cases.py); else those of a part share one
    gpu            whether it must run on a GPU
    """

    train: Mapping[str, RunConfig]
    served: Mapping[str, Served]
    kernels: Mapping[str, KernelCases]
    plan: Mapping[str, RunConfig]
    warmup: int
    steps: int
    step_seconds: float
    workers: int
    seconds: float
    apart: bool
    gpu: bool
    profile: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def trained(model: LlamaConfig, rows: int, length: int, **changes) -> RunConfig:
    """A step of one device on rows x length tokens."""
    accumulation = changes.pop("accumulation", 1)
    train = TrainConfig(global_batch=rows, seq_len=length, accumulation=accumulation)
    return RunConfig(model, mesh=MeshSpec(), rules="replicated", train=train, **changes)


def is_apart(config: RunConfig) -> bool:
    """Whether a step is compiled and measured when all others are: one in fp8 was not compiled after 36 s, when ten
    others long were, and one in float32 not after 150 s (16 cores, H200, measured); and of one whose state is on the
    host the device's most memory is not seen where a larger step ran before in its process."""
    return config.matmul != "dtype" or config.precision == "fp32" or config.offload != OffloadConfig()


_HALF_B = LlamaConfig(32_768, 1536, 16, 24, 8, 64, 4096)
_1B = LlamaConfig(128_256, 2048, 16, 32, 8, 64, 8192, tie_embeddings=True)  # as Llama 3.2 1B
_8B = LlamaConfig()
_SLICE = dataclasses.replace(_8B, num_layers=8)  # of the width of Llama 3 8B
_SERVED = Served(
    _8B,
    EngineConfig(max_model_len=4096, max_num_seqs=64, enable_prefix_caching=False),
    batches=(1, 8, 64),
    prompt_len=512,
    output_len=256,
    prefill=(4, 2048),
)


def _held(served: Served, **engine) -> Served:
    return dataclasses.replace(served, engine=dataclasses.replace(served.engine, **engine))


# How programs get to the GPU, where a step is shortest: loops and conditionals in CUDA graphs, which need no host at
# their predicates; jax's other client, which starts programs on threads of its own; and no graphs at all.
_GRAPHS = "--xla_gpu_enable_command_buffer="
_STARTED = {
    "graphs with loops": {"XLA_FLAGS": f"{_GRAPHS}+WHILE,+CONDITIONAL"},
    "no graphs": {"XLA_FLAGS": _GRAPHS},
    "other client": {"XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT": "1"},
}
_FEW = dataclasses.replace(_held(_SERVED, max_num_seqs=2), batches=(1, 2))

FULL = Sizes(
    train=MappingProxyType(
        {
            "1B": trained(_1B, 8, 4096, remat="dots"),
            "8B, 8 layers": trained(_SLICE, 4, 8192, remat="dots"),
            "1B, without a loop": trained(_1B, 8, 4096, remat="dots", unroll=0),
            "0.5B": trained(_HALF_B, 8, 4096, remat="none"),
            "8B, 8 layers, remat full": trained(_SLICE, 4, 8192),
            "8B, 8 layers, fp8": trained(_SLICE, 4, 8192, matmul="fp8"),
            "8B, 8 layers, int8": trained(_SLICE, 4, 8192, matmul="int8"),
        }
    ),
    served=MappingProxyType(
        {
            "bf16": _SERVED,
            "fp8 cache": _held(_SERVED, kv_cache_dtype="fp8"),
            "int8": _held(_SERVED, quantization="int8"),
            "fp8": _held(_SERVED, quantization="fp8"),
            "int4": _held(_SERVED, quantization="int4"),
            "fp8_dynamic": _held(_SERVED, quantization="fp8_dynamic"),
            **{f"bf16, {name}": dataclasses.replace(_FEW, environment=env) for name, env in _STARTED.items()},
        }
    ),
    kernels=FULL_KERNELS,
    plan=MappingProxyType(
        {
            # By the memory that is predicted: a process knows the most that it ever had.
            "2 x 4k": trained(_1B, 2, 4096),
            "16 x 1k": trained(_1B, 16, 1024),
            "4 x 4k": trained(_1B, 4, 4096),
            "1 x 16k": trained(_1B, 1, 16_384),
            "4 x 4k, remat names": trained(_1B, 4, 4096, remat="names"),
            "8 x 4k": trained(_1B, 8, 4096),
            "2 x 4k, fp32": trained(_1B, 2, 4096, precision="fp32"),
            "16 x 4k in 4": trained(_1B, 16, 4096, accumulation=4),
            "4 x 4k, remat dots": trained(_1B, 4, 4096, remat="dots"),
            "16 x 4k": trained(_1B, 16, 4096),
            "4 x 4k, remat none": trained(_1B, 4, 4096, remat="none"),
            "8B, 8 layers, 2 x 4k": trained(_SLICE, 2, 4096),
            "4 x 4k, fp8": trained(_1B, 4, 4096, matmul="fp8"),
            "4 x 4k, optimizer in host memory": trained(_1B, 4, 4096, offload=OffloadConfig(optimizer=True)),
        }
    ),
    warmup=2,
    steps=6,  # most take 0.2 to 0.7 s (H200, measured)
    step_seconds=3.0,
    workers=6,
    seconds=300,
    apart=True,
    gpu=True,
)

_SMALL = LlamaConfig(320, 32, 2, 4, 2, 16, 64)
TINY = Sizes(
    train=MappingProxyType({"tiny": trained(_SMALL, 2, 32)}),
    served=MappingProxyType(
        {
            "int8": Served(
                _SMALL,
                EngineConfig(
                    max_model_len=64,
                    max_num_seqs=2,
                    max_num_batched_tokens=32,
                    decode_steps=4,
                    quantization="int8",
                    kv_cache_bytes=2**20,
                    enable_prefix_caching=False,
                ),
                batches=(1, 2),
                prompt_len=16,
                output_len=24,
                prefill=(2, 16),
            )
        }
    ),
    kernels=TINY_KERNELS,
    plan=MappingProxyType(
        {
            "2 x 32": trained(_SMALL, 2, 32),
            "2 x 64, remat none": trained(_SMALL, 2, 64, remat="none"),
            "4 x 64 in 2": trained(_SMALL, 4, 64, accumulation=2),
        }
    ),
    warmup=1,
    steps=2,
    step_seconds=60.0,
    workers=1,
    seconds=300,
    apart=False,
    gpu=False,
    profile=MappingProxyType({"shapes": ((8, 8, 8), (64, 64, 64)), "nbytes": 2**20}),
)
SIZES = MappingProxyType({"full": FULL, "tiny": TINY})


def named(name: str) -> Sizes:
    """Raises ShardlmError for an unknown name."""
    if name not in SIZES:
        raise ShardlmError(f"--sizes={name}: choose from {', '.join(SIZES)}")
    return SIZES[name]
