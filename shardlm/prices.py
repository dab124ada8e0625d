"""What a GPU-hour costs on demand: list prices of providers, each with the day it was read. No jax.

Prices move by months; these give the order of magnitude. A price of one's own belongs to whoever plans.
"""

import difflib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from shardlm.errors import ShardlmError
from shardlm.hardware import GPUS


@dataclass(frozen=True)
class Price:
    """A list price without commitment, in US dollars for one GPU and hour.

    gpu   a name of hardware.py
    date  the day or month of the source; where it names none, the day it was read
    """

    gpu: str
    provider: str
    offer: str
    dollars_per_hour: float
    date: str
    source: str


@dataclass(frozen=True)
class PriceRange:
    """The lowest, the middle (median) and the highest of the prices of one GPU, and the prices themselves."""

    low: float
    typical: float
    high: float
    prices: tuple[Price, ...]


_RECEIPTS = "https://github.com/datareceipts/data-receipts/blob/main/109-gpu-pricing/"
_CLOUDS = f"{_RECEIPTS}hyperscalers.json"
_RUNPOD = f"{_RECEIPTS}vendors.json"
_RUNPOD_PAGE = "https://www.runpod.io/pricing"
_COREWEAVE = "https://www.coreweave.com/pricing"
_LAMBDA = "https://lambda.ai/instances"
_HYPERSTACK = "https://www.hyperstack.cloud/gpu-pricing"
_NEBIUS = "https://nebius.com/prices"
_NEBIUS_H200 = "https://docs.nebius.com/signup-billing/billing-changes-oct-2025"
_DSTACK = "https://github.com/dstackai/dstack/pull/4110"
_MODAL = "https://modal.com/blog/nvidia-l40s-price-article"
_SURVEY = "https://usagepricing.com/blueprint/billing-units/gpu-hour-pricing"

PRICES: tuple[Price, ...] = (
    Price("a100", "aws", "p4de.24xlarge", 3.4309, "2026-11-09", _CLOUDS),
    Price("a100", "lambda", "8x A100 80GB SXM", 2.79, "2026-09-20", _LAMBDA),
    Price("a100", "runpod", "secure, SXM", 1.79, "2026-11-09", _RUNPOD),
    Price("a100-40gb", "aws", "p4d.24xlarge", 2.7447, "2026-11-09", _CLOUDS),
    Price("a100-40gb", "azure", "ND96asr_A100_v4", 3.3996, "2026-11-09", _CLOUDS),
    Price("a100-40gb", "lambda", "8x A100 40GB SXM", 1.99, "2026-09-20", _LAMBDA),
    Price("a100-pcie", "azure", "NC24ads_A100_v4", 3.673, "2026-11-09", _CLOUDS),
    Price("a100-pcie", "runpod", "secure, PCIe", 1.79, "2026-11-09", _RUNPOD),
    Price("h100", "aws", "p5.48xlarge", 6.88, "2026-11-09", _CLOUDS),
    Price("h100", "azure", "ND96isr_H100_v5", 12.29, "2026-11-09", _CLOUDS),
    Price("h100", "lambda", "8x H100 SXM", 3.99, "2026-09-20", _LAMBDA),
    Price("h100", "nebius", "HGX H100", 3.85, "2026-09-25", _NEBIUS),
    Price("h100", "runpod", "secure, SXM", 3.99, "2026-11-09", _RUNPOD),
    Price("h100", "hyperstack", "SXM", 3.20, "2026-08-26", _HYPERSTACK),
    Price("h100-pcie", "runpod", "secure, PCIe", 2.89, "2026-11-09", _RUNPOD),
    Price("h200", "aws", "p5en.48xlarge", 7.912, "2026-08", _DSTACK),
    Price("h200", "nebius", "gpu-h200-sxm", 3.50, "2025-10-22", _NEBIUS_H200),
    Price("h200", "hyperstack", "SXM", 3.99, "2026-08-26", _HYPERSTACK),
    Price("b200", "lambda", "8x B200 SXM", 6.69, "2026-09-20", _LAMBDA),
    Price("b200", "hyperstack", "SXM", 6.00, "2026-08-26", _HYPERSTACK),
    Price("b200", "runpod", "B200", 5.89, "2026-11-21", _SURVEY),
    Price("b200", "together", "B200", 11.95, "2026-11-21", _SURVEY),
    Price("gb200", "coreweave", "4 of a GB200 NVL72", 10.50, "2026-09-20", _COREWEAVE),
    Price("b300", "hyperstack", "B300", 7.40, "2026-08-26", _HYPERSTACK),
    Price("b300", "runpod", "Pods, B300", 7.89, "2026-10-07", _RUNPOD_PAGE),
    Price("l40s", "aws", "g6e.xlarge", 1.861, "2025-08", _MODAL),
    Price("l40s", "oci", "L40S", 3.50, "2025-08", _MODAL),
    Price("l40s", "runpod", "secure", 0.86, "2025-08", _MODAL),
    Price("l40s", "coreweave", "L40S", 2.25, "2025-08", _MODAL),
    Price("rtx4090", "runpod", "RTX 4090", 0.69, "2026-11-21", _SURVEY),
)


def price_of(gpu: str, prices: Sequence[Price] = PRICES) -> PriceRange:
    """The range of `prices` for a GPU of hardware.py.

    Raises: ShardlmError for a GPU without a price.
    """
    found = tuple(sorted((p for p in prices if p.gpu == gpu), key=lambda p: p.dollars_per_hour))
    if not found:
        priced = tuple(dict.fromkeys(p.gpu for p in prices))
        near = [] if gpu in GPUS else difflib.get_close_matches(gpu, priced, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ShardlmError(
            f"no price of a GPU-hour is known for {gpu!r}{hint} (known: {', '.join(priced)}); give your own price"
        )
    each = [p.dollars_per_hour for p in found]
    return PriceRange(each[0], statistics.median(each), each[-1], found)
