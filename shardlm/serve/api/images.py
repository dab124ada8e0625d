"""Images and videos of a request: from their addresses, or the request itself, to what the model's encoder reads."""

import asyncio
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardlm.errors import ShardlmError
from shardlm.serve.api.errors import ApiError
from shardlm.serve.api.service import Call
from shardlm.serve.images import Images, Prepared, check_tokens
from shardlm.serve.media import file_at
from shardlm.serve.messages import Message
from shardlm.serve.request import PromptTooLong
from shardlm.vision.image_parts import SEEING, BadMessage, Sent, images_in, videos_in

# Seconds after which no further video of a request is begun: each may take two minutes of a thread, of which there are
# eight, and ten that do fit into a body.
LONGEST = 120.0
AT_ONCE = {"image": 8, "video": 1}  # of a request that are fetched; then it is seen whether there is room for more


async def pictures_of(
    call: Call, messages: Sequence[Message], how: Mapping[str, Any] | None = None
) -> dict[str, list[Prepared]]:
    """Those of a conversation that was rendered, "image" and "video" in their order (none without any), prepared beside
    the event loop, as the request's mm_processor_kwargs say. Raises ApiError for what is no image or cannot be had, for
    what cannot be asked for and where too many requests wait, and PromptTooLong where they alone are too many."""
    images = call.service.llm.images
    prepare = _asked(images, how, "image")
    try:
        sent = {"image": images_in(messages), "video": videos_in(messages)}
    except BadMessage as error:
        raise ApiError(str(error), param=error.param) from None
    sent = {kind: every for kind, every in sent.items() if every}
    if not sent:
        return {}
    for kind, every in sent.items():
        images.check_count(len(every), kind)
    with call.preparing():
        return {
            kind: await _every(call, prepare if kind == "image" else _asked(images, how, kind), every, kind)
            for kind, every in sent.items()
        }


async def _every(call: Call, prepare: Callable, sent: Sequence[Sent], kind: str) -> list[Prepared]:
    llm, found, tokens, began = call.service.llm, [], 0, time.monotonic()
    for start in range(0, len(sent), AT_ONCE[kind]):
        if start and kind == "video" and time.monotonic() - began > LONGEST:
            message = (
                f"the first {start} of {len(sent)} videos took more than {LONGEST:g} seconds; send fewer or smaller"
            )
            raise ApiError(message, param="messages")
        found += await _together(call, prepare, sent[start : start + AT_ONCE[kind]], start + 1, len(sent), kind)
        tokens += sum(map(llm.images.tokens, found[start:]))
        check_tokens(tokens, len(found), llm.max_model_len, kind)
    return found


def _asked(images: Images | None, how: Mapping[str, Any] | None, kind: str) -> Callable[[Any], Prepared] | None:
    """What prepares them; None: the model does not see."""
    try:
        if images is None and how:
            raise ShardlmError(f"mm_processor_kwargs are of images, and this model reads text; {SEEING}")
        if kind == "video":
            return functools.partial(images.prepared_video, prepare=images.preparing_videos(how))
        return images and functools.partial(images.prepared, prepare=images.preparing(how))
    except ShardlmError as error:
        raise ApiError(str(error), param="mm_processor_kwargs") from None


async def _together(
    call: Call, prepare: Callable, sent: Sequence[Sent], first: int, total: int, kind: str
) -> list[Prepared]:
    tasks = [
        asyncio.ensure_future(_picture(call, prepare, one, f"{kind} {number} of {total}"))
        for number, one in enumerate(sent, first)
    ]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _picture(call: Call, prepare: Callable, sent: Sent, name: str) -> Prepared:
    try:
        if sent.video and _are_frames(sent.value):
            return await _prepared(call, prepare, sent.value)
        if not isinstance(sent.value, str):
            kind = "a video" if sent.video else "an image"
            raise BadMessage(f"{kind} is a {type(sent.value).__name__}; it is an address", sent.param)
        if sent.value[:5].lower() == "data:":
            return await _prepared(call, prepare, sent.value)
        key = sent.video, sent.value  # one address may be sent as both
        if key not in call.pictures:
            async with call.service.videos if sent.video else call.service.files:  # until nothing needs the file
                file = await file_at(sent.value, call.service.settings.media, sent.video)
                call.pictures[key] = await _prepared(call, prepare, file)
        return call.pictures[key]
    except PromptTooLong:
        raise
    except ShardlmError as error:
        # By its number, as in other interfaces than a chat's it stood elsewhere in the request.
        raise ApiError(f"{name}: {error}", param="messages") from None


def _are_frames(value: Any) -> bool:
    """Whether a video is sent as its frames, each with its file."""
    return isinstance(value, list) and all(isinstance(one, str) and one[:5].lower() == "data:" for one in value)


async def _prepared(call: Call, prepare: Callable, image: str | bytes | list[str]) -> Prepared:
    return await asyncio.get_running_loop().run_in_executor(call.service.llm.images.threads, prepare, image)
