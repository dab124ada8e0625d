"""Prompts whose tokens see those after them: how they are cut, what they share, and which are refused."""

import numpy as np
import pytest

from shardlm.errors import ShardlmError
from shardlm.serve.blocks import whole_blocks
from shardlm.serve.page_table import PageTable
from shardlm.serve.request import Request
from shardlm.serve.sampling_params import SamplingParams
from shardlm.serve.scheduler import Scheduler, SchedulerConfig
from shardlm.vision.picture import Picture, Placed


def request(prompt, sees, digest: bytes = b"a", **params) -> Request:
    """With an image of three tokens behind the first."""
    placed = Placed(Picture({}, (1, 3), digest), 1, 4, np.arange(1, 4, dtype=np.int32))
    return Request("one", prompt, SamplingParams(max_tokens=2, **params), pictures=(placed,), sees=sees)


PROMPT = [1, 5, 5, 5, 7, 8, 9, 6]


@pytest.mark.parametrize(
    "sees, computed, count, room, expected",
    [
        ("before", 0, 2, 2, 2),
        ("images", 0, 2, 4, 4),
        ("images", 0, 2, 3, 1),  # there is no room for the image
        ("images", 0, 4, 4, 4),
        ("images", 1, 2, 2, 0),
        ("images", 4, 2, 2, 2),
        ("prompt", 0, 2, 8, 8),
        ("prompt", 0, 2, 7, 0),
        ("prompt", 4, 2, 4, 4),  # of which the first are in pages
        ("prompt", 0, 9, 9, 9),  # anew after a preemption, a token of the reply with it
    ],
)
def test_no_chunk_ends_among_them(sees, computed, count, room, expected):
    one = request(PROMPT, sees)
    one.computed = computed
    assert whole_blocks(one, count, room) == expected


def test_a_prompt_that_sees_itself_shares_with_equal_ones_alone():
    salt = request(PROMPT, "prompt").salt
    assert salt == request(PROMPT, "prompt").salt
    others = [request([*PROMPT, 4], "prompt"), request(PROMPT, "prompt", b"b"), request(PROMPT, "images")]
    assert salt not in {one.salt for one in others}
    assert request(PROMPT, "images").salt == request([*PROMPT, 4], "before").salt == ""


def test_which_are_refused():
    scheduler = Scheduler(SchedulerConfig(2, 9, 16, (1,)), PageTable(32, 2))
    with pytest.raises(ShardlmError, match=r"8 tokens that see each other .* has room for 7; raise the first by 1"):
        scheduler.add(request(PROMPT, "prompt"))
    scheduler.add(request(PROMPT, "images"))
    windowed = Scheduler(SchedulerConfig(2, 16, 16, (1,)), PageTable(32, 2, windows=(0, 4)))
    with pytest.raises(ShardlmError, match=r"8 tokens, which all see each other .* a window of 4"):
        windowed.add(request(PROMPT, "prompt"))
    windowed.add(request(PROMPT, "images"))
    cut = request(PROMPT, "prompt", truncate_prompt_tokens=4)
    assert cut.blocks == ((0, 3),)
