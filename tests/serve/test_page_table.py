"""Pages: given once, shared by hash, forgotten last used first, never lost."""

from array import array

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from shardlm.errors import ShardlmError
from shardlm.serve.page_table import PageTable, extend_hashes


def hashes_of(tokens, page_size=4, salt=""):
    hashes: list[bytes] = []
    extend_hashes(hashes, array("i", tokens), len(tokens), page_size, salt)
    return hashes


def filled(table: PageTable, owner: str, tokens) -> list[int]:
    """Pages of a new owner whose tokens have all been scheduled."""
    hashes = hashes_of(tokens, table.page_size)
    assert table.allocate(owner, len(tokens), hashes) is not None
    table.register(owner, hashes, len(tokens))
    return list(table.pages(owner))


def test_a_hash_stands_for_the_whole_prefix_and_the_salt():
    a = hashes_of(range(10))
    assert len(a) == 2  # the third page is not full
    assert hashes_of(range(8)) == a and hashes_of(range(8), salt="x")[0] != a[0]
    other = hashes_of([9, *range(1, 8)])
    assert other[0] != a[0] and other[1] != a[1]  # the second pages hold the same tokens
    grown = hashes_of(range(5))
    extend_hashes(grown, array("i", range(10)), 10, 4)
    assert grown == a


def test_equal_prefixes_share_their_full_pages():
    table = PageTable(12, 4)
    a = filled(table, "a", range(10))
    assert table.allocate("b", 10, hashes_of(range(10))) == 8
    b = list(table.pages("b"))
    assert b[:2] == a[:2] and b[2] != a[2] and table.num_used == 4
    assert table.allocate("c", 8, hashes_of([5, *range(1, 8)])) == 0
    assert (table.statistics.queried, table.statistics.found) == (28, 8)
    table.free("a")
    assert table.num_used == 5  # the shared ones are still held by b
    table.check_invariants()
    for owner in "bc":
        table.free(owner)
    assert table.num_used == 0 and table.num_free == 11


def test_the_page_used_longest_ago_is_evicted_and_the_end_of_a_prefix_before_its_start():
    table = PageTable(7, 4)
    filled(table, "old", range(8))
    filled(table, "new", range(100, 108))
    table.free("old")
    table.free("new")
    assert table.allocate("x", 12) == 0  # two pages were free: one is evicted
    assert table.statistics.evictions == 1
    assert table.find(hashes_of(range(8))) == 1 and table.find(hashes_of(range(100, 108))) == 2
    table.check_invariants()


def test_a_lack_of_pages_changes_nothing():
    table = PageTable(4, 4)
    assert table.allocate("a", 9) == 0
    assert table.allocate("b", 1) is None and not table.append("a", 13) and table.append("a", 12)
    table.check_invariants()
    with pytest.raises(KeyError):
        table.pages("b")
    with pytest.raises(ValueError, match="'a' has pages already; append to them"):
        table.allocate("a", 1)
    table.free("a")
    assert table.num_free == 3


def test_what_cached_pages_count_for():
    """A cached page that nobody holds is free to be given away, and gone when it is shared."""
    table = PageTable(5, 4)
    filled(table, "a", range(8))
    hashes = hashes_of(range(8))
    assert table.missing(16, hashes) == 2  # held by a
    table.free("a")
    assert table.missing(16, hashes) == 4 == table.num_free
    assert table.allocate("b", 16, hashes) == 8 and table.num_free == 0


def test_equal_pages_written_twice_stay_with_their_owners():
    table = PageTable(9, 4)
    hashes = hashes_of(range(8))
    assert table.allocate("a", 8, hashes) == table.allocate("b", 8, hashes) == 0
    table.register("a", hashes, 4)
    table.register("b", hashes, 8)  # its first page is a's twin, its second one the first of its kind
    table.check_invariants()
    table.free("b")
    assert table.allocate("c", 8, hashes) == 8
    table.check_invariants()


def test_forgetting_and_doing_without_a_cache():
    table = PageTable(9, 4)
    filled(table, "a", range(8))
    with pytest.raises(ValueError, match="1 owners hold pages; free them first"):
        table.forget()
    table.free("a")
    table.forget()
    assert table.find(hashes_of(range(8))) == 0 and table.num_free == 8
    table.check_invariants()
    plain = PageTable(9, 4, caching=False)
    filled(plain, "a", range(8))
    assert plain.find(hashes_of(range(8))) == 0
    for num_pages, page_size in ((1, 4), (4, 0)):
        with pytest.raises(ShardlmError, match=f"a pool of {num_pages} pages of {page_size} tokens holds nothing"):
            PageTable(num_pages, page_size)


