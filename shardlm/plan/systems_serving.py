"""What other serving engines do that ours does not, as their sources say: how many requests they run and how many
tokens a step has, 8 and 4-bit products, keys and values that heads share. Rules for all their tables alike."""

import dataclasses
import math
from collections.abc import Callable, Iterator

from shardlm.hardware import Gpu
from shardlm.plan.op import Op
from shardlm.plan.published import Model
from shardlm.plan.published_serving import Setting, Table
from shardlm.plan.serving.ops import SAMPLER_PASSES, SAMPLING_KERNELS

# Bytes of a number and what it is multiplied in. NVFP4: 4 bits, and 8 for the scale of 16
# (https://developer.nvidia.com/blog/introducing-nvfp4-for-efficient-and-accurate-low-precision-inference).
BYTES = {"dtype": 2.0, "fp8": 1.0, "fp4": 0.5 + 1 / 16}
# Of a GPU, what CUDA's context, NCCL and cuBLAS keep for themselves: an estimate, as 0.05 of jax's is (ALLOCATED).
KEPT = 2.5e9
# Greedy sampling reads the logits once; ours has further passes (ops.SAMPLER_PASSES).
GREEDY_KERNELS = 2
TENSORRT, NIM, LMDEPLOY, VLLM, SGLANG = "TensorRT-LLM", "NIM", "LMDeploy", "vLLM", "SGLang"


@dataclasses.dataclass(frozen=True)
class Limits:
    """slots  requests at once
    room      tokens of a step
    chunked   whether a prompt may be read in several
    """

    slots: int
    room: int
    chunked: bool


@dataclasses.dataclass(frozen=True)
class Held:
    """On one device: bytes of weights, and of a position of a request."""

    weights: float
    position: float


def limits(setting: Setting, gpu: Gpu, model: Model, held: Held) -> Limits:
    """As the engine finds them itself, or is told to in the source: each request has pages for all of its length."""
    table, length = setting.table, setting.prompt + setting.output

    def fits(share: float, of_free: bool, room: int, rows: int) -> float:
        """Requests that pages hold, of a share of what is free, or of all less what is used."""
        used = held.weights + KEPT + _activations(model, table, room, rows)
        free = share * (gpu.hbm_bytes - used) if of_free else share * gpu.hbm_bytes - used
        return free / held.position / length

    engine = table.engine
    if engine == TENSORRT and table.load == "all at once" and not _serves(table):
        return _bench_limits(setting, fits)
    if engine == VLLM:
        # UsageContext.OPENAI_API_SERVER's defaults, by the GPU (vllm/engine/arg_utils.py, get_batch_defaults, v0.11.0).
        rows, room = (256, 2048) if table.gpu.startswith("a100") else (1024, 8192)
        return Limits(_whole(fits(0.9, False, room, rows), rows), room, True)
    if engine == SGLANG:
        # mem_fraction_static and chunked_prefill_size of GPUs of 60 to 90 GB (srt/server_args.py, v0.5.5).
        return Limits(_whole(fits(0.88, False, 8192, 512), 4096), 8192, True)
    # trtllm-serve's max_batch_size, max_num_tokens and kv_cache_free_gpu_memory_fraction, which NIM and LMDeploy are
    # taken to have; with --enable_chunked_prefill where the source has it.
    return Limits(_whole(fits(0.9, True, 8192, 512), 2048), 8192, _serves(table))


def _bench_limits(setting: Setting, fits: Callable[[float, bool, int, int], float]) -> Limits:
    """trtllm-bench's own, from how many requests the pages hold
    (https://github.com/NVIDIA/TensorRT-LLM/blob/04cba882/tensorrt_llm/bench/build/tuning.py): of 0.90 of what is free,
    of 0.95 "in many cases" since 1.0 (perf-overview.md)."""
    share = 0.9 if setting.table.version == "0.14" else 0.95
    most = fits(share, True, 8192, 1024)
    rows = min(most, 4096)
    room = min(rows * (1 + setting.prompt / setting.output), 32768)
    if rows < 256:
        slots = max(64, 32 * math.ceil(rows / 32))
    else:
        step = 128 if rows < 1024 else 256
        slots = step * math.ceil(rows / step)
    step = 256 if room < 4096 else 512 if room < 8192 else 1024
    return Limits(_whole(most, slots), max(2048, step * math.ceil(room / step)), False)


def _whole(fits: float, most: int) -> int:
    return max(1, min(int(fits), most))


def _serves(table: Table) -> bool:
    """Whether TensorRT-LLM is asked over HTTP, by trtllm-serve."""
    return table.engine == TENSORRT and table.version.startswith("1.2.0")


def _activations(model: Model, table: Table, room: int, rows: int) -> float:
    """Bytes of a step's: the stream and an MLP's inputs in 16 bits, logits in 32."""
    width = 3 * model.embed_dim + 2 * (model.mlp_dim or 0) / table.mesh.tensor
    return 2 * room * width + 4 * rows * model.vocab_size


def shares_keys(table: Table) -> bool:
    """Whether heads that have their keys and values in common read them together. TensorRT-LLM's do from 0.8 on, by XQA
    (https://github.com/NVIDIA/TensorRT-LLM/blob/585c7565/docs/source/blogs/XQA-kernel.md: Llama 2 70B on an H200 1,227
    to 2,941 tokens/s)."""
    return not (table.engine == TENSORRT and table.version in ("0.5", "0.6.1"))


def as_run(table: Table) -> Callable[[Op], Iterator[Op]]:
    """What it runs for an operation of ours with weights that are held in as many bytes: products in few bits, with a
    pass that casts their inputs, which is written to memory in as many; and greedy sampling."""
    dtype = table.weights

    def run(op: Op) -> Iterator[Op]:
        if op.what == "sampling":
            times = op.count / SAMPLING_KERNELS
            logits = op.hbm_bytes * SAMPLING_KERNELS / SAMPLER_PASSES
            yield dataclasses.replace(op, hbm_bytes=logits / GREEDY_KERNELS, count=GREEDY_KERNELS * times)
        elif op.unit != "matmul" or op.layer == "head" or dtype == "dtype":
            yield op
        else:
            _, n, k = op.dims
            inputs = op.flops / (2 * n * k) * k
            saved = (2 - BYTES[dtype]) * inputs
            yield dataclasses.replace(
                op, what=f"{op.what}: cast", unit="memory", flops=0, hbm_bytes=(2 + BYTES[dtype]) * inputs
            )
            yield dataclasses.replace(op, hbm_bytes=op.hbm_bytes - saved, dtype=dtype)

    return run
