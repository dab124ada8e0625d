"""/api/generate: one prompt, which the chat template makes a conversation of unless it is raw or there is none."""

from collections.abc import AsyncIterator

from shardlm.errors import ShardlmError
from shardlm.serve.api import conversation
from shardlm.serve.api.endpoint import Events
from shardlm.serve.api.errors import ApiError
from shardlm.serve.api.ollama import options
from shardlm.serve.api.ollama.lines import Reply, Said, as_response, head
from shardlm.serve.api.ollama.messages import image_parts, with_images
from shardlm.serve.api.ollama.protocol import OllamaGenerateRequest
from shardlm.serve.api.protocol import ChatRequest, CompletionRequest, Json
from shardlm.serve.api.sampling import sampling_params
from shardlm.serve.api.service import Call
from shardlm.serve.api.tools.choose import Tools
from shardlm.serve.api.turns import Asked, begin
from shardlm.serve.outputs import RequestOutput

_OWN_TEMPLATE = "the model's own is used; raw=true takes a prompt as it is"
_INSERT = "does not support insert: write suffix into a raw prompt, as the model's own format has it"


async def generate(call: Call, request: OllamaGenerateRequest) -> Json | Events:
    top, wishes = options.top_logprobs(request), options.sampled(call.service, request)
    _check(request)
    images = image_parts(request.images, "images", call.service.sees)
    if not request.prompt and not images:  # to have the model loaded, as it is
        return head(request.model) | as_response(Said()) | {"done": True, "done_reason": "load"}
    plain = request.raw or call.service.llm.template is None
    if plain and request.system:
        message = "system needs a chat template, and this model has none; write it into the prompt"
        raise ApiError(message, param="system")
    if plain and images:
        raise ApiError("images need the chat template, which writes their places; leave raw out", param="images")
    try:
        ask = _plain if plain else _through_template
        asked, replies = await ask(call, request, top, wishes)
    except (ApiError, ShardlmError) as error:
        raise options.in_own_words(error) from None
    # With images its tokens would stand for some that the next request does not have.
    reply = Reply(call, request.model, asked, as_response, top, keeps=not request.raw and not images)
    return await reply.answer(replies, request.stream is not False)


def _check(request: OllamaGenerateRequest) -> None:
    """Raises ApiError for what is not supported."""
    if request.raw and (request.template or request.system or request.context):
        raise ApiError("raw mode does not support template, system, or context", param="raw")
    if request.template:
        raise ApiError(f"template is not supported; {_OWN_TEMPLATE}", param="template")
    if request.suffix:
        raise ApiError(f'"{request.model}" {_INSERT}', param="suffix")


async def _through_template(
    call: Call, request: OllamaGenerateRequest, top: int | None, wishes: Json
) -> tuple[Asked, AsyncIterator[RequestOutput]]:
    system = [{"role": "system", "content": request.system}] if request.system else []
    parts = image_parts(request.images, "images", call.service.sees)
    content = with_images(parts, request.prompt) if parts else request.prompt
    asked = ChatRequest(
        messages=[*system, {"role": "user", "content": content}],
        logprobs=top is not None,
        top_logprobs=top,
        **wishes,
        **options.thinking(call.service, request),
    )
    return await begin(call, asked, request.context or ())


async def _plain(
    call: Call, request: OllamaGenerateRequest, top: int | None, wishes: Json
) -> tuple[Asked, AsyncIterator[RequestOutput]]:
    """As /v1/completions has it: what is written is the reply, thoughts and calls too."""
    options.thinking(call.service, request)  # refused where there are none
    llm, wish = call.service.llm, CompletionRequest(prompt=request.prompt, **wishes)
    limits = {"max_tokens": wish.max_tokens, "logprobs": top}
    params = sampling_params(wish, llm.max_model_len, call.service.settings.sampling, **limits)
    prompt: str | list[int] = request.prompt
    if request.context:
        encode, truncates = llm.tokenizer.encode, bool(request.truncate)
        prompt = [*request.context, *await conversation.tokens(call.service, request.prompt, encode, truncates)]
    replies = await call.replies([prompt], params)
    asked = Asked(Tools(), None, llm.tokenizer, params.skip_special_tokens, request.prompt)
    return asked, (output async for _, output in replies)
