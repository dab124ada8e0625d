"""/api/embed, and /api/embeddings, its older form of one prompt."""

import time
from collections.abc import Sequence

import numpy as np

from shardlm.serve.api.errors import ApiError
from shardlm.serve.api.ollama import options
from shardlm.serve.api.ollama.protocol import OllamaEmbeddingsRequest, OllamaEmbedRequest
from shardlm.serve.api.pooled import vectors_of
from shardlm.serve.api.protocol import Json
from shardlm.serve.api.service import Call


async def embed(call: Call, request: OllamaEmbedRequest) -> Json:
    _tell(call, request)
    texts = [request.input] if isinstance(request.input, str) else request.input or []
    texts = [] if texts == [""] else texts  # to have the model loaded, as it is
    if not all(texts):
        raise ApiError("input has an empty text; give texts of one token or more", param="input")
    pooling, dimensions = call.service.llm.pooling, request.dimensions or None  # which Go's clients leave at 0
    pooling.check(dimensions)
    vectors, total = await _vectors(call, texts, bool(request.truncate))
    return {
        "model": request.model,
        "embeddings": [pooling.vector(vector, dimensions) for vector in vectors],
        "total_duration": round((time.perf_counter() - call.began) * 1_000_000_000),
        "load_duration": 0,
        "prompt_eval_count": total,
    }


async def embeddings(call: Call, request: OllamaEmbeddingsRequest) -> Json:
    _tell(call, request)
    vectors, _ = await _vectors(call, [request.prompt] if request.prompt else [], False)
    return {"embedding": call.service.llm.pooling.vector(vectors[0]) if vectors else []}


def _tell(call: Call, request: OllamaEmbedRequest | OllamaEmbeddingsRequest) -> None:
    options.tell(call.service, {**(request.options or {}), "keep_alive": request.keep_alive})


async def _vectors(call: Call, texts: Sequence[str], truncate: bool) -> tuple[Sequence[np.ndarray], int]:
    """`truncate`: of a text that is too long the beginning is read, as Ollama has it."""
    if not texts:
        return [], 0
    return await vectors_of(call, texts, -1 if truncate else None)
