"""Replicas, and a router before them, on sockets: servers over a fake engine, and one that does what a test wants."""

import asyncio
import contextlib
import json
import threading
import urllib.error
import urllib.request

import openai
from prometheus_client.parser import text_string_to_metric_families
from sockets import listens, until

from shardlm.serve.api import app as server_app
from shardlm.serve.api.settings import Settings
from shardlm.serve.router.app import make_app
from shardlm.serve.router.settings import RouterSettings


def serving(llm, *, listen=None, **settings):
    """A server over a fake engine: (it, its address)."""
    return listens(server_app.make_app(llm, Settings(**settings)), listen=listen)


SSE = "content-type: text/event-stream; charset=utf-8"


class Routing:
    """A router in front of `urls`; `service` is what its requests share."""

    def __init__(self, server, address):
        self.server, self.address, self.service = server, address, server._service

    def replica(self, url):
        return self.service.fleet.replicas[url]

    def ask(self, path, body=None, key="", method=None):
        """(status, headers, body)."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"authorization": f"Bearer {key}"} if key else {}
        request = urllib.request.Request(f"{self.address}{path}", data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, response.headers, response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.headers, error.read()


@contextlib.contextmanager
def routing(*urls, ready=None, listen=None, **settings):
    """Once `ready` of the replicas take requests; by default all."""
    settings = {"poll_seconds": 0.05, "timeout_seconds": 60, **settings}
    with listens(make_app(RouterSettings(replicas=urls, **settings)), listen=listen) as where:
        made = Routing(*where)
        wanted = len(urls) if ready is None else ready
        until(lambda: len(made.service.fleet.taking()) >= wanted)
        yield made


class Rude:
    """A replica of raw sockets. `behave(head, body, writer)` answers what is not about itself; `status` is that of
    /health and /ready, None where it leaves them unanswered; `asked` holds the requests."""

    def __init__(self, behave, models=("fake",)):
        self.behave, self.status, self.models, self.asked = behave, 200, models, []

    @contextlib.contextmanager
    def listens(self):
        """Its address."""
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        server = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._serve, "127.0.0.1", 0), loop).result()
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            loop.call_soon_threadsafe(server.close)
            asyncio.run_coroutine_threadsafe(self._end(), loop).result(60)
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    async def _end(self):
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # one that has not begun suppresses nothing yet

    async def _serve(self, reader, writer):
        ends = asyncio.IncompleteReadError, OSError, asyncio.CancelledError
        with contextlib.suppress(*ends), contextlib.closing(writer):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            lines = head.lower().split("\r\n")
            length = next((int(line.split(":")[1]) for line in lines if line.startswith("content-length:")), 0)
            body = await reader.readexactly(length)
            path = head.split()[1]
            if path in ("/health", "/ready") and self.status is None:
                await asyncio.sleep(100)
            elif path in ("/health", "/ready", "/metrics"):
                writer.write(whole(self.status, b""))
            elif path == "/v1/models":
                writer.write(whole(200, json.dumps({"data": [{"id": name} for name in self.models]}).encode()))
            else:
                self.asked.append((head, body))
                await self.behave(head, body, writer)
            await writer.drain()


def whole(status, body, *headers):
    lines = [f"HTTP/1.1 {status} X", "connection: close", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def client_of(routed, key="none", **options):
    return openai.OpenAI(base_url=f"{routed.address}/v1", api_key=key, max_retries=0, timeout=60, **options)


def metrics_of(routed):
    """{(name, labels...): value}."""
    found = {}
    for family in text_string_to_metric_families(routed.ask("/metrics")[2].decode()):
        assert family.documentation
        found.update({(s.name.removeprefix("shardlm_router_"), *s.labels.values()): s.value for s in family.samples})
    return found


@contextlib.contextmanager
def two(*llms, **settings):
    """(a router, the addresses of two servers over fake engines)."""
    with serving(llms[0]) as (_, a), serving(llms[1]) as (_, b), routing(a, b, **settings) as routed:
        yield routed, a, b
