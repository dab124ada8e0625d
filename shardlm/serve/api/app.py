"""The application: which path is answered by what, who may call, and what is said of the server itself."""

import hmac

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from shardlm.serve.api import metrics
from shardlm.serve.api.chat import chat
from shardlm.serve.api.completions import completions
from shardlm.serve.api.embeddings import detokenize, embeddings, tokenize
from shardlm.serve.api.endpoint import Endpoint, error_response, json_response
from shardlm.serve.api.errors import ApiError, unavailable, unforeseen
from shardlm.serve.api.openapi import document
from shardlm.serve.api.page import POLICY, page
from shardlm.serve.api.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingsRequest,
    ResponsesRequest,
    TokenizeRequest,
)
from shardlm.serve.api.responses import responses
from shardlm.serve.api.service import Service
from shardlm.serve.api.settings import Settings
from shardlm.serve.outputs import EngineError

POSTS = {
    "/v1/chat/completions": (ChatRequest, chat),
    "/v1/completions": (CompletionRequest, completions),
    "/v1/responses": (ResponsesRequest, responses),
    "/v1/embeddings": (EmbeddingsRequest, embeddings),
    "/tokenize": (TokenizeRequest, tokenize),
    "/detokenize": (DetokenizeRequest, detokenize),
}
OPEN = ("/", "/health", "/ready", "/metrics", "/openapi.json")  # without a key


def make_app(llm, settings: Settings | None = None) -> Starlette:
    """The ASGI application over an AsyncLLM. `app.state.service` is what its requests share."""
    service = Service(llm, settings or Settings())
    about = _About(service)
    routes = [Route(path, Endpoint(service, *what), methods=["POST"]) for path, what in POSTS.items()]
    routes += [
        Route("/v1/models", about.models),
        Route("/v1/models/{name:path}", about.model),
        Route("/health", about.health),
        Route("/ready", about.ready),
        Route("/metrics", about.metrics),
        Route("/openapi.json", about.openapi),
        Route("/", about.page),
    ]
    middleware = [Middleware(_Guard, keys=service.settings.api_keys)]
    if origins := service.settings.cors_origins:
        middleware.insert(
            0, Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
        )
    handlers = {HTTPException: _http_error, ApiError: _api_error, Exception: _unforeseen}
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)
    app.state.service = service
    return app


class _About:
    """What can be asked about the server."""

    def __init__(self, service: Service):
        self._service = service

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._model(name) for name in self._service.names]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._service.check_model(name)
        return json_response(self._model(name))

    def _model(self, name: str) -> dict:
        about = {"id": name, "object": "model", "created": self._service.created, "owned_by": "shardlm"}
        return {**about, "root": self._service.llm.model_name, "max_model_len": self._service.llm.max_model_len}

    async def health(self, request: Request) -> Response:
        try:
            self._service.llm.check_health()
        except EngineError as error:
            raise unavailable(str(error)) from None
        return PlainTextResponse("ok")

    async def ready(self, request: Request) -> Response:
        if self._service.draining:
            raise unavailable("this server takes no new requests, since it is about to end")
        if not self._service.llm.ready:
            raise unavailable("the model is being made ready")
        return await self.health(request)

    async def metrics(self, request: Request) -> Response:
        text = self._service.metrics.text(self._service.llm.stats())
        return Response(text, media_type=metrics.TYPE)

    async def openapi(self, request: Request) -> Response:
        return json_response(document({path: model for path, (model, _) in POSTS.items()}))

    async def page(self, request: Request) -> Response:
        return HTMLResponse(page(), headers={"content-security-policy": POLICY})


class _Guard:
    """Asks for a key, where there are any."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]):
        self._app = app
        self._keys = [f"Bearer {key}".encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._keys and scope["path"] not in OPEN:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not any(hmac.compare_digest(given, key) for key in self._keys):
                message = "this server asks for a key it knows: Authorization: Bearer KEY"
                await error_response(ApiError(message, 401, code="invalid_api_key"))(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def _api_error(request: Request, error: ApiError) -> Response:
    return error_response(error)


async def _http_error(request: Request, error: HTTPException) -> Response:
    """No such path, or not by this method."""
    message = f"{request.method} {request.url.path}: {error.detail}"
    return error_response(ApiError(message, error.status_code, headers=error.headers))


async def _unforeseen(request: Request, error: Exception) -> Response:
    return error_response(unforeseen())
