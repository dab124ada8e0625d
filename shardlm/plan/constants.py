"""What rates are worth in practice: the few constants of the cost model, a GPU generation or a kind of link each, with
their sources. Peaks are hardware.py's."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType


@dataclasses.dataclass(frozen=True)
class Achieved:
    """Fractions of a GPU's peaks that kernels reach.

    matmul, matmul_fp8  of large matrix products
    attention           of cuDNN's or FlashAttention's kernels, against the 16-bit peak
    memory              of a kernel that only moves memory
    kernel_seconds      the least that a kernel takes
    """

    matmul: float
    matmul_fp8: float
    attention: float
    memory: float
    kernel_seconds: float


@dataclasses.dataclass(frozen=True)
class LinkAchieved:
    """bandwidth  fraction of the peak that large collectives reach
    seconds    of one hop"""

    bandwidth: float
    seconds: float


ACHIEVED: Mapping[str, Achieved] = MappingProxyType(
    {
        "ampere": Achieved(0.85, 0.85, 0.62, 0.85, 4e-6),
        "ada": Achieved(0.85, 0.75, 0.60, 0.85, 4e-6),
        "hopper": Achieved(0.72, 0.60, 0.50, 0.88, 4e-6),
        "blackwell": Achieved(0.72, 0.60, 0.50, 0.88, 4e-6),
    }
)
INSIDE = LinkAchieved(0.80, 3e-6)
NETWORK = LinkAchieved(0.85, 12e-6)
