"""Replies under way, and what is told of their tokens and prompts: log-probabilities and embeddings."""

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np

from shardlm.serve.bad_words import BadWords
from shardlm.serve.detokenizer import Detokenizer
from shardlm.serve.grammar import Grammar
from shardlm.serve.outputs import CompletionOutput, Place, RequestOutput, TokenLogprob
from shardlm.serve.request import Request
from shardlm.serve.runner import Started
from shardlm.serve.settings import RequestSettings
from shardlm.tokenizer import Tokenizer


@dataclasses.dataclass
class Reply:
    """One reply under way: what the scheduler, the device and the text know of it."""

    request: Request
    settings: RequestSettings
    detokenizer: Detokenizer
    grammar: Grammar | None
    bad_words: BadWords
    output: CompletionOutput
    group: "Group"


@dataclasses.dataclass
class Group:
    """The replies to one prompt."""

    output: RequestOutput
    replies: list[Reply]
    embed: bool


def collect_scores(started: Started, replies: Mapping[str, Reply], tokenizer: Tokenizer) -> None:
    """The log-probabilities of the prompts that a batch read, where they are asked for."""
    for n, row in enumerate(started.batch.rows):
        reply = replies.get(row.request.id)
        wanted = row.request.params.prompt_logprobs
        if row.tokens is None or wanted is None or reply is None or reply.output.index:
            continue
        scores, found = started.scores(n), reply.group.output.prompt_logprobs
        for i in range(min(row.end, row.request.prompt_len - 1) - row.start):
            position = row.start + i + 1
            alternatives = zip(scores.top_ids[i].tolist(), scores.top_logprobs[i].tolist(), strict=True)
            token, rank = row.request.tokens[position], int(scores.rank[i])
            found[position] = described(tokenizer, token, float(scores.logprob[i]), alternatives, wanted, rank)


def collect_embeddings(started: Started, replies: Mapping[str, Reply]) -> None:
    """The last token's vector, of length 1: how embedding models that are decoders are used."""
    for n, row in enumerate(started.batch.rows):
        reply = replies.get(row.request.id)
        if reply is not None and reply.group.embed and row.end == row.request.prompt_len:
            vector = started.hidden(n)
            reply.group.output.embedding = (vector / max(np.linalg.norm(vector), 1e-12)).tolist()


def described(
    tokenizer: Tokenizer,
    token: int,
    logprob: float,
    alternatives: Iterable[tuple[int, float]],
    count: int,
    rank: int | None = None,
) -> Place:
    """The chosen token, then the `count` most likely ones."""
    most = [*alternatives][:count]
    if rank is None:
        rank = next((place for place, (other, _) in enumerate(most, 1) if other == token), None)
    every = [(token, logprob, rank), *((other, value, place) for place, (other, value) in enumerate(most, 1))]
    once = {each[0]: each for each in reversed(every)}  # the chosen one keeps its own number
    order = dict.fromkeys(each[0] for each in every)
    return Place.make(TokenLogprob(*once[id], tokenizer.decode([id], skip_special=False)) for id in order)
