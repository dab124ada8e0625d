"""What tests of programs compiled for NVIDIA GPUs without one have in common: the marks for a module (`pytestmark`) or,
by `on_gpus`, for one test."""

import pytest

from shardlm.errors import ShardlmError
from shardlm.topology import topology


def plugin_missing() -> str:
    """Why nothing can be compiled for GPUs here; "" if it can."""
    try:
        topology("h100", 1, 1)
    except ShardlmError as error:
        return str(error)
    return ""


REASON = plugin_missing()
MARKS = [
    pytest.mark.gpu_program,
    pytest.mark.skipif(bool(REASON), reason=REASON or "the plugin is installed"),
    # A program for a GPU that is not there is written to the persistent cache, but cannot be read back from it.
    pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache"),
]


def on_gpus(test):
    """The same marks on one test."""
    for mark in MARKS:
        test = mark(test)
    return test
