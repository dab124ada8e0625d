"""Which pages of the key/value pool hold which tokens: allocation, sharing of equal prefixes, eviction.

Owns the pages' numbers, never their contents: the runner writes and reads the pool by the numbers given here. Leaves
to `scheduler` when to ask, and whom to turn out when there is nothing left.

A page holds `page_size` consecutive tokens of one sequence. A full page is known by the hash of its tokens, chained to
the hash of the page before it, so that equal hashes mean equal prefixes (vLLM's automatic prefix caching,
docs.vllm.ai/en/stable/design/prefix_caching). Only full pages are shared and nobody writes into a full page, so that
there is no copy on write. Where there is room in the host's memory (host_pages.py), pages are saved there before they
are evicted, and brought back where a text asks for them. Page 0 is scrap: what padded rows have, and never given away.

Layers come in groups (page_groups.py), and an owner has pages in each. All groups take their pages from the one pool,
so that no share of memory is set aside for long sequences where short ones come (vLLM's hybrid KV cache manager,
docs.vllm.ai/en/stable/design/hybrid_kv_cache_manager).
"""

import bisect
import collections
import contextlib
import dataclasses
import hashlib
import itertools
from array import array
from collections.abc import Hashable, Iterable, Iterator, Sequence

from shardlm.errors import ShardlmError
from shardlm.serve.host_pages import BUNDLE, HostPages, Key
from shardlm.serve.page_groups import PageGroups
from shardlm.serve.snapshots import Snapshots
from shardlm.vision.picture import Placed

_DIGEST = 16  # bytes of a page's hash: a collision would show one user another's text


def extend_hashes(
    hashes: list[bytes],
    tokens: array,
    num_tokens: int,
    page_size: int,
    salt: str = "",
    pictures: Sequence[Placed] = (),
) -> None:
    """Appends to `hashes` those that it lacks of the full pages among the first `num_tokens` of `tokens`, an array "i",
    some of which stand for `pictures`.

    Requests of different `salt` never share a page.
    """
    parent = hashes[-1] if hashes else hashlib.blake2b(salt.encode(), digest_size=_DIGEST).digest()
    for start in range(len(hashes) * page_size, num_tokens - page_size + 1, page_size):
        page = tokens[start : start + page_size].tobytes()
        for one in pictures:
            if one.start < start + page_size and start < one.end:
                page += one.known_by + (start - one.start).to_bytes(8, "little", signed=True)
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
    """What one owner has."""

    pages: list[list[int]]  # of each group in the order of tokens, 0 where they were given back
    count: int  # of pages of tokens for which every group has its own, those given back included
    behind: list[int]  # of each group, leading pages that were given back
    drops_at: float  # the position from which the next one can be
    known: int  # leading pages that are registered under their hash, or whose hash another page had already