def test_a_window_gives_back_what_no_token_to_come_sees():
    """Pages of 4 in two groups, the second with a window of 6: the token at 13 sees positions 8 to 13."""
    table = PageTable(20, 4, windows=(0, 6), longest_step=4)
    tokens = list(range(16))
    hashes = hashes_of(tokens)
    assert table.groups.most(16) == 4 + 4 and table.groups.most(40) == 10 + 4
    assert table.allocate("a", 16, hashes) == 0
    assert len(table.pages("a", 0)) == 4 and len(table.pages("a", 1)) == 3  # of 6 + 4 tokens
    assert table.lacking("a", 16) == 1 and table.append("a", 16)
    table.register("a", hashes, 16)
    assert not table.drops("a", 8) and table.drops("a", 9)
    table.drop("a", 13)
    assert table.pages("a", 1)[:2] == [0, 0] and table.num_held("a") == table.num_used == 6
    table.check_invariants()
    # Four pages are there of both groups; of a shorter beginning the window's pages are cached as well.
    assert table.find(hashes) == 4 and table.missing(20, hashes) == 2
    assert table.allocate("b", 20, hashes) == 16 and table.pages("b", 1)[:2] == [0, 0]
    assert list(table.pages("b", 1)[2:4]) == list(table.pages("a", 1)[2:4])
    assert table.find(hashes[:2]) == 2
    table.check_invariants()
    # Whoever takes all free pages takes those: then the first two pages are no longer a beginning, all four are.
    assert table.allocate("c", 32) == 0 and table.num_free == 0 and table.statistics.evictions == 2
    assert table.find(hashes[:2]) == table.find(hashes[:3]) == 0 and table.find(hashes) == 4
    for owner in "abc":
        table.free(owner)
    table.check_invariants()
    assert table.num_used == 0


def test_pages_of_entries_are_found_with_those_of_tokens():
    """Entries of 2 tokens, 4 a page: pages of tokens go two by two."""
    table = PageTable(20, 4, windows=(6, 0), strides=(1, 2), longest_step=24)
    hashes = hashes_of(range(24))
    assert table.groups.most(24) == 6 + 3 and table.allocate("a", 20, hashes[:5]) == 0
    assert len(table.pages("a", 0)) == 5 and len(table.pages("a", 1)) == 3
    assert table.append("a", 24)
    table.register("a", hashes, 20)  # five pages of tokens, two of entries
    table.check_invariants()
    assert table.find(hashes) == table.find(hashes[:5]) == 4 and table.find(hashes[:3]) == 2
    table.drop("a", 20)
    assert table.allocate("b", 24, hashes[:5]) == 16
    assert list(table.pages("b", 1)[:2]) == list(table.pages("a", 1)[:2])
    table.check_invariants()


# Of each group its window and how many tokens a place stands for.
GROUPS = (((0, 1),), ((0, 1),), ((3, 1),), ((0, 1), (4, 1)), ((0, 1), (1, 1), (5, 1)))
GROUPS += (((4, 1), (0, 2)), ((2, 1), (5, 1), (0, 3)))
KINDS = st.sampled_from(("allocate", "allocate", "append", "drop", "free"))
ACTIONS = st.lists(st.tuples(KINDS, st.integers(0, 4), st.lists(st.integers(0, 1), max_size=9)), max_size=40)


@settings(max_examples=200, deadline=None)
@given(
    num_pages=st.integers(2, 20),
    page_size=st.integers(1, 3),
    groups=st.sampled_from(GROUPS),
    actions=ACTIONS,
)
def test_pages_hold_what_their_owners_wrote(num_pages, page_size, groups, actions):
    """Owners of random binary sequences; each knows what its pages must hold, and nobody's pages are written but by
    their one owner. A page that was found must hold what the tokens after it see."""
    windows, strides = zip(*groups, strict=True)
    table, tokens = PageTable(num_pages, page_size, windows=windows, strides=strides, longest_step=9), {}
    contents: dict[int, tuple] = {}  # page -> its group, and the prefix that ends with its last token
    for action, owner, new in actions:
        if action == "free" and owner in tokens:
            table.free(owner)
            del tokens[owner]
        elif action == "allocate" and owner not in tokens and new:
            hashes = hashes_of(new, page_size)
            free, missing = table.num_free, table.missing(len(new), hashes)
            found = table.allocate(owner, len(new), hashes)
            assert (found is None) == (missing > free)
            if found is not None:
                assert table.num_free == free - missing
                tokens[owner] = list(new)
                write(table, owner, tokens[owner], found, contents)
        elif action == "append" and owner in tokens:
            table.drop(owner, len(tokens[owner]))
            free, lacking = table.num_free, table.lacking(owner, len(tokens[owner]) + len(new))
            assert table.append(owner, len(tokens[owner]) + len(new)) == (lacking <= free)
            if lacking <= free:
                assert table.num_free == free - lacking
                start = len(tokens[owner])
                tokens[owner] += new
                write(table, owner, tokens[owner], start, contents)
        elif action == "drop" and owner in tokens:
            held, would = table.num_held(owner), table.drops(owner, len(tokens[owner]))
            table.drop(owner, len(tokens[owner]))
            assert (table.num_held(owner) < held) == would
        table.check_invariants()
        for owner, known in tokens.items():
            for group, (window, stride) in enumerate(groups):
                pages = table.pages(owner, group)
                first = max(0, len(known) - window + 1) // page_size if window else 0
                assert len(pages) == -(-table.groups.pages_for(len(known)) // stride) and 0 not in pages[first:]
                for index, page in enumerate(pages):
                    assert page == 0 or contents[page] == (group, tuple(known[: (index + 1) * page_size * stride]))
    held = {page for owner in tokens for group in range(len(windows)) for page in table.pages(owner, group)}
    assert table.num_used == len(held - {0})


def write(table, owner, tokens, start, contents):
    for group, stride in enumerate(table.strides):
        size = table.page_size * stride
        for index in range(start // size, -(-len(tokens) // size)):
            page = table.pages(owner, group)[index]
            holders = sum(page in held.pages[group] for held in table._held.values())
            assert page and holders == 1, f"page {page} is written while shared, or scrap"
            contents[page] = group, tuple(tokens[: (index + 1) * size])
    table.register(owner, hashes_of(tokens, table.page_size), len(tokens))
