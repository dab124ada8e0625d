"""How many pages texts take in each group of layers, and which of them a token sees. No jax.

Layers come in groups (layers/page_layout.py), and an owner has pages in each. In a group with a window it gives back
those that no token to come can see. In a group with a stride a page holds entries that stand for several tokens each:
it goes with as many pages of tokens, and has the hash of the last of them.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

from shardlm.layers.page_layout import seen_pages


@dataclasses.dataclass(frozen=True)
class PageGroups:
    """page_size: tokens of a page. windows: how far back each group sees, 0 to the start. strides: how many tokens a
    place of each stands for. longest_step: the most tokens by which owners grow before they give pages back."""

    page_size: int
    windows: tuple[int, ...]
    strides: tuple[int, ...]
    longest_step: int

    @functools.cached_property
    def unit(self) -> int:
        """In how many pages of tokens prefixes are found."""
        return math.lcm(*self.strides)

    def pages_for(self, num_tokens: int) -> int:
        """How many pages hold `num_tokens` tokens, in a group without a stride."""
        return -(-num_tokens // self.page_size)

    def most(self, num_tokens: int) -> int:
        """How many pages an owner of `num_tokens` tokens ever holds, in all groups."""
        return sum(self.most_in(group, num_tokens) for group in range(len(self.windows)))

    def most_in(self, group: int, num_tokens: int) -> int:
        """The same in one of them."""
        size = self.page_size * self.strides[group]
        return seen_pages(self.windows[group], num_tokens, size, self.longest_step)

    def first(self, group: int, position: int) -> int:
        """The first page of a sequence that the token at `position`, and so any after it, sees."""
        window = self.windows[group]
        return max(0, position - window + 1) // self.page_size if window else 0

    def ends(self, num_tokens: int, found: int) -> list[int]:
        """How many pages a new owner gets in each group, of which `found` are shared, those before the first included:
        those of all its tokens or, in a group with a window, as many as it will hold at most, so that a long prompt
        that was begun can go on."""
        reach = (max(found * self.page_size, w) + self.longest_step if w else num_tokens for w in self.windows)
        each = zip(self.strides, reach, strict=True)
        return [-(-self.pages_for(min(num_tokens, tokens)) // stride) for stride, tokens in each]

    def count(self, every: Sequence[Sequence[int]]) -> int:
        """For how many pages of tokens all groups have theirs."""
        return min(len(pages) * stride for stride, pages in zip(self.strides, every, strict=True))

    def drops_at(self, behind: Sequence[int]) -> float:
        """The position from which the next page can be given back, where so many leading ones of each group were."""
        pairs = zip(self.windows, behind, strict=True)
        return min(((n + 1) * self.page_size + window - 1 for window, n in pairs if window), default=math.inf)
