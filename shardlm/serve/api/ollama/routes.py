"""Which of Ollama's paths is answered by what."""

import msgspec
from starlette.routing import BaseRoute, Route

from shardlm.serve.adapter_table import LoRARequest
from shardlm.serve.api.endpoint import Endpoint
from shardlm.serve.api.errors import ApiError
from shardlm.serve.api.ollama.chat import chat
from shardlm.serve.api.ollama.embed import embed, embeddings
from shardlm.serve.api.ollama.generate import generate
from shardlm.serve.api.ollama.models import Models, pull, refused, show, version
from shardlm.serve.api.ollama.names import known_as
from shardlm.serve.api.ollama.protocol import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaPullRequest,
    OllamaShowRequest,
)
from shardlm.serve.api.service import Service

POSTS = {
    "/api/chat": (OllamaChatRequest, chat),
    "/api/generate": (OllamaGenerateRequest, generate),
    "/api/embed": (OllamaEmbedRequest, embed),
    "/api/embeddings": (OllamaEmbeddingsRequest, embeddings),
    "/api/show": (OllamaShowRequest, show),
    "/api/pull": (OllamaPullRequest, pull),
}
_UNLOADED = ("/api/show", "/api/pull")  # of POSTS, those that leave the devices alone
_REFUSED = ("/api/create", "/api/copy", "/api/push", "/api/delete", "/api/blobs/{digest:path}")


class OllamaEndpoint(Endpoint):
    """Streams unless told otherwise, and names models as Ollama does."""

    def parse(self, body: bytes) -> tuple[msgspec.Struct, int]:
        request, ignored = super().parse(body)
        request.model = request.model or request.name
        if not request.model:
            raise ApiError("model is required", param="model")
        if getattr(request, "stream", False) is None:
            request.stream = True
        return request, ignored

    def adapter_of(self, request: msgspec.Struct) -> LoRARequest | None:
        names = [*self.service.names, *self.service.adapters]
        return self.service.adapter_of(known_as(request.model, names) or request.model)


def routes(service: Service) -> list[BaseRoute]:
    models = Models(service)
    posts = {path: OllamaEndpoint(service, *what, loads=path not in _UNLOADED) for path, what in POSTS.items()}
    return [
        *(Route(path, endpoint, methods=["POST"]) for path, endpoint in posts.items()),
        Route("/api/tags", models.tags),
        Route("/api/ps", models.ps),
        Route("/api/version", version),
        *(Route(path, refused, methods=["POST", "DELETE", "HEAD"]) for path in _REFUSED),
    ]
