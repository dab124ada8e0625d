"""/reset_prefix_cache, which vLLM has for developers and is for whoever holds the admin key here: measurements and
trainers begin with nothing cached. What is asked stands in the address."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from shardlm.serve.api.errors import ApiError, as_api_error
from shardlm.serve.api.http import json_response
from shardlm.serve.api.protocol import ResetPrefixCache
from shardlm.serve.outputs import EngineError


async def reset_prefix_cache(request: Request) -> Response:
    """vLLM answers 200 whether it has reset anything or not; here 409 says that it has not."""
    service = request.app.state.service
    service.check_open()
    try:
        asked = msgspec.convert(dict(request.query_params), ResetPrefixCache, strict=False)
    except msgspec.ValidationError as error:
        raise ApiError(f"{request.url.query:.200}: {error}; give true or false") from None
    if asked.reset_external:
        message = "reset_external=true: no cache is kept outside of the engine; leave it out"
        raise ApiError(message, param="reset_external")
    try:
        done = await service.llm.reset_prefix_cache(asked.reset_running_requests)
    except EngineError as error:
        raise as_api_error(error) from None
    if not done:
        raise ApiError(
            "requests run, whose pages are shared: ask when they have ended, or with ?reset_running_requests=true, "
            "which computes them anew",
            409,
            code="requests_running",
        )
    return json_response({"success": True, "message": "the prefix cache is empty"})
