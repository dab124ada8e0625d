"""Chunks of prompts are dealt to programs that do little more work than the chunks are."""

import itertools

import pytest

from shardlm.serve.chunk_programs import WHILE_WEIGHTS_ARE_READ, dealt, sizes_of

SIZES = sizes_of(2048, 256)


def test_there_are_programs_of_few_and_of_many_rows():
    assert SIZES[:4] == ((1, 32), (4, 32), (16, 32), (64, 32)) and SIZES[-3:] == ((1, 1024), (2, 1024), (1, 2048))
    assert len(SIZES) == 19 and sizes_of(512, 2) == (
        *((1, 32), (2, 32), (1, 64), (2, 64), (1, 128), (2, 128)),
        *((1, 256), (2, 256), (1, 512)),
    )
    assert sizes_of(20, 3) == ((1, 20),)
    for rows, tokens in SIZES:
        assert rows * tokens <= 2048


@pytest.mark.parametrize(
    ("platform", "lengths", "programs"),
    [
        ("gpu", [128, 100], [((4, 128), 2)]),  # as much as the weights take, twice
        ("gpu", [128] * 5, [((1, 128), 1), ((4, 128), 4)]),
        ("gpu", [128] * 16, [((16, 128), 16)]),
        ("cpu", [128, 100], [((1, 128), 1), ((1, 128), 1)]),
        ("gpu", [100, 700, 100, 33, 20], [((1, 128), 1), ((1, 1024), 1), ((1, 128), 1), ((1, 64), 1), ((1, 32), 1)]),
        ("gpu", [], []),
    ],
)
def test_chunks_go_together_where_that_is_less_work(platform, lengths, programs):
    assert dealt(lengths, SIZES, platform) == programs


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_no_cut_into_programs_is_less_work(platform):
    def work(programs, tokens):
        return sum(max(n * tokens, WHILE_WEIGHTS_ARE_READ[platform]) for n in programs)

    for count, tokens in itertools.product(range(1, 20), (32, 128, 512)):
        rows = [size[0] for size in SIZES if size[1] == tokens]
        found = dealt([tokens] * count, SIZES, platform)
        assert sum(chunks for _, chunks in found) == count and all(n <= size[0] for size, n in found)
        cuts = (cut for many in range(1, 5) for cut in itertools.combinations_with_replacement(rows, many))
        least = min((work(cut, tokens) for cut in cuts if sum(cut) >= count), default=float("inf"))
        assert work([size[0] for size, _ in found], tokens) <= least
