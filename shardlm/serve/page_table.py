"""Which pages of the key/value pool hold which tokens: allocation, sharing of equal prefixes, eviction.

Owns the pages' numbers, never their contents: the runner writes and reads the pool by the numbers given here. Leaves
to `scheduler` when to ask, and whom to turn out when there is nothing left.

A page holds `page_size` consecutive tokens of one sequence. A full page is known by the hash of its tokens, chained to
the hash of the page before it, so that equal hashes mean equal prefixes (vLLM's automatic prefix caching,
docs.vllm.ai/en/stable/design/prefix_caching). Only full pages are shared and nobody writes into a full page, so that
there is no copy on write. Page 0 is scrap: padded rows write there, and it is never given away.
"""

import collections
import dataclasses
import hashlib
from array import array
from collections.abc import Hashable, Sequence

from shardlm.errors import ShardlmError

_DIGEST = 16  # bytes of a page's hash: a collision would show one user another's text


def extend_hashes(hashes: list[bytes], tokens: array, num_tokens: int, page_size: int, salt: str = "") -> None:
    """Appends to `hashes` those that it lacks of the full pages among the first `num_tokens` of `tokens`, an array "i".

    Requests of different `salt` never share a page.
    """
    parent = hashes[-1] if hashes else hashlib.blake2b(salt.encode(), digest_size=_DIGEST).digest()
    for start in range(len(hashes) * page_size, num_tokens - page_size + 1, page_size):
        page = tokens[start : start + page_size].tobytes()
        parent = hashlib.blake2b(parent + page, digest_size=_DIGEST).digest()
        hashes.append(parent)


@dataclasses.dataclass(slots=True)
class Statistics:
    """Counters since the start, in tokens but for `evictions`, which are pages."""

    queried: int = 0  # tokens that were given pages by `allocate`
    found: int = 0  # those of them whose keys and values were there
    evictions: int = 0


@dataclasses.dataclass(slots=True)
class _Held:
    pages: list[int]
    known: int  # leading pages that are registered under their hash, or whose hash another page had already


