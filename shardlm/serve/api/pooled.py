"""What is read for its own sake: the prompts of a request, as texts, token ids or a chat, and what the model makes of
the last token of each."""

import asyncio
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardlm.serve.api import conversation
from shardlm.serve.api.errors import ApiError
from shardlm.serve.api.images import pictures_of
from shardlm.serve.api.protocol import PooledRequest, Side, prompts_of
from shardlm.serve.api.sampling import check_order
from shardlm.serve.api.service import Call, Service
from shardlm.serve.images import Prepared
from shardlm.serve.request import check_prompt
from shardlm.vision.image_places import encoded


async def pooled(call: Call, request: PooledRequest) -> tuple[list[np.ndarray], int]:
    """As `vectors_of`, of what a request gives. Raises ApiError, ShardlmError, EngineError."""
    check_order(request)
    if (request.input is None) == (request.messages is None):
        raise ApiError("give input, or messages for the chat template, and not both", param="input")
    options = {"priority": request.priority or 0, "salt": request.cache_salt or ""}
    if request.messages is None:
        special = request.add_special_tokens is not False
        prompts = prompts_of(request.input, "input", special and any(call.service.llm.tokenizer.ends))
    else:
        prompts, special = [await _chat(call, request)], bool(request.add_special_tokens)
        options["pictures"] = await pictures_of(call, request.messages, request.mm_processor_kwargs)
    options["side"] = request.truncation_side or "right"
    return await vectors_of(call, prompts, request.truncate_prompt_tokens, special, **options)


async def _chat(call: Call, request: PooledRequest) -> str:
    if request.chat_template is not None:
        raise ApiError("chat_template is not supported; the model's own is used", param="chat_template")
    form = conversation.form_of(request) | {"add_generation_prompt": bool(request.add_generation_prompt)}
    form |= {"options": request.chat_template_kwargs, "sees": True}
    return await conversation.prompt(call.service.llm, request.messages, None, **form)


async def vectors_of(
    call: Call,
    prompts: Sequence[str | Sequence[int]],
    truncate: int | None,
    special: bool = True,
    side: Side = "right",
    priority: int = 0,
    salt: str = "",
    pictures: Mapping[str, Sequence[Prepared]] | None = None,
) -> tuple[list[np.ndarray], int]:
    """(what the model makes of each prompt, float32 [D]; their tokens together). `truncate`: so many tokens of each, -1
    for as many as the model has room for. `special`: texts get what stands at the ends of documents. `side`: the one
    that is cut off, by itself the end, as vLLM and Ollama read what they embed. `pictures`: of the only prompt, which
    is a chat's. Raises ApiError, ShardlmError, EngineError."""
    service, llm = call.service, call.service.llm
    service.admit(len(prompts), 1)
    service.unanswered += len(prompts)
    call.stack.callback(lambda: _answered(service, len(prompts)))
    keep = _kept(truncate, llm.max_model_len)
    encode = llm.tokenizer.encode_prompt if special else llm.tokenizer.encode
    if pictures is not None:
        marks = conversation.marks_of(llm)
        encode = functools.partial(encoded, tokenizer=llm.tokenizer, encode=encode, **marks)
    read = [
        await conversation.tokens(service, one, encode, keep > 0) if isinstance(one, str) else one for one in prompts
    ]
    ends = llm.tokenizer.ends if special else ([], [])
    ids = [_cut(one, keep, side, *ends) for one in read]
    for one in ids:
        check_prompt(one, llm.tokenizer.vocab_size)
    asked, total = await _with_images(call, ids[0], pictures, keep) if pictures else (ids, sum(map(len, ids)))
    tasks = [asyncio.ensure_future(llm.pool(one, call.adapter, priority=priority, salt=salt)) for one in asked]
    try:
        vectors = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return vectors, total


async def _with_images(
    call: Call, ids: Sequence[int], pictures: Mapping[str, Sequence[Prepared]], keep: int
) -> tuple[list[dict[str, Any]], int]:
    """(the only prompt, how many tokens it has). Raises ApiError, ShardlmError."""
    if keep:
        message = "truncate_prompt_tokens of a prompt with images could leave half of one; leave it out"
        raise ApiError(message, param="truncate_prompt_tokens")
    both = pictures.get("image", ()), pictures.get("video", ())
    whole, _ = await asyncio.to_thread(call.service.llm.images.placed, ids, *both)
    return [{"prompt_token_ids": ids, "multi_modal_data": dict(pictures)}], len(whole)


def _cut(ids: Sequence[int], keep: int, side: Side, before: list[int], behind: list[int]) -> Sequence[int]:
    """`keep` tokens (0: all), with what the tokenizer put before and behind a text: many models' vector is of that last
    token."""
    if not keep or len(ids) <= keep:
        return ids
    ids = list(ids)
    if side == "left":
        held = before if ids[: len(before)] == before and len(before) < keep else []
        return held + ids[len(ids) - keep + len(held) :]
    held = behind if ids[len(ids) - len(behind) :] == behind and len(behind) < keep else []
    return ids[: keep - len(held)] + held


def _answered(service: Service, prompts: int) -> None:
    service.unanswered -= prompts


def _kept(wish: int | None, max_model_len: int) -> int:
    """So many tokens of an input; 0 for all. Raises ApiError."""
    if wish is not None and wish != -1 and wish < 1:
        message = f"truncate_prompt_tokens={wish} must be at least 1, or -1 for the model's length"
        raise ApiError(message, param="truncate_prompt_tokens")
    return max_model_len if wish == -1 else wish or 0
