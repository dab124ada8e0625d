"""/v1/load_lora_adapter and /v1/unload_lora_adapter, vLLM's: adapters that come and go, for whoever holds the admin
key. Clients ask for one by its name, as for a model."""

import asyncio
from typing import Any

from shardlm.serve.adapter_table import LoRARequest
from shardlm.serve.api.errors import ApiError
from shardlm.serve.api.protocol import LoadAdapterRequest, UnloadAdapterRequest
from shardlm.serve.api.service import Call


async def load_adapter(call: Call, request: LoadAdapterRequest) -> dict[str, Any]:
    """Reads and loads to the end even where the client leaves meanwhile."""
    service, name, path = call.service, request.lora_name, request.lora_path
    for field, value in (("lora_name", name), ("lora_path", path)):
        if not value:
            raise ApiError('give {"lora_name": NAME, "lora_path": FOLDER}', param=field)
    if name in service.names:
        raise ApiError(f"lora_name={name!r} is the model's own name; choose another", param="lora_name")
    if name in service.adapters and not request.load_inplace:
        message = f"the adapter {name!r} is loaded; load_inplace=true puts this one in its place"
        raise ApiError(message, 409, param="lora_name", code="adapter_loaded")
    await asyncio.shield(asyncio.ensure_future(service.llm.load_adapter(LoRARequest(name, 0, path))))
    return {"success": True, "message": f"the adapter {name!r} is loaded from {path}"}


async def unload_adapter(call: Call, request: UnloadAdapterRequest) -> dict[str, Any]:
    service, name = call.service, request.lora_name
    if name not in service.adapters:
        raise ApiError(f"there is no adapter {name!r}", 404, param="lora_name", code="model_not_found")
    await asyncio.shield(asyncio.ensure_future(service.llm.unload_adapter(name)))
    return {"success": True, "message": f"the adapter {name!r} is gone; requests that run with it go on"}
