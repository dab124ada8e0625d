"""truncation="auto" of /v1/responses: a conversation that is too long is read without its oldest turns, as OpenAI drops
items from its beginning. Instructions and lists of tools stay, and a turn goes whole, with its calls and their results:
templates refuse half of one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from shardlm.serve.api import response_items as items
from shardlm.serve.api.protocol import ChatRequest, ResponsesRequest
from shardlm.serve.api.response_tools import ADDED
from shardlm.serve.api.service import Call
from shardlm.serve.api.turns import prompt_length
from shardlm.serve.request import PromptTooLong

Item = Mapping[str, Any]


async def fitting(call: Call, request: ResponsesRequest) -> ResponsesRequest:
    """The request, where it asks for it with as few turns less as the model has room for, beside what is to be written.
    Raises ApiError, and PromptTooLong where the last turn alone is too long."""
    if request.truncation != "auto":
        return request
    most, given = call.service.llm.max_model_len, request.max_output_tokens
    room = most - (given if given is not None and 0 <= given < most else 1)  # as truncate_prompt_tokens=-1 has it
    shorter = [request] if isinstance(request.input, str) else _shorter(request)
    count = await fewest_left_out(call, len(shorter), lambda i: items.chat_request(shorter[i], call.service.sees), room)
    if count == len(shorter):
        raise PromptTooLong(
            f"truncation=auto leaves out earlier turns, and the last one with the instructions has more than {room} "
            f"tokens; max_model_len={most} must hold it and max_output_tokens. Shorten it"
        )
    return shorter[count]


async def fewest_left_out(call: Call, most: int, chat: Callable[[int], ChatRequest], room: int) -> int:
    """The least number of turns without which a conversation has at most `room` tokens, where `chat(count)` is the one
    without so many; `most`, which is one more than can be left out, where none has. Raises ApiError."""

    async def fits(count: int) -> bool:
        try:
            return await prompt_length(call, chat(count)) <= room
        except PromptTooLong:
            return False

    if await fits(0):
        return 0
    low, high = 1, most  # of those before `low` none fits, of those from `high` on each does
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if await fits(middle) else (middle + 1, high)
    return low


def _shorter(request: ResponsesRequest) -> list[ResponsesRequest]:
    """With all turns, without the first, without the first two, and so on."""
    every: Sequence[Item] = request.input
    begins = [i for i, item in enumerate(every) if _role(item) == "user"]
    first = begins[0] if begins else 0

    def stays(i: int, item: Item) -> bool:
        return item.get("type") == ADDED or (i < first and _role(item) in ("system", "developer"))

    kept = [[item for i, item in enumerate(every[:begin]) if stays(i, item)] for begin in begins[1:]]
    pairs = zip(kept, begins[1:], strict=True)
    return [request, *(msgspec.structs.replace(request, input=[*own, *every[begin:]]) for own, begin in pairs)]


def _role(item: Item) -> Any:
    return item.get("role") if item.get("type", "message") == "message" else None
