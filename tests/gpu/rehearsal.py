"""Whether tests/gpu runs here: on a GPU, or on a CPU to see that the tests run (SHARDLM_GPU_TESTS_ON_CPU=1)."""

import os

import jax

ON_CPU = bool(os.environ.get("SHARDLM_GPU_TESTS_ON_CPU"))


def why_not() -> str:
    """Why nothing runs on a GPU here; "" if it does."""
    if ON_CPU or jax.default_backend() == "gpu":
        return ""
    return f"needs an NVIDIA GPU and JAX_PLATFORMS=cuda,cpu; jax's backend here is {jax.default_backend()}"
