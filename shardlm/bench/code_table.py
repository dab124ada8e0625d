"""The part `code`: what becomes of the kernels that this project has written, on the GPU at hand or else on an H100,
without running them (machine_code.py)."""

from collections.abc import Iterator
from typing import Any

import jax

from shardlm.bench import machine_code
from shardlm.bench.case import Given
from shardlm.bench.kernels import kernel_of
from shardlm.bench.sizes import named
from shardlm.errors import ShardlmError
from shardlm.topology import topology

OWN = (
    *("paged_attention", "paged_attention_merge", "few_bits_matmul", "few_bits_experts"),
    *("few_rows", "few_rows_gated"),
    *("chunk_states", "delta_step", "delta_drafts"),
)
NO_PTXAS = "registers are not known without ptxas: pip install nvidia-cuda-nvcc"


def measure(name: str, given: Given) -> Iterator[dict[str, Any]]:
    """A row for each kernel of ours at each shape of a family; what does not compile is its row's `error`. Where
    nothing can be compiled for that GPU, one row that says why."""
    device = jax.devices()[0]
    gpu = device.device_kind if device.platform == "gpu" else "h100"
    try:
        topology(gpu, 1, 1)
    except ShardlmError as error:
        yield {"name": name, "not_compared": str(error)}
        return
    key = jax.eval_shape(lambda: jax.random.key(0))
    for shape, what in given.left(name, named(given.sizes).kernels[name]):
        kernel = kernel_of(what, True)
        inputs = lambda kernel=kernel: jax.eval_shape(kernel.inputs, key)  # noqa: E731
        try:
            for code in machine_code.kernels(kernel.run, inputs, gpu):
                if code.name.split("__")[0] in OWN:  # the second of a name is name__1
                    yield {"name": shape, **_row(code, gpu)}
        except Exception as error:  # of the compiler: the other shapes are still wanted
            yield {"name": shape, "error": f"{type(error).__name__}: {error}"[:2000]}


def _row(code: machine_code.Code, gpu: str) -> dict[str, Any]:
    return {
        "kernel": code.name,
        "gpu": gpu,
        "grid": list(code.grid),
        "threads": code.threads,
        "shared_bytes": code.shared_bytes,
        "registers": code.registers,
        "spilled_bytes": code.spilled,
        "blocks_fit": code.blocks(gpu),
        "blocks_each": code.filled(gpu),
        "loop": dict(code.loop),
        "source": code.source,
        **({} if code.registers is not None else {"not_compared": NO_PTXAS}),
    }
