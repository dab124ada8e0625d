"""Which layers share page numbers: how a pool of pages serves layers that see all positions and layers with a window.

Layers with equal windows form groups of about equal size, and a page belongs to one group at a time: it holds keys and
values of some tokens in all layers of that group. So every page is of the same size and any group may take any page.
(vLLM's hybrid KV cache manager, docs.vllm.ai/en/stable/design/hybrid_kv_cache_manager.) Which pages those are is
serve/page_table.py's. No jax.
"""

import dataclasses
import functools
import itertools
from collections.abc import Collection, Sequence

MEMORY = -1
MOST_GROUPS = 8  # each has its own columns of the page table, which the host fills and sends with every batch


@dataclasses.dataclass(frozen=True)
class PageLayout:
    """num_pages  of the pool, scrap page 0 included
    windows    of each group, how many positions its layers see; 0: all
    places     of each layer, (group, place among the group's layers). Layers that remember a text by an array of one
               size (ops/gated_delta.py) have no pages: the group is MEMORY, and the place one among those. A layer
               that reads what another keeps has its place
    parts      of each layer, which part of its place is its own, where layers keep less of a token than others do and
               several share one; (): the first
    slots      texts that such layers remember at once, one that padding writes to included
    unsure     tokens that they remember besides, those of a step that verifies drafts (ops/delta_drafts.py); 0: none
    strides    of each group, the tokens that a place in a page stands for (ops/compressed_pages.py); (): one
    both       every layer has pages and remembers texts, in the order of layers (Falcon H1)
    firsts     of each layer that keeps rows of several kinds, the first of them among `places`; (): each keeps one
    """

    num_pages: int
    windows: tuple[int, ...]
    places: tuple[tuple[int, int], ...]
    slots: int = 0
    parts: tuple[int, ...] = ()
    unsure: int = 0
    strides: tuple[int, ...] = ()
    firsts: tuple[int, ...] = ()
    both: bool = False

    @classmethod
    def whole(cls, num_layers: int, num_pages: int, memories: Collection[int] = (), slots: int = 0) -> "PageLayout":
        """One group, whose pages hold all layers but `memories` and are kept whatever the layers see."""
        counts, places = {0: 0, MEMORY: 0}, []
        for layer in range(num_layers):
            group = MEMORY if layer in memories else 0
            places.append((group, counts[group]))
            counts[group] += 1
        return cls(num_pages, (0,), tuple(places), slots)

    def beside(self, windows: Sequence[int | None]) -> "PageLayout | None":
        """For the layers of another model, with these windows, None: that have no pages, under the same page numbers:
        each is in a group that keeps what it sees. None where there is no such group."""
        counts, places, memories = [0] * len(self.windows), [], itertools.count()
        for window in windows:
            if window is None:
                places.append((MEMORY, next(memories)))
                continue
            groups = [group for group, kept in enumerate(self.windows) if not kept or 0 < window <= kept]
            if not groups:
                return None
            group = min(groups, key=lambda group: counts[group])
            places.append((group, counts[group]))
            counts[group] += 1
        return PageLayout(self.num_pages, self.windows, tuple(places))

    def reading(self, sources: Sequence[int]) -> "PageLayout":
        """For more layers than these, which are some of them in order: each has the place of its source, itself or
        another."""
        if len(sources) == len(self.places):
            return self
        own = {layer: place for place, layer in enumerate(sorted(set(sources)))}
        spread = {
            name: tuple(of[own[s]] for s in sources) for name in ("places", "parts") if (of := getattr(self, name))
        }
        return dataclasses.replace(self, **spread)

    @functools.cached_property
    def in_order(self) -> bool:
        """Whether there is one group, whose places are the layers as they come."""
        return self.places == tuple((0, layer) for layer in range(len(self.places))) and not any(self.parts)

    def memory_places(self) -> tuple[int, ...]:
        """Of each layer, its place among those that remember texts."""
        return tuple(range(len(self.places))) if self.both else tuple(place for _, place in self.places)

    @property
    def layers(self) -> int:
        """That a page has room for."""
        return 1 + max((place for group, place in self.places if group != MEMORY), default=-1)

    @property
    def memories(self) -> int:
        """Layers that remember texts: those that have no pages, or all."""
        return len(self.places) if self.both else sum(group == MEMORY for group, _ in self.places)

    def pages_of(self, length: int, page_size: int, steps: int) -> int:
        """That a request of `length` tokens holds at most, in all groups, going on by `steps` tokens at a time."""
        strides = self.strides or (1,) * len(self.windows)
        groups = zip(self.windows, strides, strict=True)
        return sum(seen_pages(window, length, page_size * stride, steps) for window, stride in groups)


