"""The host's memory, of which XLA on GPUs has a pool for arrays that rest there. No jax."""

import hashlib
import math
import os
import pathlib
import socket

POOL = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
OWN = 64  # what XLA's pool ends at unless told, for all GPUs of a process together
# Of a container: control groups of the second version and of the first. "max" and a huge number are none.
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
BOOT = "/proc/sys/kernel/random/boot_id"


def host_gib() -> float:
    """That this machine has, or a container on it may take."""
    nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(nbytes, *(_limit(path) for path in LIMITS)) / 2**30


def whose_memory() -> int:
    """A number below 2**63 of the memory that `host_gib` is of, which processes that share it have in common: of the
    machine's run and, where a container's limit is what there is, of that."""
    named = pathlib.Path(BOOT).read_text() if os.path.exists(BOOT) else socket.gethostname()
    least = min(LIMITS, key=_limit)
    if _limit(least) / 2**30 <= host_gib():
        named += f" {os.stat(least).st_ino}"
    return int.from_bytes(hashlib.blake2b(named.encode(), digest_size=8).digest()) >> 1


def _limit(path: str) -> float:
    try:
        said = pathlib.Path(path).read_text().strip()
    except OSError:
        return math.inf
    return int(said) if said.isdigit() else math.inf


def use_host_memory(gib: float = math.inf) -> None:
    """Lets XLA's pool hold arrays of so many GiB besides what passes through it, if the host has them, unless the
    environment says how much; before jax's backend starts. The pool grows by regions, each as large as all before it,
    and keeps them: one that may have all of the host would pin up to twice what it is asked for."""
    most = min(host_gib(), max(OWN, 1.1 * gib + 16))
    os.environ.setdefault(POOL, str(max(1, int(most))))
