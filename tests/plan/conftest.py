"""What several tests of the planner read."""

import pytest

from shardlm.plan.published import load
from shardlm.plan.validate import POINTS


@pytest.fixture(scope="session")
def published():
    """All published measurements (benchmarks/published.json)."""
    return load(POINTS)
