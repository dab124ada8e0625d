"""Room for what layers of linear attention remember, beside pages."""

import pytest

from shardlm.errors import ShardlmError
from shardlm.serve.memories import left_beside, rows_beside, snapshots_beside

GIB = 2**30


def test_as_many_requests_as_leave_half_of_the_room():
    assert rows_beside([0], [GIB], 256) == 256
    assert rows_beside([GIB // 20], [GIB], 256) == 9  # and one that padding has
    assert rows_beside([0, GIB // 20], [GIB, 4 * GIB], 256) == 39  # the first stage has no such layer
    with pytest.raises(ShardlmError, match=r"takes 0.50 GiB, and 1.00 GiB are free"):
        rows_beside([GIB // 2], [GIB], 256)


def test_copies_by_which_prefixes_are_cached(caplog):
    assert snapshots_beside([0], 8, [GIB], 4096) == 0
    assert snapshots_beside([GIB // 100], 19, [GIB], 4096) == 16  # a fifth of 0.8 GiB
    assert snapshots_beside([0, GIB // 100], 19, [GIB, 2 * GIB], 4096) == 36  # the first stage has no such layer
    assert snapshots_beside([GIB // 100_000], 3, [GIB], 1100) == 6  # two of a text, more would be of no use
    assert snapshots_beside([GIB // 100], 19, [GIB], 511) == 0 and not caplog.text
    caplog.set_level("INFO")
    assert snapshots_beside([GIB // 10], 7, [GIB], 4096) == 0 and "prefix caching is off" in caplog.text


def test_what_is_left_to_pages():
    assert left_beside([0], 8, [GIB]) == [GIB]
    assert left_beside([GIB // 16], 7, [GIB, 2 * GIB]) == [GIB // 2, 3 * GIB // 2]  # two replicas of a stage
    with pytest.raises(ShardlmError, match=r"max_num_seqs=15: .* take 1.00 GiB of the 1.00 .* lower it"):
        left_beside([GIB // 16], 15, [GIB])
