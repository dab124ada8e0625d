"""/invocations, where Amazon SageMaker sends whatever its endpoint is asked, as to vLLM's: a chat, a completion, or
what is to be embedded, told by the field that each of them needs."""

from collections.abc import Mapping
from typing import Any

import msgspec

from shardlm.serve.api.chat import chat
from shardlm.serve.api.completions import completions
from shardlm.serve.api.embeddings import embeddings
from shardlm.serve.api.endpoint import Endpoint, Events
from shardlm.serve.api.errors import ApiError
from shardlm.serve.api.protocol import ChatRequest, CompletionRequest, EmbeddingsRequest, parse
from shardlm.serve.api.service import Call, Service

_BY_FIELD = {
    "messages": (ChatRequest, chat),
    "prompt": (CompletionRequest, completions),
    "input": (EmbeddingsRequest, embeddings),
}


class _Any(msgspec.Struct):
    """Which of them are there; what they are is another's to say."""

    messages: Any = None
    prompt: Any = None
    input: Any = None


class Invocations(Endpoint):
    def __init__(self, service: Service):
        super().__init__(service, _Any, _answer)

    def parse(self, body: bytes) -> tuple[msgspec.Struct, int]:
        there, _ = parse(body, _Any)
        for field, (model, _) in _BY_FIELD.items():
            if getattr(there, field) is not None:
                return parse(body, model)
        raise ApiError("the body has no messages, prompt or input; one of them says what is asked for")


async def _answer(call: Call, request: msgspec.Struct) -> Mapping[str, Any] | Events:
    handler = next(handler for model, handler in _BY_FIELD.values() if isinstance(request, model))
    return await handler(call, request)
