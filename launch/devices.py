"""Prepares jax before its first use: virtual CPU devices and the memory allocator under them."""

import ctypes
import ctypes.util

import jax

from shardlm.errors import ShardlmError
from shardlm.run_files import find_run


def use_cpu_devices(count: int) -> None:
    """Makes `count` virtual CPU devices the only ones; 0 leaves jax's own choice.

    Raises ShardlmError for a negative count.
    """
    if count < 0:
        raise ShardlmError(f"cpu_devices={count}: give the number of virtual CPU devices, or 0 for the real ones")
    if count:
        keep_heap()
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)


def prepare_for(checkpoint: str, count: int, processes: int = 1) -> None:
    """Devices to open a checkpoint on: virtual CPU ones where it is a run that trained on such, else the real ones (of
    a host without accelerators, as many CPU devices as are needed); `count` of all processes, each of which has its
    share. Raises ShardlmError where they have none."""
    if count % processes:
        raise ShardlmError(f"a mesh of {count} devices over {processes} processes; choose sizes that divide")
    count //= processes
    from shardlm.opened import find, is_run

    folder = find(checkpoint)
    if is_run(folder) and find_run(folder).config_json["cpu_devices"]:
        use_cpu_devices(count)
    else:
        jax.config.update("jax_num_cpu_devices", count)


def keep_heap() -> None:
    """Tells glibc to keep freed memory. XLA:CPU takes its temporary buffers from malloc at every step, and without this
    each is mapped anew: 400,000 page faults a step of 768 x 12 layers, a quarter of its time. No effect where the C
    library is not glibc. Must come before jax's backend starts."""
    libc = ctypes.util.find_library("c")
    mallopt = libc and getattr(ctypes.CDLL(libc), "mallopt", None)
    if mallopt:
        M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8
        for option, value in ((M_ARENA_MAX, 1), (M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1)):
            mallopt(option, value)
