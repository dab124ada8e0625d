"""/v1/embeddings, /tokenize, /detokenize and /tokenizer_info: what takes text and writes none."""

import array
import asyncio
import base64
import sys
from collections.abc import Sequence
from typing import Any

from shardlm.serve.api import conversation
from shardlm.serve.api.errors import ApiError
from shardlm.serve.api.protocol import DetokenizeRequest, EmbeddingsRequest, TokenizeRequest, prompts_of
from shardlm.serve.api.service import Call, Service
from shardlm.serve.request import check_prompt


async def embeddings(call: Call, request: EmbeddingsRequest) -> dict[str, Any]:
    if request.dimensions is not None:
        raise ApiError("dimensions is not supported; cut the vectors yourself", param="dimensions")
    vectors, total = await vectors_of(call, prompts_of(request.input, "input"), request.truncate_prompt_tokens)
    coded = _base64 if request.encoding_format == "base64" else list
    data = [{"object": "embedding", "index": i, "embedding": coded(vector)} for i, vector in enumerate(vectors)]
    usage = {"prompt_tokens": total, "total_tokens": total}
    return {"object": "list", "data": data, "model": request.model or call.service.names[0], "usage": usage}


async def vectors_of(
    call: Call, prompts: Sequence[str | Sequence[int]], truncate: int | None
) -> tuple[list[Sequence[float]], int]:
    """(the embedding of each prompt, of length 1; their tokens together). `truncate`: the last so many tokens of each,
    -1 for as many as the model has room for. Raises ApiError, ShardlmError, EngineError."""
    service, llm = call.service, call.service.llm
    service.admit(len(prompts), 1)
    service.unanswered += len(prompts)
    call.stack.callback(lambda: _answered(service, len(prompts)))
    keep = _kept(truncate, llm.max_model_len)
    encode = llm.tokenizer.encode_prompt
    read = [
        await conversation.tokens(service, one, encode, keep > 0) if isinstance(one, str) else one for one in prompts
    ]
    ids = [one[-keep:] for one in read]
    for one in ids:
        check_prompt(one, llm.tokenizer.vocab_size)
    tasks = [asyncio.ensure_future(llm.embed(one, call.adapter)) for one in ids]
    try:
        vectors = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return vectors, sum(map(len, ids))


def _answered(service: Service, prompts: int) -> None:
    service.unanswered -= prompts


def _kept(wish: int | None, max_model_len: int) -> int:
    """The last so many tokens of an input; 0 for all. Raises ApiError."""
    if wish is not None and wish != -1 and wish < 1:
        message = f"truncate_prompt_tokens={wish} must be at least 1, or -1 for the model's length"
        raise ApiError(message, param="truncate_prompt_tokens")
    return max_model_len if wish == -1 else wish or 0


def _base64(vector: Sequence[float]) -> str:
    """float32, little-endian."""
    numbers = array.array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()


async def tokenize(call: Call, request: TokenizeRequest) -> dict[str, Any]:
    llm = call.service.llm
    if (request.prompt is None) == (request.messages is None):
        raise ApiError("give a prompt, or messages for the chat template, and not both", param="prompt")
    encode, text = llm.tokenizer.encode, request.prompt
    if text is None:
        form = {"options": request.chat_template_kwargs, **conversation.form_of(request)}
        text = await conversation.prompt(llm, request.messages, request.tools, **form)
    elif request.add_special_tokens is not False:
        encode = llm.tokenizer.encode_prompt  # where templates do not write what stands at the beginning
    run = call.service.long_texts.run
    ids = await run(len(text), encode, text)
    texts = await run(len(ids), llm.tokenizer.texts, ids) if request.return_token_strs else None
    return {"count": len(ids), "max_model_len": llm.max_model_len, "tokens": ids, "token_strs": texts}


def tokenizer_info(llm) -> dict[str, Any]:
    """What a client that tokenizes here must know besides; the LM Evaluation Harness asks for it."""
    own, template = llm.tokenizer, llm.template
    end = template.special.get("eos_token") if template else None  # of a chat, which may be another than a document's
    first = own.encode_prompt("")[:1]
    return {
        "tokenizer_class": "shardlm",
        "bos_token": own.decode(first, skip_special=False) if first else None,
        "eos_token": end or own.decode([own.end_of_document_id], skip_special=False),
        "chat_template": template.source if template else None,
    }


async def detokenize(call: Call, request: DetokenizeRequest) -> dict[str, Any]:
    tokenizer = call.service.llm.tokenizer
    check_prompt(request.tokens, tokenizer.vocab_size)
    run = call.service.long_texts.run
    return {"prompt": await run(len(request.tokens), tokenizer.decode, request.tokens, skip_special=False)}
