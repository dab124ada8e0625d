"""/api/chat: a chat, asked and answered as Ollama's clients do."""

from collections.abc import Iterator, Sequence

import msgspec

from shardlm.errors import ShardlmError
from shardlm.serve.api.endpoint import Events
from shardlm.serve.api.errors import ApiError
from shardlm.serve.api.ollama import options
from shardlm.serve.api.ollama.lines import Reply, Said, as_message, head
from shardlm.serve.api.ollama.messages import chat_messages, functions, goes_on
from shardlm.serve.api.ollama.protocol import OllamaChatRequest
from shardlm.serve.api.protocol import ChatRequest, Json
from shardlm.serve.api.service import Call
from shardlm.serve.api.truncation import fewest_left_out
from shardlm.serve.api.turns import begin
from shardlm.serve.request import PromptTooLong


async def chat(call: Call, request: OllamaChatRequest) -> Json | Events:
    top, wishes = options.top_logprobs(request), options.sampled(call.service, request)
    if not request.messages:  # to have the model loaded, as it is
        return head(request.model) | as_message(Said()) | {"done": True, "done_reason": "load"}
    if call.service.llm.template is None:
        why = "it has no chat template, and continues plain text at /api/generate"
        raise ApiError(f'"{request.model}" does not support chat: {why}', param="messages")
    wishes.pop("truncate_prompt_tokens", None)  # whole turns are left out, as templates refuse half of one
    asked = ChatRequest(
        messages=chat_messages(request.messages, call.service.sees),
        tools=functions(request.tools),
        continue_final_message=goes_on(request.messages),
        logprobs=top is not None,
        top_logprobs=top,
        **wishes,
        **options.thinking(call.service, request),
    )
    try:
        means, replies = await begin(call, await _fitting(call, asked) if request.truncate else asked)
    except (ApiError, ShardlmError) as error:
        raise options.in_own_words(error) from None
    stream = request.stream is not False
    return await Reply(call, request.model, means, as_message, top).answer(replies, stream)


async def _fitting(call: Call, request: ChatRequest) -> ChatRequest:
    """With as few of its oldest turns less as the model has room for, as Ollama leaves them out. Raises PromptTooLong
    where the last turn alone is too long."""
    most, given = call.service.llm.max_model_len, request.max_tokens
    room = most - (given if given is not None and given < most else 1)
    shorter = [request, *_shorter(request.messages, request)]
    count = await fewest_left_out(call, len(shorter), shorter.__getitem__, room)
    if count == len(shorter):
        raise PromptTooLong(
            f"truncate leaves out earlier turns, and the last one has more than {room} tokens; max_model_len={most} "
            "must hold it and num_predict. Shorten it"
        )
    return shorter[count]


def _shorter(messages: Sequence[Json], request: ChatRequest) -> Iterator[ChatRequest]:
    """Without the first turn, without the first two, and so on; what the system says stays."""
    begins = [i for i, message in enumerate(messages) if message.get("role") == "user"]
    for begin_at in begins[1:]:
        kept = [message for message in messages[:begin_at] if message.get("role") == "system"]
        yield msgspec.structs.replace(request, messages=[*kept, *messages[begin_at:]])