class PageTable:
    """The pages of one pool. Owners are any hashable names; every operation costs the pages it touches, no more."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        windows: Sequence[int] = (0,),
        strides: Sequence[int] = (),
        longest_step: int = 1,
        caching: bool = True,
        snapshots: Snapshots | None = None,
        host: HostPages | None = None,
    ):
        """A pool of `num_pages` pages, scrap page 0 included, for groups that see back as far as their window (0: to
        the start) and whose places stand for so many tokens (`strides`; (): one), and for owners that grow by at most
        `longest_step` tokens before `drop` is called. Without `caching` no page is ever shared; with `snapshots` none
        behind the last one of them. `host`: where evicted pages go; None: nowhere.

        Raises:
            ShardlmError: there is no page beside the scrap page, or no token in a page.
        """
        if num_pages < 2 or page_size < 1:
            raise ShardlmError(
                f"a pool of {num_pages} pages of {page_size} tokens holds nothing: page 0 is scrap, so give at least "
                "2 pages of at least 1 token"
            )
        self.num_pages, self.page_size, self.caching = num_pages, page_size, caching
        self.snapshots, self.host = snapshots, host
        self.windows, self.strides = tuple(windows), tuple(strides) or (1,) * len(windows)
        self.groups = PageGroups(page_size, self.windows, self.strides, longest_step)
        self.statistics = Statistics()
        self._held: dict[Hashable, _Held] = {}
        self._references = [0] * num_pages
        self._hash_of: list[Key | None] = [None] * num_pages
        self._page_of: list[dict[bytes, int]] = [{} for _ in self.windows]  # of each group
        self._free = list(range(num_pages - 1, 0, -1))  # a stack: the page freed last is used first
        # Pages that nobody holds but whose contents may be asked for again, the least recently used first.
        self._idle: collections.OrderedDict[int, None] = collections.OrderedDict()

    def check_room(self, length: int) -> None:
        """Raises ShardlmError where a request of so many tokens could never run."""
        needed, has = self.groups.most(length), self.num_pages - 1
        if needed > has:
            room = bisect.bisect_right(range(length), has, key=self.groups.most) - 1
            raise ShardlmError(
                f"a request of max_model_len={length} tokens needs {needed} pages of {self.page_size}, and the pool "
                f"has {has}, for {room} tokens. Enlarge the pool, or lower max_model_len to {room}"
            )

    def renewed(self) -> "PageTable":
        """One that is empty in its place, with this one's counts."""
        sizes = {"windows": self.windows, "strides": self.strides}
        sizes |= {"longest_step": self.groups.longest_step, "caching": self.caching}
        snapshots = None if self.snapshots is None else self.snapshots.renewed()
        host = None if self.host is None else self.host.renewed()
        new = PageTable(self.num_pages, self.page_size, snapshots=snapshots, host=host, **sizes)
        new.statistics = self.statistics
        return new

    @property
    def num_free(self) -> int:
        """Pages that can be given away, cached ones that nobody holds included."""
        return len(self._free) + len(self._idle)

    @property
    def num_used(self) -> int:
        """Pages that some owner holds."""
        return self.num_pages - 1 - self.num_free

    def pages(self, owner: Hashable, group: int = 0) -> Sequence[int]:
        """The pages of `owner` in the order of their tokens, 0 for those given back. A view: do not change it, and copy
        it to keep it."""
        return self._held[owner].pages[group]

    def num_held(self, owner: Hashable) -> int:
        """Pages of `owner` in all groups."""
        held = self._held[owner]
        return sum(map(len, held.pages)) - sum(held.behind)

    def find(self, hashes: Sequence[bytes]) -> int:
        """How many leading pages of a sequence with these hashes need not be computed: they are cached, and what layers
        without pages remember at the end of them."""
        count = self.cached(hashes)
        while self.snapshots is not None and count and hashes[count - 1] not in self.snapshots:
            below = next((end for end in range(count, 0, -1) if hashes[end - 1] in self.snapshots), 0)
            count = self.cached(hashes[:below])
        return count

    def cached(self, hashes: Sequence[bytes]) -> int:
        """How many leading pages of a sequence with these hashes are cached, as far as the token after them sees them:
        all in a group without a window, the last ones in the others."""
        count = len(hashes)
        for group, (window, stride) in enumerate(zip(self.windows, self.strides, strict=True)):
            if not window:
                ends = range(stride - 1, count, stride)
                lacks = (end - stride + 1 for end in ends if not self._known(group, hashes[end]))
                count = next(lacks, count // stride * stride)
        count -= count % self.groups.unit
        while count and (gap := self._gap(hashes, count)) is not None:
            count = gap - gap % self.groups.unit
        return count

    def _gap(self, hashes: Sequence[bytes], count: int) -> int | None:
        """A page that lacks in some window before the end of `count` pages; the last one of its group."""
        for group, window in enumerate(self.windows):
            if window:
                for index in range(count - 1, self.groups.first(group, count * self.page_size) - 1, -1):
                    if not self._known(group, hashes[index]):
                        return index
        return None

    def _known(self, group: int, digest: bytes) -> bool:
        return digest in self._page_of[group] or (self.host is not None and (group, digest) in self.host)

    def _shared(self, hashes: Sequence[bytes], found: int) -> Iterator[tuple[int, list[Key]]]:
        """Of each group, the first of the `found` leading pages that is still seen, and the cached pages from there."""
        for group, stride in enumerate(self.strides):
            first = self.groups.first(group, found * self.page_size)
            yield first, [(group, digest) for digest in hashes[first + stride - 1 : found : stride]]

    def _here(self, keys: Iterable[Key]) -> Iterator[int]:
        """Those of some cached pages that are on the devices."""
        return (page for group, digest in keys if (page := self._page_of[group].get(digest)) is not None)

    def missing(self, num_tokens: int, hashes: Sequence[bytes] = ()) -> int:
        """How many of `num_free` an `allocate` of the same arguments would use up."""
        found, count = self.find(hashes), 0
        for end, (first, keys) in zip(self.groups.ends(num_tokens, found), self._shared(hashes, found), strict=True):
            count += end - first - sum(self._references[page] > 0 for page in self._here(keys))
        return count

    def allocate(self, owner: Hashable, num_tokens: int, hashes: Sequence[bytes] = ()) -> int | None:
        """Gives a new owner pages for `num_tokens` tokens (in a group with a window for the first of them; `append`
        adds the others), the leading ones shared where `hashes` are cached.

        Returns how many tokens are there already, or None, and changes nothing, where pages are lacking. A caller
        that needs the last token's output leaves the page of that token out of `hashes`.
        """
        if owner in self._held:
            raise ValueError(f"{owner!r} has pages already; append to them")
        if self.missing(num_tokens, hashes) > self.num_free:
            return None
        found = self.find(hashes)
        shared = list(self._shared(hashes, found))
        wanted = [key for _, keys in shared for key in keys]
        for page in self._here(wanted):
            self._references[page] += 1
            self._idle.pop(page, None)
        wanted = [(group, digest) for group, digest in wanted if digest not in self._page_of[group]]
        every = []
        with contextlib.nullcontext() if self.host is None else self.host.holding(wanted):
            for key in wanted:
                self._bring(*key)
            for end, (first, keys) in zip(self.groups.ends(num_tokens, found), shared, strict=True):
                pages = [self._page_of[group][digest] for group, digest in keys]
                every.append([0] * first + pages + [self._take() for _ in range(end - first - len(pages))])
        behind = [first for first, _ in shared]
        self._held[owner] = _Held(every, self.groups.count(every), behind, self.groups.drops_at(behind), found)
        self.statistics.queried += num_tokens
        self.statistics.found += found * self.page_size
        return found * self.page_size

    def lacking(self, owner: Hashable, num_tokens: int) -> int:
        """How many pages an `append` of the same arguments would add."""
        held, end = self._held[owner], self.groups.pages_for(num_tokens)
        if end <= held.count:  # most often
            return 0
        groups = zip(self.strides, held.pages, strict=True)
        return sum(max(0, -(-end // stride) - len(pages)) for stride, pages in groups)

    def append(self, owner: Hashable, num_tokens: int) -> bool:
        """Makes the pages of `owner` hold `num_tokens` tokens in all; False, and nothing changed, if pages lack."""
        if self.lacking(owner, num_tokens) > self.num_free:
            return False
        held, end = self._held[owner], self.groups.pages_for(num_tokens)
        for stride, pages in zip(self.strides, held.pages, strict=True):
            pages.extend(self._take() for _ in range(-(-end // stride) - len(pages)))
        held.count = max(held.count, end)
        return True

    def register(self, owner: Hashable, hashes: Sequence[bytes], num_tokens: int) -> None:
        """Lets others share the full pages among the first `num_tokens` tokens of `owner`, which have `hashes`.

        Call it when whatever reads them later runs after what writes them.
        """
        if not self.caching:
            return
        held = self._held[owner]
        for index in range(held.known, num_tokens // self.page_size):
            groups = zip(self.strides, held.pages, self._page_of, strict=True)
            for group, (stride, pages, cached) in enumerate(groups):
                if (index + 1) % stride:
                    continue
                # Else an equal page was first, and this one stays private; or it was given back before it was known.
                if (page := pages[index // stride]) and cached.setdefault(hashes[index], page) == page:
                    self._hash_of[page] = group, hashes[index]
            held.known = index + 1

    def drops(self, owner: Hashable, position: int) -> bool:
        """Whether `drop` would give anything back."""
        return position >= self._held[owner].drops_at

    def drop(self, owner: Hashable, position: int) -> None:
        """Takes back those pages of `owner` that no token from `position` on sees. Those with a hash stay cached."""
        held = self._held[owner]
        for group, pages in enumerate(held.pages):
            first = self.groups.first(group, position)
            for index in range(held.behind[group], first):
                self._release(pages[index])
                pages[index] = 0
            held.behind[group] = max(first, held.behind[group])
        held.drops_at = self.groups.drops_at(held.behind)

    def free(self, owner: Hashable) -> None:
        """Takes back the pages of `owner`. Those with a hash stay cached until their room is needed."""
        held = self._held.pop(owner)
        for pages, behind in zip(held.pages, held.behind, strict=True):
            for page in reversed(pages[behind:]):  # a prefix is worth more than what follows it
                self._release(page)

    def _release(self, page: int) -> None:
        self._references[page] -= 1
        if self._references[page]:
            return
        if self._hash_of[page] is None:
            self._free.append(page)
        else:
            self._idle[page] = None

    def forget(self) -> None:
        """Empties the prefix cache, as for new weights. Only pages that nobody holds are touched beyond that.

        Raises ValueError while an owner has pages: what they hold was computed before.
        """
        if self._held:
            raise ValueError(f"{len(self._held)} owners hold pages; free them first")
        for cached in self._page_of:
            cached.clear()
        for beside in (self.snapshots, self.host):
            if beside is not None:
                beside.forget()
        self._hash_of = [None] * self.num_pages
        self._free.extend(self._idle)
        self._idle.clear()

    def _bring(self, group: int, digest: bytes) -> None:
        """A page of the host's comes to the devices."""
        page = self._page_of[group][digest] = self._take()
        self._hash_of[page] = group, digest
        self.host.load((group, digest), page)

    def _spill(self) -> None:
        """Saves the page that is evicted next, with others whose turn comes soon."""
        soon = list(itertools.islice(self._idle, 4 * BUNDLE))
        if self._hash_of[soon[0]] not in self.host:
            self.host.save(self.host.lacking((page, self._hash_of[page]) for page in soon))

    def _take(self) -> int:
        """A page for one new owner; evicts what was used longest ago once no page is without contents."""
        if self._free:
            page = self._free.pop()
        else:
            if self.host is not None:
                self._spill()
            page, _ = self._idle.popitem(last=False)
            group, digest = self._hash_of[page]
            del self._page_of[group][digest]
            self._hash_of[page] = None
            self.statistics.evictions += 1
        self._references[page] = 1
        return page

    def check_invariants(self) -> None:
        """AssertionError where a page is lost, held wrongly or known wrongly. Costs the whole table: for tests."""
        counts = collections.Counter[int]()
        place: dict[int, tuple[int, int]] = {}  # of each held page: group, and index in its owners' sequences
        for owner, held in self._held.items():
            pages = [page for group, n in zip(held.pages, held.behind, strict=True) for page in group[n:]]
            assert len(set(pages)) == len(pages) and 0 not in pages, f"{owner!r} holds a page twice, or scrap: {pages}"
            counts.update(pages)
            assert held.count <= self.groups.count(held.pages) < held.count + self.groups.unit
            for group, (pages, behind) in enumerate(zip(held.pages, held.behind, strict=True)):
                stride = self.strides[group]
                assert not any(pages[:behind]) and 0 <= held.known <= max(len(pages), behind) * stride
                most = self.groups.most_in(group, len(pages) * self.page_size * stride)
                assert len(pages) - behind <= most, f"{owner!r} holds too much in group {group}"
                for index in range(behind, len(pages)):
                    where = place.setdefault(pages[index], (group, index))
                    assert where == (group, index), f"page {pages[index]} is in two places of sequences"
        for beside in (self.snapshots, self.host):
            if beside is not None:
                beside.check_invariants()
        assert self._references == [counts[page] for page in range(self.num_pages)], "references do not match owners"
        every = sorted([*counts, *self._free, *self._idle])
        assert every == list(range(1, self.num_pages)), f"pages are lost or in two states: {every}"
        known = {page: digest for page, digest in enumerate(self._hash_of) if digest is not None}
        cached = {(g, digest): page for g, pages in enumerate(self._page_of) for digest, page in pages.items()}
        assert {digest: page for page, digest in known.items()} == cached, "hashes and pages disagree"
        assert not known.keys() & set(self._free), "a free page has a hash"
        assert self._idle.keys() <= known.keys(), "an idle page has no hash"
        assert all(page in known for page, count in counts.items() if count > 1), "a page without hash is shared"
