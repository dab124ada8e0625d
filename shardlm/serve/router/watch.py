"""Looks at the replicas again and again: whether they live and take requests, what they serve, how busy they are, and
which addresses the names have. At once where something went wrong, and every `poll_seconds` else."""

import asyncio
import contextlib
import logging
import re
import socket
from collections.abc import Awaitable, Callable, Hashable

import aiohttp
import msgspec

from shardlm.errors import ShardlmError
from shardlm.serve.router.fleet import Fleet, Replica
from shardlm.serve.router.settings import RouterSettings, parse_dns
from shardlm.serve.router.upstream import is_refusal

_GAP = 0.05  # seconds at least between two looks that something set off
_SEQUENCES = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{[^}]*\})? (\d+(?:\.\d+)?)$", re.MULTILINE)


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class Watch:
    """`run` goes on until it is cancelled."""

    def __init__(self, fleet: Fleet, settings: RouterSettings, client: aiohttp.ClientSession):
        self._fleet, self._settings, self._client = fleet, settings, client
        self._timeout = aiohttp.ClientTimeout(total=settings.timeout_seconds)
        key = settings.replica_key or next(iter(settings.api_keys), "")
        self._unknown: set[str] = set()  # names that could not be looked up last time
        self._headers = {"authorization": f"Bearer {key}"} if key else {}

    async def run(self) -> None:
        """A look that takes long holds up no other."""
        looks: dict[Hashable, asyncio.Task] = {}
        try:
            while True:
                for name in self._settings.replica_dns:
                    _unless_under_way(looks, name, lambda name=name: self.resolve(name))
                for replica in self._fleet.replicas.values():
                    _unless_under_way(looks, replica, lambda replica=replica: self.look(replica))
                await asyncio.sleep(_GAP)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._settings.poll_seconds):
                        await self._fleet.wake.wait()
                self._fleet.wake.clear()
                looks = {what: task for what, task in looks.items() if not task.done()}
        finally:
            for task in looks.values():
                task.cancel()
            await asyncio.gather(*looks.values(), return_exceptions=True)

    async def look(self, replica: Replica) -> None:
        """What the replica says of itself, told to the fleet."""
        try:
            health, _ = await self._get(replica, "/health")
            ready, text = await self._get(replica, "/ready")
            if health == ready == 200:
                await self._learn(replica)
        except (aiohttp.ClientError, OSError) as error:
            problem = str(error) or f"no answer in {self._settings.timeout_seconds:g} seconds"
            self._fleet.failed(replica, problem, refused=is_refusal(error))
            return
        problem = "" if health == ready == 200 else f"/health {health}, /ready {ready}: {text[:200]}"
        self._fleet.said(replica, alive=health == 200, ready=ready == 200, problem=problem)

    async def _learn(self, replica: Replica) -> None:
        """Its models, and the sequences it has from others than us."""
        status, text = await self._get(replica, "/metrics")
        if status == 200:
            replica.others = max(0.0, sum(map(float, _SEQUENCES.findall(text))) - replica.in_flight)
        status, text = await self._get(replica, "/v1/models")
        try:
            found = frozenset(model.id for model in msgspec.json.decode(text, type=_Models).data)
        except msgspec.MsgspecError:
            found = None
        if found is None and (replica.models is not None or not replica.alive):
            why = "give the router a key of it, SHARDLM_REPLICA_KEY" if status == 401 else text[:200]
            logging.warning("replica %s: /v1/models %d: %s; it is sent requests for any", replica.url, status, why)
        replica.models = found

    async def _get(self, replica: Replica, path: str) -> tuple[int, str]:
        async with self._client.get(replica.url + path, headers=self._headers, timeout=self._timeout) as response:
            return response.status, await response.text(errors="replace")

    async def resolve(self, name: str) -> None:
        """Replicas are where the name points to now. A name that cannot be looked up changes nothing."""
        host, port = parse_dns(name)
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            if name not in self._unknown:
                logging.warning("replica_dns=%s cannot be looked up: %s", name, error)
            self._unknown.add(name)
            return
        self._unknown.discard(name)
        hosts = {where[0] for *_, where in found}
        now = {f"http://[{one}]:{port}" if ":" in one else f"http://{one}:{port}" for one in hosts}
        before = {url for url, replica in self._fleet.replicas.items() if replica.source == name}
        for url in before - now:
            logging.warning("replica %s is gone from %s", url, name)
            self._fleet.remove(url)
        for url in now - set(self._fleet.replicas):
            self._fleet.add(url, name)


def _unless_under_way(looks: dict[Hashable, asyncio.Task], what: Hashable, look: Callable[[], Awaitable[None]]) -> None:
    if what not in looks:
        looks[what] = asyncio.create_task(_logged(look()))


async def _logged(look: Awaitable[None]) -> None:
    """A look that nobody foresaw ends no other."""
    try:
        await look
    except ShardlmError as error:
        logging.warning("%s", error)
    except Exception:
        logging.exception("a look at a replica failed")
