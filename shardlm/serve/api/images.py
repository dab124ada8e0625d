"""Images of a request: from their addresses, or the request itself, to what the model's encoder reads."""

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardlm.errors import ShardlmError
from shardlm.serve.api.errors import ApiError
from shardlm.serve.api.service import Call
from shardlm.serve.images import Images, check_tokens
from shardlm.serve.media import file_at
from shardlm.serve.messages import Message
from shardlm.vision.image_parts import SEEING, BadMessage, Sent, images_in
from shardlm.vision.picture import Picture

AT_ONCE = 8  # images of a request that are fetched; then it is seen whether there is room for more


async def pictures_of(call: Call, messages: Sequence[Message], how: Mapping[str, Any] | None = None) -> list[Picture]:
    """Those of a conversation that was rendered, in their order, prepared beside the event loop, as the request's
    mm_processor_kwargs say. Raises ApiError for what is no image or cannot be had, for what cannot be asked for and
    where too many requests wait, and PromptTooLong where they alone are too many."""
    prepare = _asked(call.service.llm.images, how)
    try:
        sent = images_in(messages)
    except BadMessage as error:
        raise ApiError(str(error), param=error.param) from None
    if not sent:
        return []
    llm, found, tokens = call.service.llm, [], 0
    llm.images.check_count(len(sent))
    with call.preparing():
        for start in range(0, len(sent), AT_ONCE):
            found += await _together(call, prepare, sent[start : start + AT_ONCE], start + 1, len(sent))
            tokens += sum(map(llm.images.tokens, found[start:]))
            check_tokens(tokens, len(found), llm.max_model_len)
    return found


def _asked(images: Images | None, how: Mapping[str, Any] | None) -> Callable[[Any], Picture] | None:
    """What prepares them; None: the model does not see."""
    try:
        if images is None and how:
            raise ShardlmError(f"mm_processor_kwargs are of images, and this model reads text; {SEEING}")
        return images and functools.partial(images.prepared, prepare=images.preparing(how))
    except ShardlmError as error:
        raise ApiError(str(error), param="mm_processor_kwargs") from None


async def _together(call: Call, prepare: Callable, sent: Sequence[Sent], first: int, total: int) -> list[Picture]:
    tasks = [
        asyncio.ensure_future(_picture(call, prepare, one, f"image {number} of {total}"))
        for number, one in enumerate(sent, first)
    ]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _picture(call: Call, prepare: Callable, sent: Sent, name: str) -> Picture:
    try:
        if not isinstance(sent.value, str):
            raise BadMessage(f"an image is a {type(sent.value).__name__}; it is an address", sent.param)
        if sent.value[:5].lower() == "data:":
            return await _prepared(call, prepare, sent.value)
        if sent.value not in call.pictures:
            async with call.service.files:  # until nothing needs the file
                file = await file_at(sent.value, call.service.settings.media)
                call.pictures[sent.value] = await _prepared(call, prepare, file)
        return call.pictures[sent.value]
    except ShardlmError as error:
        # By its number, as in other interfaces than a chat's it stood elsewhere in the request.
        raise ApiError(f"{name}: {error}", param="messages") from None


async def _prepared(call: Call, prepare: Callable, image: str | bytes) -> Picture:
    return await asyncio.get_running_loop().run_in_executor(call.service.llm.images.threads, prepare, image)
