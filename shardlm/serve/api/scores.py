"""/score and /rerank: how alike texts are, as vLLM has it: the cosine of their embeddings or, of models that classify
by one number, what they say of both texts, one behind the other."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardlm.serve.api.errors import ApiError
from shardlm.serve.api.pooled import vectors_of
from shardlm.serve.api.protocol import RerankRequest, ScoreRequest
from shardlm.serve.api.service import Call


async def score(call: Call, request: ScoreRequest) -> dict[str, Any]:
    left, first = _given(request, "queries", "text_1", "data_1")
    right, second = _given(request, "documents", "text_2", "data_2")
    if len(left) not in (1, len(right)):
        raise ApiError(
            f"{first} has {len(left)} texts and {second} {len(right)}; give one for all of {second}, or one for each",
            param=first,
        )
    scores, total = await _scores(call, left, right, request)
    data = [{"index": i, "object": "score", "score": found} for i, found in enumerate(scores)]
    about = {"id": f"score-{call.id}", "object": "list", "created": call.created}
    return {**about, "model": request.model or call.service.names[0], "data": data, "usage": _usage(total)}


async def rerank(call: Call, request: RerankRequest) -> dict[str, Any]:
    """The `top_n` documents that are most like the query, the nearest first; all without it, as with 0."""
    texts = [_text_of(document, i) for i, document in enumerate(_filled(request.documents, "documents"))]
    if request.top_n is not None and request.top_n < 0:
        raise ApiError(f"top_n={request.top_n} must be at least 0 (0: all documents)", param="top_n")
    query = _filled([request.query], "query")
    scores, total = await _scores(call, query, texts, request)
    order = sorted(range(len(texts)), key=lambda i: -scores[i])[: request.top_n or None]
    results: list[dict[str, Any]] = [{"index": i, "relevance_score": scores[i]} for i in order]
    if request.return_documents is not False:
        results = [{**one, "document": {"text": texts[one["index"]]}} for one in results]
    about = {"id": f"rerank-{call.id}", "model": request.model or call.service.names[0]}
    return {**about, "usage": _usage(total), "results": results}


async def _scores(
    call: Call, left: Sequence[str], right: Sequence[str], request: ScoreRequest | RerankRequest
) -> tuple[list[float], int]:
    """(one of each pair, tokens of all that was read); `left` has one text for all, or one for each."""
    classifier, truncate = call.service.llm.pooling.classifier, request.truncate_prompt_tokens
    side = request.truncation_side or "right"
    if classifier is None:
        vectors, total = await vectors_of(call, [*left, *right], truncate, side=side)
        return await asyncio.to_thread(_cosines, vectors[: len(left)], vectors[len(left) :]), total
    if len(classifier.labels) != 1:
        count = len(classifier.labels)
        raise ApiError(f"this model tells {count} classes of a text, and a score is one number; ask /classify")
    encode = call.service.llm.tokenizer.encode_pair
    pairs = zip(left * len(right) if len(left) == 1 else left, right, strict=True)
    ids = [await asyncio.to_thread(encode, *pair) for pair in pairs]
    vectors, total = await vectors_of(call, ids, truncate, side=side)
    return [classifier.classes(vector, request.use_activation is not False)[0] for vector in vectors], total


def _given(request: ScoreRequest, *names: str) -> tuple[Sequence[str], str]:
    """(texts, the field that has them). Raises ApiError where there is none, or several."""
    given = [name for name in names if getattr(request, name) is not None]
    if len(given) != 1:
        wanted = " or ".join(names)
        raise ApiError(f"a text or a list of texts is needed in {wanted}; given: {', '.join(given) or 'none'}")
    texts = getattr(request, given[0])
    return _filled([texts] if isinstance(texts, str) else texts, given[0]), given[0]


def _filled(texts: Sequence[Any], name: str) -> Sequence[Any]:
    if not texts or not all(texts):
        raise ApiError(f"{name} is empty, or a text of it is; give texts of one token or more", param=name)
    return texts


def _text_of(document: str | dict[str, Any], number: int) -> str:
    text = document if isinstance(document, str) else document.get("text")
    if not isinstance(text, str) or not text:
        name = f"documents[{number}]"
        raise ApiError(f'{name} has no text; it is a text, or {{"text": ...}}', param=name)
    return text


def _cosines(ones: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> list[float]:
    """Of vectors [D]: each with its other, or one with all."""
    left, right = (np.stack(some) / np.linalg.norm(np.stack(some), axis=-1, keepdims=True) for some in (ones, others))
    return (left * right).sum(axis=-1).tolist()


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": tokens, "total_tokens": tokens}
