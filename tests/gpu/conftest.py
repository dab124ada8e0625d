"""Tests that need an NVIDIA GPU, and run elsewhere only to see that they run (SHARDLM_GPU_TESTS_ON_CPU=1):

JAX_PLATFORMS=cuda,cpu python -m pytest -m gpu -n 0 tests/gpu
"""

import jax
import pytest
from rehearsal import ON_CPU, why_not


def pytest_collection_modifyitems(items):
    """Every test of this folder needs a GPU."""
    here = [item for item in items if item.path.parent.name == "gpu"]
    reason = why_not() if here else ""
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def gpu() -> jax.Device:
    """What is tested; in a rehearsal a CPU."""
    return jax.devices("cpu")[0] if ON_CPU else jax.devices("gpu")[0]


@pytest.fixture(scope="session")
def cpu() -> jax.Device:
    """What it is held to."""
    return jax.devices("cpu")[-1]
