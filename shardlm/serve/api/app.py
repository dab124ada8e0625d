"""The application: which path is answered by what, who may call, and what is said of the server itself."""

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route, request_response
from starlette.types import ASGIApp, Receive, Scope, Send

from shardlm.serve.api import metrics
from shardlm.serve.api.adapters import load_adapter, unload_adapter
from shardlm.serve.api.batches.routes import BatchRequest
from shardlm.serve.api.batches.routes import routes as batch_routes
from shardlm.serve.api.batches.service import Batches
from shardlm.serve.api.chat import chat
from shardlm.serve.api.classify import classify, pooling
from shardlm.serve.api.completions import completions
from shardlm.serve.api.embeddings import embeddings
from shardlm.serve.api.endpoint import Endpoint
from shardlm.serve.api.errors import ApiError, unavailable
from shardlm.serve.api.http import application, bears, json_response, version
from shardlm.serve.api.invocations import Invocations
from shardlm.serve.api.messages import count_tokens, messages
from shardlm.serve.api.models import listed, told
from shardlm.serve.api.ollama import routes as ollama
from shardlm.serve.api.openapi import document
from shardlm.serve.api.page import POLICY, page
from shardlm.serve.api.prefix_cache import reset_prefix_cache
from shardlm.serve.api.protocol import (
    ChatRequest,
    ClassifyRequest,
    CompletionRequest,
    CountTokensRequest,
    DetokenizeRequest,
    EmbeddingsRequest,
    LoadAdapterRequest,
    MessagesRequest,
    PoolingRequest,
    RerankRequest,
    ResetPrefixCache,
    ResponsesRequest,
    ScoreRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
    UpdateWeightsRequest,
)
from shardlm.serve.api.responses import input_tokens, responses
from shardlm.serve.api.scores import rerank, score
from shardlm.serve.api.service import Service
from shardlm.serve.api.settings import Settings
from shardlm.serve.api.tokenize import detokenize, tokenize, tokenizer_info
from shardlm.serve.api.update_weights import update_weights
from shardlm.serve.outputs import EngineError

POSTS = {
    "/v1/chat/completions": (ChatRequest, chat),
    "/v1/completions": (CompletionRequest, completions),
    "/v1/responses": (ResponsesRequest, responses),
    "/v1/responses/input_tokens": (ResponsesRequest, input_tokens),
    "/v1/messages": (MessagesRequest, messages),
    "/v1/messages/count_tokens": (CountTokensRequest, count_tokens),
    "/v1/embeddings": (EmbeddingsRequest, embeddings),
    "/pooling": (PoolingRequest, pooling),
    "/classify": (ClassifyRequest, classify),
    **dict.fromkeys(("/score", "/v1/score"), (ScoreRequest, score)),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), (RerankRequest, rerank)),
    "/tokenize": (TokenizeRequest, tokenize),
    "/detokenize": (DetokenizeRequest, detokenize),
}
ADMIN = {
    "/v1/load_lora_adapter": (LoadAdapterRequest, load_adapter),
    "/v1/unload_lora_adapter": (UnloadAdapterRequest, unload_adapter),
    "/update_weights": (UpdateWeightsRequest, update_weights),
    "/update_weights_from_disk": (UpdateWeightsRequest, update_weights),  # SGLang's name
}
# The same, asked for in the address; the second is SGLang's name.
ADMIN_BY_ADDRESS = dict.fromkeys(("/reset_prefix_cache", "/flush_cache"), (ResetPrefixCache, reset_prefix_cache))
# Of POSTS, those that leave the devices alone.
UNLOADED = ("/v1/messages/count_tokens", "/v1/responses/input_tokens", "/tokenize", "/detokenize")
# Without a client's key.
OPEN = ("/", "/health", "/ping", "/ready", "/version", "/metrics", "/load", "/openapi.json", *ADMIN, *ADMIN_BY_ADDRESS)


