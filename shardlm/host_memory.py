"""The host's memory, of which XLA on GPUs has a pool for arrays that rest there. No jax."""

import os

POOL = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"


def host_gib() -> float:
    """That this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def use_host_memory() -> None:
    """Lets XLA have all of it, unless the environment says how much; before jax's backend starts. The pool takes what
    it is asked for, and by default ends at 64 GB, for all GPUs of a process together."""
    os.environ.setdefault(POOL, str(int(host_gib())))