def seen_pages(window: int, length: int, page_size: int, steps: int) -> int:
    """How many pages hold what the next `steps` tokens see and write, wherever among `length` tokens they stand."""
    every = -(-length // page_size)
    return min(every, -(-(window + steps) // page_size) + 1) if window else every


def layout_of(
    windows: Sequence[int | None],
    num_pages: int,
    length: int,
    page_size: int,
    steps: int,
    sharing: Sequence[int] = (),
    sources: Sequence[int] = (),
) -> PageLayout:
    """For layers with these windows, None: that have no pages, the layout in which a request of `length` tokens that
    decodes `steps` tokens at a time needs least memory: few layers a page leave little of it empty, many mean few page
    tables. `sharing`: of each layer, how many like it have room in one place; (): one. `sources`: of each layer, that
    whose keys and values it reads, itself or another; (): itself."""
    if len(set(sources)) < len(sources):
        own = sorted(set(sources))
        some = ([of[layer] for layer in own] if of else () for of in (windows, sharing))
        windows, sharing = some
        return layout_of(windows, num_pages, length, page_size, steps, sharing).reading(sources)
    if None in windows:
        paged = layout_of([w for w in windows if w is not None], num_pages, length, page_size, steps)
        places, memories = iter(paged.places), itertools.count()
        of_all = tuple((MEMORY, next(memories)) if w is None else next(places) for w in windows)
        return dataclasses.replace(paged, places=of_all)
    whole = PageLayout.whole(len(windows), num_pages)
    kinds = [(window, share, 1) for window, share in zip(windows, sharing or (1,) * len(windows), strict=True)]
    choices = [_grouped(kinds, num_pages, size) for size in range(1, len(windows) + 1)]
    return _least([whole, *choices], kinds, length, page_size, steps)


def layout_of_rows(
    rows: Sequence[Sequence[tuple[int, int]]], num_pages: int, length: int, page_size: int, steps: int
) -> PageLayout:
    """The same for layers that keep rows of several kinds each (layers/compressed_attention.py): (the tokens that see a
    row, 0: all; the tokens that it stands for). Rows that stand for more tokens than the others' share places."""
    least = entry_rate(rows)
    kinds = [(window, max(1, rate // least), least if rate > 1 else 1) for own in rows for window, rate in own]
    choices = [_grouped(kinds, num_pages, size) for size in range(1, len(kinds) + 1)]
    firsts = tuple(itertools.accumulate(map(len, rows[:-1]), initial=0))
    return dataclasses.replace(_least(choices, kinds, length, page_size, steps), firsts=firsts)


def entry_rate(rows: Sequence[Sequence[tuple[int, int]]]) -> int:
    """The fewest tokens that an entry of such layers stands for; 1 where there are no entries."""
    return min((rate for own in rows for _, rate in own if rate > 1), default=1)


def usual_page_size(platform: str) -> int:
    """Of a cache that nobody says it of, in tokens: vLLM's 16 on a GPU. On a CPU 64, which attention reads as they lie,
    in 0.5 to 0.7 of the time at 500 positions (ops/paged_attention.py, measured)."""
    return 64 if platform == "cpu" else 16


def page_size_for(rows: Sequence[Sequence[tuple[int, int]]], page_size: int) -> int:
    """The least multiple of a page size whose pages of entries end with a window of each layer."""
    most = max((rate for own in rows for _, rate in own), default=1)
    return next(size for size in itertools.count(page_size, page_size) if size * entry_rate(rows) % most == 0)


def _least(choices, kinds, length: int, page_size: int, steps: int) -> PageLayout:
    few = max(MOST_GROUPS, len(set(kinds)))
    return min(
        (layout for layout in choices if len(layout.windows) <= few),
        key=lambda layout: (layout.layers * layout.pages_of(length, page_size, steps), len(layout.windows)),
    )


def _grouped(kinds: Sequence[tuple[int, int, int]], num_pages: int, size: int) -> PageLayout:
    """Groups of at most `size` places, for layers with these windows, of which so many share a place, that stands for
    so many tokens."""
    groups: list[int] = []
    strides: list[int] = []
    places, parts = [(0, 0)] * len(kinds), [0] * len(kinds)
    for window, sharing, stride in sorted(set(kinds)):
        layers = [layer for layer, own in enumerate(kinds) if own == (window, sharing, stride)]
        count = -(-len(layers) // (size * sharing))
        for index, layer in enumerate(layers):
            place, parts[layer] = divmod(index // count, sharing)
            places[layer] = len(groups) + index % count, place
        groups += [window] * count
        strides += [stride] * count
    shared = tuple(parts) if any(parts) else ()
    return PageLayout(
        num_pages, tuple(groups), tuple(places), parts=shared, strides=tuple(strides) if max(strides) > 1 else ()
    )
