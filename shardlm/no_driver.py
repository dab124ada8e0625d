"""jax's CUDA plugin where no NVIDIA driver is, as on a laptop that plans for GPUs (the extra `cuda13`). No jax."""

import os

_DEVICES = ("nvidia0", "nvidiactl", "dxg")  # the last is WSL's


def expect_no_driver() -> None:
    """Before jax starts: where no GPU is there the plugin does not look for the versions of libraries that need a
    driver, which it would report by a traceback before it goes on without GPUs."""
    if not any(os.path.exists(f"/dev/{device}") for device in _DEVICES):
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