class PageTable:
    """The pages of one pool. Owners are any hashable names; every operation costs the pages it touches, no more."""

    def __init__(self, num_pages: int, page_size: int, *, caching: bool = True):
        """A pool of `num_pages` pages, scrap page 0 included. Without `caching` no page is ever shared.

        Raises:
            ShardlmError: there is no page beside the scrap page, or no token in a page.
        """
        if num_pages < 2 or page_size < 1:
            raise ShardlmError(
                f"a pool of {num_pages} pages of {page_size} tokens holds nothing: page 0 is scrap, so give at least "
                "2 pages of at least 1 token"
            )
        self.num_pages, self.page_size, self.caching = num_pages, page_size, caching
        self.statistics = Statistics()
        self._held: dict[Hashable, _Held] = {}
        self._references = [0] * num_pages
        self._hash_of: list[bytes | None] = [None] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._free = list(range(num_pages - 1, 0, -1))  # a stack: the page freed last is used first
        # Pages that nobody holds but whose contents may be asked for again, the least recently used first.
        self._idle: collections.OrderedDict[int, None] = collections.OrderedDict()

    @property
    def num_free(self) -> int:
        """Pages that can be given away, cached ones that nobody holds included."""
        return len(self._free) + len(self._idle)

    @property
    def num_used(self) -> int:
        """Pages that some owner holds."""
        return self.num_pages - 1 - self.num_free

    def pages(self, owner: Hashable) -> Sequence[int]:
        """The pages of `owner` in the order of their tokens. A view: do not change it, and copy it to keep it."""
        return self._held[owner].pages

    def pages_for(self, num_tokens: int) -> int:
        """How many pages hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def find(self, hashes: Sequence[bytes]) -> int:
        """How many leading pages of a sequence with these hashes are cached."""
        for count, digest in enumerate(hashes):
            if digest not in self._page_of:
                return count
        return len(hashes)

    def missing(self, num_tokens: int, hashes: Sequence[bytes] = ()) -> int:
        """How many of `num_free` an `allocate` of the same arguments would use up."""
        shared = (self._page_of[digest] for digest in hashes[: self.find(hashes)])
        return self.pages_for(num_tokens) - sum(self._references[page] > 0 for page in shared)

    def allocate(self, owner: Hashable, num_tokens: int, hashes: Sequence[bytes] = ()) -> int | None:
        """Gives a new owner pages for `num_tokens` tokens, the leading ones shared where `hashes` are cached.

        Returns how many tokens are there already, or None, and changes nothing, where pages are lacking. A caller
        that needs the last token's output leaves the page of that token out of `hashes`.
        """
        if owner in self._held:
            raise ValueError(f"{owner!r} has pages already; append to them")
        if self.missing(num_tokens, hashes) > self.num_free:
            return None
        pages = [self._page_of[digest] for digest in hashes[: self.find(hashes)]]
        found = len(pages)
        for page in pages:
            self._references[page] += 1
            self._idle.pop(page, None)
        pages.extend(self._take() for _ in range(self.pages_for(num_tokens) - found))
        self._held[owner] = _Held(pages, found)
        self.statistics.queried += num_tokens
        self.statistics.found += found * self.page_size
        return found * self.page_size

    def append(self, owner: Hashable, num_tokens: int) -> bool:
        """Makes the pages of `owner` hold `num_tokens` tokens in all; False, and nothing changed, if pages lack."""
        pages = self._held[owner].pages
        lacking = self.pages_for(num_tokens) - len(pages)
        if lacking > self.num_free:
            return False
        for _ in range(lacking):
            pages.append(self._take())
        return True

    def register(self, owner: Hashable, hashes: Sequence[bytes], num_tokens: int) -> None:
        """Lets others share the full pages among the first `num_tokens` tokens of `owner`, which have `hashes`.

        Call it when whatever reads them later runs after what writes them.
        """
        if not self.caching:
            return
        held = self._held[owner]
        for index in range(held.known, num_tokens // self.page_size):
            page, digest = held.pages[index], hashes[index]
            if self._page_of.setdefault(digest, page) == page:  # else an equal page was first; this one stays private
                self._hash_of[page] = digest
            held.known = index + 1

    def free(self, owner: Hashable) -> None:
        """Takes back the pages of `owner`. Those with a hash stay cached until their room is needed."""
        for page in reversed(self._held.pop(owner).pages):  # a prefix is worth more than what follows it
            self._references[page] -= 1
            if self._references[page]:
                continue
            if self._hash_of[page] is None:
                self._free.append(page)
            else:
                self._idle[page] = None

    def forget(self) -> None:
        """Empties the prefix cache, for new weights. Only pages that nobody holds are touched beyond that.

        Raises ValueError while an owner has pages: what they hold was computed with the old weights.
        """
        if self._held:
            raise ValueError(f"{len(self._held)} owners hold pages; free them first")
        self._page_of.clear()
        self._hash_of = [None] * self.num_pages
        self._free.extend(self._idle)
        self._idle.clear()

    def _take(self) -> int:
        """A page for one new owner; evicts what was used longest ago once no page is without contents."""
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            del self._page_of[self._hash_of[page]]
            self._hash_of[page] = None
            self.statistics.evictions += 1
        self._references[page] = 1
        return page

    def check_invariants(self) -> None:
        """AssertionError where a page is lost, held wrongly or known wrongly. Costs the whole table: for tests."""
        counts: collections.Counter[int] = collections.Counter()
        place: dict[int, int] = {}  # of each held page in its owners' sequences
        for owner, held in self._held.items():
            assert len(set(held.pages)) == len(held.pages), f"{owner!r} holds a page twice: {held.pages}"
            assert 0 <= held.known <= len(held.pages)
            counts.update(held.pages)
            for index, page in enumerate(held.pages):
                assert place.setdefault(page, index) == index, f"page {page} is in two places of sequences"
        assert self._references == [counts[page] for page in range(self.num_pages)], "references do not match owners"
        every = sorted([*counts, *self._free, *self._idle])
        assert every == list(range(1, self.num_pages)), f"pages are lost or in two states: {every}"
        known = {page: digest for page, digest in enumerate(self._hash_of) if digest is not None}
        assert {digest: page for page, digest in known.items()} == self._page_of, "hashes and pages disagree"
        assert not known.keys() & set(self._free), "a free page has a hash"
        assert self._idle.keys() <= known.keys(), "an idle page has no hash"
        assert all(page in known for page, count in counts.items() if count > 1), "a page without hash is shared"
