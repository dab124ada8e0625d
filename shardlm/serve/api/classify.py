"""/classify and /pooling, vLLM's: what a model that classifies says of texts, and what any makes of last tokens."""

from typing import Any

import numpy as np

from shardlm.serve.api.embeddings import embedded
from shardlm.serve.api.errors import ApiError
from shardlm.serve.api.pooled import pooled
from shardlm.serve.api.protocol import ClassifyRequest, PoolingRequest
from shardlm.serve.api.service import Call


async def classify(call: Call, request: ClassifyRequest) -> dict[str, Any]:
    classes, total = await classified(call, request)
    labels = call.service.llm.pooling.need_classifier().labels
    data = [
        {"index": i, "label": labels[int(np.argmax(one))], "probs": one, "num_classes": len(one)}
        for i, one in enumerate(classes)
    ]
    return _answer(call, "classify", request.model, data, total)


async def pooling(call: Call, request: PoolingRequest) -> dict[str, Any]:
    """Vectors as /v1/embeddings has them or, of models that classify, what they say of each text."""
    does = call.service.llm.pooling
    task = request.task or ("classify" if does.classifier else "embed")
    if task == "embed":
        found, total = await embedded(call, request)
    elif task == "classify":
        if request.dimensions is not None or request.encoding_format not in (None, "float"):
            raise ApiError("dimensions and encoding_format are of embeddings; leave them out", param="dimensions")
        found, total = await classified(call, request)
    else:
        message = f"task={task!r:.50} must be embed or classify: what is made of each token of a text is not told"
        raise ApiError(message, param="task")
    data = [{"index": i, "object": "pooling", "data": one} for i, one in enumerate(found)]
    return _answer(call, "pool", request.model, data, total)


async def classified(call: Call, request: ClassifyRequest | PoolingRequest) -> tuple[list[list[float]], int]:
    """(of each prompt its classes, their tokens together). Raises as `pooled`, and ShardlmError where the model does
    not classify."""
    classifier = call.service.llm.pooling.need_classifier()
    vectors, total = await pooled(call, request)
    activate = request.use_activation is not False and getattr(request, "activation", None) is not False
    return [classifier.classes(one, activate) for one in vectors], total


def _answer(call: Call, kind: str, model: str | None, data: list[dict[str, Any]], total: int) -> dict[str, Any]:
    about = {"id": f"{kind}-{call.id}", "object": "list", "created": call.created}
    usage = {"prompt_tokens": total, "total_tokens": total}
    return {**about, "model": model or call.service.names[0], "data": data, "usage": usage}
