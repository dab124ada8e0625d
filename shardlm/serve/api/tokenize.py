"""/tokenize, /detokenize and /tokenizer_info: what needs the tokenizer alone."""

from typing import Any

from shardlm.serve.api import conversation
from shardlm.serve.api.errors import ApiError
from shardlm.serve.api.protocol import DetokenizeRequest, TokenizeRequest
from shardlm.serve.api.service import Call
from shardlm.serve.request import check_prompt


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
