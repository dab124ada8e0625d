"""Counts and times of the router, for Prometheus."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Set

from shardlm.serve.api.metrics import Histogram, head, quoted
from shardlm.serve.router.fleet import Replica

_PREFIX = "shardlm_router"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)


@dataclasses.dataclass
class Metrics:
    """
    answers        by replica ("" for the router itself) and status
    retries        by the replica that produced nothing and why: lost, refused, 429, 503
    broken         answers that ended before their end, by replica
    blocks, found  of prompts: looked up, and known at the replica that was taken
    first, whole   seconds until an answer's first byte, and its last
    """

    answers: Counter[tuple[str, int]] = dataclasses.field(default_factory=Counter)
    retries: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)
    broken: Counter[str] = dataclasses.field(default_factory=Counter)
    blocks: int = 0
    found: int = 0
    first: Histogram = dataclasses.field(default_factory=lambda: Histogram(_SECONDS))
    whole: Histogram = dataclasses.field(default_factory=lambda: Histogram(_SECONDS))

    def text(self, replicas: Iterable[Replica]) -> str:
        """All of it, as Prometheus reads it, of replicas that there are."""
        replicas = list(replicas)
        self._forget({"", *(replica.url for replica in replicas)})
        lines = [*self._counts(), *self._of_replicas(replicas)]
        for name, histogram, meaning in (
            ("first_byte_seconds", self.first, "From a request's arrival to the first byte of its answer."),
            ("request_seconds", self.whole, "From a request's arrival to the last byte of its answer."),
        ):
            lines += [*head(f"{_PREFIX}_{name}", "histogram", meaning), *histogram.lines(f"{_PREFIX}_{name}", "")]
        return "\n".join(lines) + "\n"

    def _forget(self, here: Set[str]) -> None:
        """Replicas that are gone, whoever took them out: names that come and go with every pod would pile up."""
        for counts in (self.answers, self.retries):
            for key in [key for key in counts if key[0] not in here]:
                del counts[key]
        for url in self.broken.keys() - here:
            del self.broken[url]

    def _counts(self) -> Iterator[str]:
        answers = {f'replica="{quoted(u)}",status="{s}"': n for (u, s), n in self.answers.items()}
        yield from _family("requests_total", "counter", "Answers by replica and status.", answers)
        retries = {f'replica="{quoted(u)}",reason="{why}"': n for (u, why), n in self.retries.items()}
        yield from _family("retries_total", "counter", "Times that a replica produced nothing, and why.", retries)
        broken = {f'replica="{quoted(u)}"': n for u, n in self.broken.items()}
        yield from _family("broken_total", "counter", "Answers that a replica left unfinished.", broken)
        looked = {"": self.blocks}
        yield from _family("prefix_blocks_total", "counter", "Blocks of prompts looked up.", looked)
        meaning = "Of them, blocks that the replica had been sent before."
        yield from _family("prefix_hits_total", "counter", meaning, {"": self.found})
        ratio = {"": self.found / self.blocks if self.blocks else 0.0}
        yield from _family("prefix_hit_ratio", "gauge", "prefix_hits_total to prefix_blocks_total.", ratio)

    def _of_replicas(self, replicas: list[Replica]) -> Iterator[str]:
        labels = [f'replica="{quoted(replica.url)}"' for replica in replicas]
        for name, meaning, values in (
            ("replica_up", "1 where its /health answers.", [int(r.alive) for r in replicas]),
            ("replica_ready", "1 where it is sent requests.", [int(r.takes) for r in replicas]),
            ("in_flight", "Requests under way there.", [r.in_flight for r in replicas]),
            ("load", "The same, and sequences of others than this router.", [r.load for r in replicas]),
        ):
            yield from _family(name, "gauge", meaning, dict(zip(labels, values, strict=True)))


def _family(name: str, kind: str, meaning: str, values: dict[str, float]) -> Iterator[str]:
    """`values`: {labels: value}; labels may be empty."""
    yield from head(f"{_PREFIX}_{name}", kind, meaning)
    for labels, value in values.items():
        yield f"{_PREFIX}_{name}{'{' + labels + '}' if labels else ''} {value}"
