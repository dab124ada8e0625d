"""The replicas: which there are, what is known of each, and who of them may be sent a request. Knows no HTTP.

A replica is `alive` while its /health answers, and takes requests while it is alive, its /ready says so too, and
nobody drains it. It is taken out at the first refused connection and at the first answer that says no; where nothing
answers in time, at the second time, since a busy host may miss one. One good look puts it back. Answers that it has
begun go on, until neither they nor any look have brought anything for SILENT.
"""

import asyncio
import contextlib
import dataclasses
import logging
import urllib.parse
from collections.abc import Collection, Iterator, Sequence

from shardlm.errors import ShardlmError
from shardlm.serve.api.errors import ApiError, no_model, unavailable
from shardlm.serve.router.policy import Choice, Policy
from shardlm.serve.router.prompt import Hints

MISSES = 2  # looks in a row without an answer that take a replica out
UNSEEN = "not looked at yet"
SILENT = 35.0  # seconds; a process that hangs is given up as a host is that vanished (upstream.py)


@dataclasses.dataclass(eq=False)
class Giving:
    """An answer under way. limit: what ends it. at: when its last bytes came, on the loop's clock."""

    limit: asyncio.Timeout
    at: float


@dataclasses.dataclass(eq=False)
class Replica:
    """
    source      of its address: flag, dns or admin
    alive       its /health answered
    ready       its /ready said so
    drained     by an administrator
    problem     why it takes no requests, in words
    misses      looks in a row that had no answer
    models      names that it serves; None while it has not told
    in_flight   requests of ours
    others      sequences in it beyond ours, as it told at the last look
    waiting     of each request that has produced nothing yet, what ends the waiting when the replica is lost
    giving      answers that have begun
    silent      since when no look has had an answer, on the loop's clock; None: the last one had
    """

    url: str
    source: str
    alive: bool = False
    ready: bool = False
    drained: bool = False
    problem: str = UNSEEN
    misses: int = 0
    models: frozenset[str] | None = None
    in_flight: int = 0
    others: float = 0
    waiting: set[asyncio.Timeout] = dataclasses.field(default_factory=set)
    giving: set[Giving] = dataclasses.field(default_factory=set)
    silent: float | None = None

    @property
    def takes(self) -> bool:
        return self.alive and self.ready and not self.drained

    @property
    def load(self) -> float:
        return self.in_flight + self.others

    def serves(self, model: str | None) -> bool:
        return model is None or self.models is None or model in self.models

    @contextlib.contextmanager
    def gives(self, limit: asyncio.Timeout) -> Iterator[Giving]:
        """An answer has begun; `limit` ends it where nothing comes any more."""
        one = Giving(limit, asyncio.get_running_loop().time())
        self.giving.add(one)
        try:
            yield one
        finally:
            self.giving.discard(one)

    def about(self) -> dict[str, object]:
        """What an administrator is told."""
        names = ("url", "source", "alive", "ready", "drained", "problem", "in_flight", "load")
        models = None if self.models is None else sorted(self.models)
        return {name: getattr(self, name) for name in names} | {"models": models}


class Fleet:
    """All replicas, by address."""

    def __init__(self, policy: Policy):
        self.policy = policy
        self.replicas: dict[str, Replica] = {}
        self.wake = asyncio.Event()  # set: look at them now

    def add(self, url: str, source: str) -> Replica:
        """Raises ShardlmError for an address that is none, or is there already."""
        url = address(url)
        if url in self.replicas:
            raise ShardlmError(f"the replica {url} is there already; each is given once")
        self.replicas[url] = Replica(url, source)
        self.wake.set()
        return self.replicas[url]

    def remove(self, url: str) -> Replica:
        """It gets nothing new; what it has under way goes on."""
        replica = self.find(url)
        del self.replicas[replica.url]
        self.policy.forget(replica.url)
        return replica

    def find(self, url: str) -> Replica:
        """Raises ApiError where it is not there."""
        if (found := self.replicas.get(_root(url))) is None:
            here = ", ".join(self.replicas) or "none"
            raise ApiError(f"the replica {url!r} is not here; here is {here}", 404, param="url")
        return found

    def taking(self) -> list[Replica]:
        return [replica for replica in self.replicas.values() if replica.takes]

    def choose(self, hints: Hints, tried: Collection[Replica] = ()) -> tuple[Replica, Choice]:
        """Who is sent a request, of those not `tried`. Raises ApiError: 404 for a model that no replica has, 503 where
        those that have it take nothing now."""
        having = [replica for replica in self.replicas.values() if replica.serves(hints.model)]
        if self.replicas and not having:
            raise no_model(hints.model, self.models())
        loads = {replica.url: replica.load for replica in having if replica.takes and replica not in tried}
        if not loads:
            raise unavailable(f"no replica takes requests now: {self._why(having)}; try again later")
        choice = self.policy.choose(loads, hints.blocks)
        return self.replicas[choice.replica], choice

    def _why(self, having: Sequence[Replica]) -> str:
        count = len(having)
        return f"of {count}, {sum(r.takes for r in having)} are ready" if count else "there is none"

    def models(self) -> list[str]:
        """The names that are known, of replicas that take requests or not."""
        return sorted({name for replica in self.replicas.values() for name in replica.models or ()})

    @contextlib.contextmanager
    def sending(self, replica: Replica) -> Iterator[None]:
        """A request is under way there."""
        replica.in_flight += 1
        try:
            yield
        finally:
            replica.in_flight -= 1

    def said(self, replica: Replica, *, alive: bool, ready: bool, problem: str = "") -> None:
        """It answered a look."""
        replica.silent = None
        with self._changing(replica):
            replica.misses, replica.problem = 0, problem
            if alive:
                replica.alive, replica.ready = True, ready
            else:
                self._lost(replica)

    def failed(self, replica: Replica, problem: str, *, refused: bool) -> None:
        """It takes no connection, or gave no answer in time, or broke one off."""
        replica.misses += 1
        if refused or replica.misses >= MISSES:
            with self._changing(replica):
                replica.problem = problem
                self._lost(replica)
        now = asyncio.get_running_loop().time()
        replica.silent = now if replica.silent is None else replica.silent
        for one in [one for one in replica.giving if now - max(one.at, replica.silent) >= SILENT]:
            replica.giving.discard(one)
            one.limit.reschedule(0)

    def _lost(self, replica: Replica) -> None:
        """Its pages are gone. Requests that have produced nothing need not wait for it."""
        if replica.alive:
            self.policy.forget(replica.url)
        replica.alive = replica.ready = False
        replica.others = 0
        while replica.waiting:
            replica.waiting.pop().reschedule(0)

    @contextlib.contextmanager
    def _changing(self, replica: Replica) -> Iterator[None]:
        before, problem = replica.takes, replica.problem
        yield
        if before != replica.takes:
            said = "takes requests" if replica.takes else f"is taken out: {replica.problem}"
            logging.warning("replica %s %s", replica.url, said)
        elif problem == UNSEEN and replica.problem and not replica.takes:  # an address that is wrong never does
            logging.warning("replica %s takes no requests yet: %s", replica.url, replica.problem)


def address(url: str) -> str:
    """Without a slash or /v1 at its end. Raises ShardlmError for what is no address of a server."""
    try:
        parts = urllib.parse.urlsplit(url)
        right = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # of half an IPv6 address as well
        right = False
    if not right or parts.query or parts.fragment or parts.username:
        raise ShardlmError(f"the replica {url!r} is no address; it must be like http://HOST:PORT")
    return _root(url)


def _root(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")  # as clients are given it
