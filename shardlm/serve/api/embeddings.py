"""/v1/embeddings."""

import array
import base64
import sys
from collections.abc import Sequence
from typing import Any

from shardlm.serve.api.errors import ApiError
from shardlm.serve.api.pooled import pooled
from shardlm.serve.api.protocol import EmbeddingsRequest
from shardlm.serve.api.service import Call


async def embeddings(call: Call, request: EmbeddingsRequest) -> dict[str, Any]:
    vectors, total = await embedded(call, request)
    data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(vectors)]
    usage = {"prompt_tokens": total, "total_tokens": total}
    return {"object": "list", "data": data, "model": request.model or call.service.names[0], "usage": usage}


async def embedded(call: Call, request: EmbeddingsRequest) -> tuple[list[str | list[float]], int]:
    """(the vector of each prompt as it is asked for, their tokens together). Raises as `pooled`."""
    pooling = call.service.llm.pooling
    pooling.check(request.dimensions)
    if None not in (request.normalize, request.use_activation) and request.normalize != request.use_activation:
        raise ApiError("normalize and use_activation are two names of one wish and differ; give one", param="normalize")
    whole = request.normalize is not False and request.use_activation is not False
    coded = _base64 if request.encoding_format == "base64" else list
    vectors, total = await pooled(call, request)
    return [coded(pooling.vector(one, request.dimensions, whole)) for one in vectors], total


def _base64(vector: Sequence[float]) -> str:
    """float32, little-endian."""
    numbers = array.array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()
