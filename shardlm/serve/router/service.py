"""What all requests share: the replicas, the counts, the connections."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import aiohttp
from starlette.applications import Starlette

from shardlm.serve.api.http import Serving
from shardlm.serve.router.fleet import Fleet
from shardlm.serve.router.metrics import Metrics
from shardlm.serve.router.policy import Policy
from shardlm.serve.router.settings import RouterSettings
from shardlm.serve.router.upstream import session, trust
from shardlm.serve.router.watch import Watch


class Router(Serving):
    """`client` is there while `running`. Raises ShardlmError for replicas that cannot be."""

    client: aiohttp.ClientSession

    def __init__(self, settings: RouterSettings):
        super().__init__()
        self.settings = settings
        self.metrics = Metrics()
        self.fleet = Fleet(Policy(settings.balance_threshold, settings.least_match))
        self._trusted = trust(settings.replica_ca)
        for url in settings.replicas:
            self.fleet.add(url, "flag")

    @contextlib.asynccontextmanager
    async def running(self, app: Starlette) -> AsyncIterator[None]:
        """The lifespan of the application: replicas are looked at."""
        async with session(self.settings.timeout_seconds, self._trusted) as self.client:
            watch = asyncio.create_task(Watch(self.fleet, self.settings, self.client).run())
            try:
                yield
            finally:
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)
