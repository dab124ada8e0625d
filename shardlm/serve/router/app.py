"""The router's application: what it answers itself, what its administrator may do, and what the replicas answer."""

import asyncio
import logging

import aiohttp
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from shardlm.errors import ShardlmError
from shardlm.serve.api import metrics
from shardlm.serve.api.errors import ApiError, unavailable
from shardlm.serve.api.http import application, bears, json_response, read_body, version
from shardlm.serve.api.models import listed
from shardlm.serve.api.ollama import errors as ollama_errors
from shardlm.serve.router.fleet import Replica
from shardlm.serve.router.proxy import Proxy
from shardlm.serve.router.service import Router
from shardlm.serve.router.settings import RouterSettings

_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
_ADMIN = ("/admin/replicas", "/admin/drain", "/admin/undrain")
# Beside /v1/...
_OF_REPLICAS = (
    *("/invocations", "/score", "/rerank", "/v2/rerank", "/pooling", "/classify"),
    *("/tokenize", "/detokenize", "/tokenizer_info"),
)
# Without a client's key; an administrator's is another.
OPEN = ("/", "/health", "/ping", "/ready", "/version", "/metrics", *_ADMIN)


def make_app(settings: RouterSettings) -> Starlette:
    """The ASGI application. `app.state.service` is the Router. Raises ShardlmError for settings that cannot be."""
    router = Router(settings)
    own, admin, proxy = _Own(router), _Admin(router), Proxy(router)
    routes = [
        Route("/health", own.health),
        Route("/ping", own.health, methods=["GET", "POST"]),
        Route("/ready", own.ready),
        Route("/version", version),
        Route("/metrics", own.metrics),
        Route("/", own.health),  # which Ollama's clients look at first
        Route("/v1/models", own.models),
        *(Route(path, own.ollamas_models) for path in ("/api/tags", "/api/ps")),
        Route("/admin/replicas", admin.list, methods=["GET"]),
        Route("/admin/replicas", admin.add, methods=["POST"]),
        Route("/admin/replicas", admin.remove, methods=["DELETE"]),
        Route("/admin/drain", admin.drain, methods=["POST"]),
        Route("/admin/undrain", admin.undrain, methods=["POST"]),
        *(Route(f"/{root}/{{path:path}}", proxy, methods=_METHODS) for root in ("v1", "api")),
        *(Route(path, proxy, methods=_METHODS) for path in _OF_REPLICAS),
    ]
    return application(router, routes, settings, OPEN, lifespan=router.running)


class _Own:
    """What can be asked about the router, and what the replicas answer together."""

    def __init__(self, router: Router):
        self._router = router

    async def health(self, request: Request) -> Response:
        return PlainTextResponse("ok")

    async def ready(self, request: Request) -> Response:
        self._router.check_open()
        if not self._router.fleet.taking():
            raise unavailable("no replica takes requests now")
        return PlainTextResponse("ok")

    async def metrics(self, request: Request) -> Response:
        text = self._router.metrics.text(self._router.fleet.replicas.values())
        return Response(text, media_type=metrics.TYPE)

    async def models(self, request: Request) -> Response:
        status, told = await self._told(request)
        if status != 200:
            return json_response(told[0], status)
        models = {model["id"]: model for body in reversed(told) for model in body.get("data", ())}
        return json_response(listed([models[name] for name in sorted(models)]))

    async def ollamas_models(self, request: Request) -> Response:
        status, told = await self._told(request)
        if status != 200:
            return json_response(told[0], status)
        models = {model["name"]: model for body in reversed(told) for model in body.get("models", ())}
        return json_response({"models": [models[name] for name in sorted(models)]})

    async def _told(self, request: Request) -> tuple[int, list[dict]]:
        """(status, what the replicas tell of their models to whoever asks, with the caller's own key, or what the first
        one says is wrong). Raises ApiError where there is none."""
        replicas = self._router.fleet.taking()
        if not replicas:
            raise unavailable("no replica takes requests now; try again later")
        answers = await asyncio.gather(*(self._models_of(replica, request) for replica in replicas))
        told = [body for status, body in answers if status == 200]
        return (200, told) if told else (answers[0][0], [answers[0][1]])

    async def _models_of(self, replica: Replica, request: Request) -> tuple[int, dict]:
        """Status and body."""
        headers = {name: value for name, value in request.headers.items() if name in ("authorization", "x-api-key")}
        timeout = aiohttp.ClientTimeout(total=self._router.settings.timeout_seconds)
        client = self._router.client
        try:
            async with client.get(f"{replica.url}{request.url.path}", headers=headers, timeout=timeout) as response:
                return response.status, msgspec.json.decode(await response.read(), type=dict)
        except (aiohttp.ClientError, OSError, msgspec.MsgspecError) as error:
            logging.warning("replica %s did not tell its models: %s", replica.url, error)
            self._router.fleet.wake.set()
            wrong = unavailable("a replica did not tell its models; try again")
            return 503, ollama_errors.body(wrong) if ollama_errors.is_ollamas(request.url.path) else wrong.body()


class _Named(msgspec.Struct):
    url: str


class _Admin:
    """Which replicas there are, and which of them are drained."""

    def __init__(self, router: Router):
        self._router = router

    async def list(self, request: Request) -> Response:
        self._check(request)
        return self._about(*self._router.fleet.replicas.values())

    async def add(self, request: Request) -> Response:
        """Takes requests once it was looked at and is ready."""
        url = await self._url(request)
        try:
            return self._about(self._router.fleet.add(url, "admin"))
        except ShardlmError as error:
            raise ApiError(str(error), param="url") from None

    async def remove(self, request: Request) -> Response:
        """What it has under way goes on."""
        fleet = self._router.fleet
        replica = fleet.find(await self._url(request))
        if replica.source in self._router.settings.replica_dns:
            message = f"{replica.url} is in {replica.source}, where it would be found again; drain it instead"
            raise ApiError(message, 409, param="url")
        fleet.remove(replica.url)
        return self._about(replica)

    async def drain(self, request: Request) -> Response:
        return await self._drained(request, True)

    async def undrain(self, request: Request) -> Response:
        return await self._drained(request, False)

    async def _drained(self, request: Request, drained: bool) -> Response:
        replica = self._router.fleet.find(await self._url(request))
        replica.drained = drained
        return self._about(replica)

    def _about(self, *replicas: Replica) -> Response:
        return json_response({"data": [replica.about() for replica in replicas]})

    def _check(self, request: Request) -> None:
        """Raises ApiError for who is no administrator."""
        keys = self._router.settings.admin_keys
        if not keys:
            message = "this router has no administrator; start it with SHARDLM_ADMIN_KEY to have one"
            raise ApiError(message, 403, code="no_admin_key")
        if not bears(request.scope, keys):
            message = "this asks for an administrator's key: Authorization: Bearer KEY"
            raise ApiError(message, 401, code="invalid_api_key")

    async def _url(self, request: Request) -> str:
        """Of the replica that the body names, once the caller may."""
        self._check(request)
        settings = self._router.settings
        body = await read_body(request.scope, request.receive, settings.max_body, settings.read_seconds)
        try:
            return msgspec.json.decode(body, type=_Named).url
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise ApiError(f'the body must be {{"url": "http://HOST:PORT"}}: {error}', param="url") from None
