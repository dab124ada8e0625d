"""Chunks of prompts are dealt to programs that do little more work than the chunks are."""

import itertools

import pytest

from shardlm.layers.page_layout import PageLayout
from shardlm.serve.chunk_programs import WHILE_WEIGHTS_ARE_READ, Cuts, dealt, sizes_of
from shardlm.serve.runner_config import RunnerConfig

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


def test_no_program_is_longer_than_the_longest_request():
    def made(longest: int) -> tuple:
        return RunnerConfig(PageLayout.whole(1, 2), 4, 256, 2048, longest, 4).chunk_sizes

    assert made(32) == SIZES[:4] and made(33)[-1][1] == 64
    assert made(1024)[-1] == (2, 1024) and made(1025) == made(4096) == SIZES


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


def cut(cuts: Cuts, tokens: int, prompts: int = 1) -> list[int]:
    """The chunks of a prompt, each with room for a whole batch."""
    found = []
    while sum(found) < tokens:
        found.append(cuts.chunk(tokens - sum(found), 2048, prompts))
    return found


@pytest.mark.parametrize(
    ("platform", "tokens", "prompts", "chunks"),
    [
        ("gpu", 2048, 1, [2048]),
        ("gpu", 1100, 1, [1024, 76]),  # 2,048 tokens' work, or 1,024's and that of the weights
        ("gpu", 1900, 1, [1900]),
        ("gpu", 300, 1, [300]),  # a program of 64 takes as long as one of 256
        ("gpu", 300, 6, [256, 44]),  # which six prompts share
        ("cpu", 300, 1, [256, 44]),
        ("cpu", 20, 1, [20]),
        ("gpu", 5000, 1, [2048, 2048, 904]),
    ],
)
def test_prompts_are_cut_where_programs_end(platform, tokens, prompts, chunks):
    assert cut(Cuts.of(SIZES, platform), tokens, prompts) == chunks


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_cutting_is_never_more_work(platform):
    cuts, least = Cuts.of(SIZES, platform), WHILE_WEIGHTS_ARE_READ[platform]

    def work(chunks):
        programs = (min(n for _, n in SIZES if n >= count) for count in chunks)
        return sum(max(tokens, least) for tokens in programs)

    saved = [1 - work(cut(cuts, tokens)) / work([tokens]) for tokens in range(1, 2049)]
    assert min(saved) == 0 and sum(saved) / len(saved) > 0.1


def test_little_room_waits_for_more():
    """A prompt that is not read to its end has more of it in the next batch, where it costs no program of its own."""
    cuts = Cuts.of(SIZES, "gpu")
    assert cuts.chunk(2048, 2000) == 1024 and cuts.chunk(4000, 2047) == 2047
    assert [cuts.chunk(1500, room, beside=True) for room in (0, 255, 256)] == [0, 0, 256]
    assert cuts.chunk(70, 72, beside=True) == 70 and cuts.chunk(1500, 255) == 255
    assert Cuts().chunk(1500, 1499) == 1499 and Cuts().chunk(1500, 1, beside=True) == 1 and Cuts().chunk(9, 0) == 0
