"""/update_weights: other weights of the model that is served, for whoever holds the admin key."""

import asyncio
import time
from typing import Any

from shardlm.serve.api.errors import ApiError
from shardlm.serve.api.protocol import UpdateWeightsRequest
from shardlm.serve.api.service import Call, Service


async def update_weights(call: Call, request: UpdateWeightsRequest) -> dict[str, Any]:
    """Reads and swaps to the end even where the client leaves meanwhile."""
    service, path = call.service, request.path or request.model_path
    if not path or (request.path and request.model_path):
        raise ApiError('give the path of a checkpoint: {"path": RUN_OR_FOLDER}', param="path")
    if service.updating is not None and not service.updating.done():
        raise ApiError("other weights are being read; ask again when that has ended", 409, code="update_under_way")
    started = time.perf_counter()
    service.updating = asyncio.ensure_future(_swap(service, path, request.draft))
    running = await asyncio.shield(service.updating)
    seconds = time.perf_counter() - started
    drafts = f", its drafts come from {request.draft}" if request.draft else ""
    message = f"{path} is served{drafts}; the prefix cache is empty and {running} requests go on with the new weights"
    return {"success": True, "message": message, "path": path, "seconds": seconds, "num_running": running}


async def _swap(service: Service, path: str, draft: str | None) -> int:
    running = await service.llm.update_weights(path, draft)
    service.root = path
    return running
