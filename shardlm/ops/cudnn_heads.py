"""Which head sizes cuDNN's attention takes on which GPU, and the GPU that jax asks about while a program is traced. The
kernels are called in attention.py and attention_pair.py."""

import contextlib
from collections.abc import Iterator
from typing import Protocol

from jax._src.cudnn import fused_attention_stablehlo

LATENT = (192, 128)  # sizes of queries and of values for which there is a kernel: DeepSeek V3's


class Gpu(Protocol):
    """A jax.Device, or what describes one."""

    platform: str


def capability(device: Gpu) -> tuple[int, int]:
    """Compute capability of a device; (0, 0) of one that is not NVIDIA's."""
    major, _, minor = str(getattr(device, "compute_capability", None) or "0.0").partition(".")
    return int(major), int(minor or 0)


def takes(device: Gpu, head_dim: int, value_dim: int, trained: bool = True) -> bool:
    """Whether cuDNN attends on this GPU with such heads, and makes gradients where they are `trained`.

    Backwards 256 on Hopper; elsewhere 128, and on the B200's generation 192 too if values are 128 wide. Forwards alone
    Blackwell takes 256 as well, and so would older GPUs, which jax does not let (cudnn_frontend 1.24,
    scaled_dot_product_flash_attention.h, pre_validate_node; jax.nn.dot_product_attention).
    """
    major, _ = capability(device)
    if head_dim % 8 or value_dim % 8:
        return False
    widest = 256 if major == 9 or (major > 9 and not trained) else 128
    return max(head_dim, value_dim) <= widest or (major == 10 and (head_dim, value_dim) == LATENT)


@contextlib.contextmanager
def traced_for(device: Gpu) -> Iterator[None]:
    """While tracing, jax's checks of cuDNN's attention ask this device and not the GPUs of this process, of which there
    may be none (topology.py). Raises AttributeError where jax has no such checks any more."""
    module = fused_attention_stablehlo
    least, equal = module.check_compute_capability, module.is_cuda_compute_capability_equal
    module.check_compute_capability = lambda wanted: capability(device) >= _numbers(wanted)
    module.is_cuda_compute_capability_equal = lambda wanted: capability(device) == _numbers(wanted)
    try:
        yield
    finally:
        module.check_compute_capability, module.is_cuda_compute_capability_equal = least, equal


def traced_is(*capabilities: str) -> bool:
    """Whether the GPU that is traced for has one of these compute capabilities, as "9.0"."""
    return any(map(fused_attention_stablehlo.is_cuda_compute_capability_equal, capabilities))


def _numbers(wanted: str) -> tuple[int, ...]:
    return tuple(map(int, wanted.split(".")))
