"""Prices of GPU-hours."""

import re

import pytest

from shardlm.errors import ShardlmError
from shardlm.hardware import GPUS
from shardlm.prices import PRICES, Price, price_of


def test_every_price_is_of_a_known_gpu_dated_plausible_and_has_a_source():
    for price in PRICES:
        assert price.gpu in GPUS
        assert re.fullmatch(r"20\d\d(-\d\d){0,2}", price.date)
        assert 0.1 < price.dollars_per_hour < 20
        assert price.source.startswith("https://")
    assert len({(p.gpu, p.provider, p.offer) for p in PRICES}) == len(PRICES)
    assert {"a100", "a100-40gb", "h100", "h100-pcie", "h200", "b200", "gb200", "b300", "l40s"} <= {
        p.gpu for p in PRICES
    }


def test_the_range_of_a_gpu():
    ours = [Price("h100", f"p{i}", "x", dollars, "2026-01", "https://x") for i, dollars in enumerate((5.0, 2.0, 3.0))]
    found = price_of("h100", [*ours, Price("b200", "p", "x", 9.0, "2026-01", "https://x")])
    assert (found.low, found.typical, found.high) == (2.0, 3.0, 5.0)
    assert [p.provider for p in found.prices] == ["p1", "p2", "p0"]
    assert price_of("h100").low < price_of("b200").low < price_of("h100").high


@pytest.mark.parametrize(
    ("gpu", "says"), [("h10", "did you mean h100?"), ("gb300", "'gb300' (known: "), ("rtx5090", "your own price")]
)
def test_a_gpu_without_a_price_is_refused(gpu, says):
    with pytest.raises(ShardlmError, match=re.escape(says)):
        price_of(gpu)
