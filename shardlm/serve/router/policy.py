"""Which replica a request goes to: the one that has computed its beginning already, unless that one is too busy.

The rule. Prompts are cut into blocks, and a block is known by the hash of everything up to its end. The memory holds,
for each of the last `capacity` such hashes, the replicas that were sent it. A replica's match is the number of a
prompt's first blocks that it was sent. Of the replicas whose load is at most `threshold` above the least loaded one's,
and whose match is at least `least_match` of the prompt's blocks, the one with the longest match is taken, then the
least loaded. Where there is none, it is the least loaded: among equals the longest match, then who waited longest.

Sources. SGLang's router (policy cache_aware) keeps an approximate radix tree of the text sent to each worker, follows
it when more than a share of the request matches, and turns to the shortest queue when the loads differ by more than a
threshold. Preble (Srivatsa et al., arXiv 2407.00023, "E2") exploits where the cached part is longer than the part to
compute, explores by load otherwise, and moves load off a replica above a threshold. Hashes of blocks in an LRU stand
here for their trees, as in vLLM's prefix cache: as much memory as was said, and no tree to walk.
"""

import dataclasses
import itertools
from collections import OrderedDict
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Choice:
    """match: blocks of the prompt that the replica has, as far as the memory knows."""

    replica: str
    match: int


class PrefixMemory:
    """Who was sent which beginnings; the `capacity` blocks that were used last."""

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._holders: OrderedDict[bytes, set[str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def matches(self, blocks: Sequence[bytes]) -> dict[str, int]:
        """{replica: how many of the first blocks it has}, without those that have none."""
        found: dict[str, int] = {}
        having: set[str] | None = None
        for count, block in enumerate(blocks, 1):
            holders = self._holders.get(block, set())
            having = set(holders) if having is None else having & holders
            if not having:
                break
            found.update(dict.fromkeys(having, count))
        return found

    def add(self, blocks: Sequence[bytes], replica: str) -> None:
        """The last blocks first, so that a beginning is forgotten after what follows it."""
        for block in reversed(blocks[: self._capacity]):
            self._holders.setdefault(block, set()).add(replica)
            self._holders.move_to_end(block)
        while len(self._holders) > self._capacity:
            self._holders.popitem(last=False)

    def forget(self, replica: str) -> None:
        """The replica was started anew, or has gone: its pages are lost."""
        for block in [block for block, holders in self._holders.items() if replica in holders]:
            self._holders[block].discard(replica)
            if not self._holders[block]:
                del self._holders[block]


class Policy:
    """
    threshold    requests by which a replica that has the beginning may be busier than the least loaded
    least_match  share of a prompt's blocks that makes a beginning worth it
    capacity     blocks remembered
    """

    def __init__(self, threshold: float = 16, least_match: float = 0.5, capacity: int = 2**16):
        self._threshold, self._least_match = threshold, least_match
        self.memory = PrefixMemory(capacity)
        self._turn = itertools.count()
        self._last: dict[str, int] = {}  # replica -> when it was taken

    def choose(self, loads: Mapping[str, float], blocks: Sequence[bytes]) -> Choice:
        """One of `loads`, which are {replica: load} of those that may be taken, at least one."""
        match = self.memory.matches(blocks)
        least = min(loads.values())
        enough = max(1, self._least_match * len(blocks))
        known = [name for name in loads if match.get(name, 0) >= enough and loads[name] <= least + self._threshold]
        pool = known or [name for name in loads if loads[name] == least]
        taken = min(pool, key=lambda name: (-match.get(name, 0), loads[name], self._last.get(name, -1)))
        self._last[taken] = next(self._turn)
        return Choice(taken, match.get(taken, 0))

    def sent(self, blocks: Sequence[bytes], replica: str) -> None:
        """Before it answers, so that those that come together stay together."""
        self.memory.add(blocks, replica)

    def forget(self, replica: str) -> None:
        self.memory.forget(replica)
        self._last.pop(replica, None)