def make_app(llm, settings: Settings | None = None) -> Starlette:
    """The ASGI application over an AsyncLLM. `app.state.service` is what its requests share."""
    service = Service(llm, settings or Settings())
    about = _About(service)
    keys = service.settings.admin_keys
    admins = {path: Endpoint(service, *what, loads=False) for path, what in ADMIN.items()}
    admins |= {path: request_response(handler) for path, (_, handler) in ADMIN_BY_ADDRESS.items()}
    handlers, options = endpoints(service), {}
    routes: list[BaseRoute] = [Route(path, handler, methods=["POST"]) for path, handler in handlers.items()]
    routes += [Route(path, _ForAdmin(app, keys), methods=["POST"]) for path, app in admins.items()]
    routes += [
        Route("/v1/models", about.models),
        Route("/v1/models/{name:path}", about.model),
        Route("/tokenizer_info", about.tokenizer_info),
        Route("/health", about.health),
        Route("/ping", about.health, methods=["GET", "POST"]),  # this and the next are Amazon SageMaker's
        Route("/invocations", Invocations(service), methods=["POST"]),
        Route("/ready", about.ready),
        Route("/version", version),
        Route("/metrics", about.metrics),
        Route("/load", about.load),
        Route("/openapi.json", about.openapi),
        Route("/", about.page),
        *ollama.routes(service),
    ]
    if folder := service.settings.batch_dir:
        batches = Batches(service, handlers, folder)
        routes += batch_routes(batches)
        options["lifespan"] = batches.running
    return application(service, routes, service.settings, OPEN, **options)


def endpoints(service: Service) -> dict[str, Endpoint]:
    """Of what clients ask the model, by path."""
    return {path: Endpoint(service, *what, loads=path not in UNLOADED) for path, what in POSTS.items()}


class _About:
    """What can be asked about the server."""

    def __init__(self, service: Service):
        self._service = service

    async def models(self, request: Request) -> Response:
        names = [*self._service.names, *self._service.adapters]
        return json_response(listed([self._model(name) for name in names]))

    async def model(self, request: Request) -> Response:
        name = self._service.known(request.path_params["name"])
        self._service.adapter_of(name)
        return json_response(self._model(name))

    def _model(self, name: str) -> dict:
        service = self._service
        adapter = service.adapters.get(name)
        root = {"root": adapter.path, "parent": service.names[0]} if adapter else {"root": service.root}
        return told(name, service.created, service.llm.max_model_len, service.sees) | root

    async def tokenizer_info(self, request: Request) -> Response:
        return json_response(tokenizer_info(self._service.llm))

    async def health(self, request: Request) -> Response:
        try:
            self._service.llm.check_health()
        except EngineError as error:
            raise unavailable(str(error)) from None
        return PlainTextResponse("ok")

    async def ready(self, request: Request) -> Response:
        self._service.check_open()
        if not self._service.llm.ready:
            raise unavailable("the model is being made ready")
        return await self.health(request)

    async def metrics(self, request: Request) -> Response:
        llm = self._service.llm
        text = self._service.metrics.text(llm.stats(), llm.images)
        return Response(text, media_type=metrics.TYPE)

    async def load(self, request: Request) -> Response:
        """As vLLM's /load: requests under way that have, or wait for, the devices."""
        return json_response({"server_load": self._service.load})

    async def openapi(self, request: Request) -> Response:
        bodies = {path: model for path, (model, _) in (POSTS | ollama.POSTS | ADMIN).items()}
        addressed = {path: model for path, (model, _) in ADMIN_BY_ADDRESS.items()}
        batch = BatchRequest if self._service.settings.batch_dir else None
        return json_response(document(bodies, addressed, batch))

    async def page(self, request: Request) -> Response:
        return HTMLResponse(page(), headers={"content-security-policy": POLICY})


class _ForAdmin:
    """An endpoint that changes what is served: it asks for a key of its own, and without any refuses."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]):
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._keys:
            message = "this server has no administrator; start it with SHARDLM_ADMIN_KEY to have one"
            raise ApiError(message, 403, code="no_admin_key")
        if not bears(scope, self._keys):
            message = "this asks for an administrator's key: Authorization: Bearer KEY"
            raise ApiError(message, 401, code="invalid_api_key")
        await self._app(scope, receive, send)
