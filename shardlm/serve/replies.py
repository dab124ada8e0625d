"""Replies under way: what may be said next, what was said and where it ends, and what is told of tokens and prompts,
which is log-probabilities and embeddings."""

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from shardlm.errors import ShardlmError
from shardlm.ops.batch_sampling import Sampled
from shardlm.serve.bad_words import BadWords, allow_only
from shardlm.serve.batch import ScheduledBatch
from shardlm.serve.detokenizer import Detokenizer
from shardlm.serve.outputs import CompletionOutput, Place, RequestOutput, TokenLogprob
from shardlm.serve.reply_form import FREE, ReplyForm
from shardlm.serve.request import UNBOUNDED, Request
from shardlm.serve.scheduler import Scheduler
from shardlm.serve.settings import RequestSettings
from shardlm.serve.started import Started
from shardlm.tokenizer import DecodeStream, Tokenizer


@dataclasses.dataclass
class Reply:
    """One reply under way: what the scheduler, the device and the text know of it.

    stream   the text of its tokens for the form, which reads them before the detokenizer
    sent     the rule of the mask that its slot has
    failed   why the form could not go on
    """

    request: Request
    settings: RequestSettings
    detokenizer: Detokenizer
    form: ReplyForm | None
    bad_words: BadWords
    output: CompletionOutput
    group: "Group"
    stream: DecodeStream | None = None
    sent: Hashable = FREE
    failed: Exception | None = None

    @classmethod
    def make(
        cls,
        request: Request,
        index: int,
        form: ReplyForm | None,
        stream: DecodeStream | None,
        group: "Group",
        tokenizer: Tokenizer,
    ) -> "Reply":
        """The reply number `index` to a prompt, of which nothing was said yet."""
        params = request.params
        words = BadWords.make(params.bad_words, tokenizer)
        settings = RequestSettings.make(params, request.prompt_len, request.stop_ids, words.single, index)
        detokenizer = Detokenizer(
            tokenizer,
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            skip_special=params.skip_special_tokens,
        )
        output = CompletionOutput(index, "", [], 0.0, None if params.logprobs is None else [])
        reply = cls(request, settings, detokenizer, form, words, output, group, stream)
        request.bound, request.revocable = reply.bound, form is not None
        return reply

    @property
    def masked(self) -> bool:
        """Whether tokens may be forbidden by what was said before."""
        allowed = self.request.params.allowed_token_ids
        return self.form is not None or allowed is not None or bool(self.bad_words.several)

    @property
    def rule(self) -> Hashable | None:
        """What the next token is held to, equal where it is the same; None: another one for each token."""
        own = FREE if self.form is None else self.form.rule
        if self.bad_words.several or own is None:
            return None
        return own if self.request.params.allowed_token_ids is None else (own, "allowed_token_ids")

    @property
    def bound(self) -> int:
        """Of Request.bound."""
        if self.rule is None:
            return 0
        ahead = self.form and self.form.ahead
        return UNBOUNDED if ahead is None else len(self.request.tokens) + ahead

    def read(self, tokens: Sequence[int]) -> int:
        """How many of the tokens that were sampled under the rule `sent` count; the form moves on by them."""
        texts = map(self.stream.step, tokens) if self.form.reads_text else itertools.repeat("")
        try:
            return self.form.read(tokens, texts)
        except Exception as error:  # told when they have landed
            self.failed = error
            return len(tokens)


@dataclasses.dataclass
class Group:
    """The replies to one prompt."""

    output: RequestOutput
    replies: list[Reply]
    embed: bool


def allowed_next(
    replies: Sequence[Reply], vocab_size: int, fill: Callable[[np.ndarray, list[tuple[int, ReplyForm]]], Any]
) -> np.ndarray:
    """What grammars, bad words and allowed tokens leave to each of these replies: int32 [replies, ceil(V / 32)]. `fill`
    as FormCompiler's, called where there are grammars."""
    masks = np.full((len(replies), -(-vocab_size // 32)), -1, np.int32)
    if forms := [(i, reply.form) for i, reply in enumerate(replies) if reply.form]:
        fill(masks, forms)
    for reply, mask in zip(replies, masks, strict=True):
        allow_only(reply.request.params.allowed_token_ids, mask)
        reply.bad_words.forbid(reply.request.generated, mask)
    return masks


def read(
    batch: ScheduledBatch,
    tokens: np.ndarray,
    counts: np.ndarray | None,
    replies: Mapping[str, Reply],
    awaited: Callable[[Request], bool],
) -> tuple[np.ndarray, set[int]]:
    """(how many of a batch's tokens [rows, width] count in each row, which rows' later ones are taken back), as forms
    say what may follow. `counts`: those that were sampled, None for all; `awaited`: whether a request still waits for
    the batch."""
    counts = np.array([row.samples for row in batch.rows]) if counts is None else counts
    back = set()
    for n, row in enumerate(batch.rows):
        reply, request = replies.get(row.request.id), row.request
        if not row.samples or reply is None or reply.form is None or not awaited(request):
            continue
        kept = reply.read(tokens[n, : counts[n]].tolist())
        later = request.most_in_flight - row.samples
        ahead = reply.form.ahead
        if kept < counts[n] or (later and (reply.rule != reply.sent or (ahead is not None and later > ahead))):
            back.add(n)
        counts[n] = kept
    return counts, back


def take(
    reply: Reply, tokens: list[int], sampled: Sampled, row: int, scheduler: Scheduler, tokenizer: Tokenizer
) -> int:
    """Adds the tokens that a row of the batch sampled to a reply: text, log-probabilities, and where a stop text or the
    grammar ends it, its end. Returns how many of them belong to it."""
    request, output, params = reply.request, reply.output, reply.request.params
    unsaid = int(request.finish_reason == "stop" and not params.include_stop_str_in_output)  # the token that ended it
    if params.detokenize:
        output.text += reply.detokenizer.push(tokens[: max(0, len(tokens) - unsaid)])
    kept = len(tokens)
    if reply.detokenizer.stopped is not None:
        count = reply.detokenizer.num_tokens
        kept = count - len(output.token_ids)
        scheduler.finish(request, "stop", stop_reason=reply.detokenizer.stopped, num_generated=count)
    elif reply.form is not None and tokens:
        _end_with_form(reply, scheduler)
    logprobs = sampled.logprob[row, :kept].tolist()
    output.token_ids += tokens[:kept]
    output.cumulative_logprob += sum(logprobs)
    if output.logprobs is not None:
        for i in range(kept):
            ids, top = sampled.top_ids[row, i].tolist(), sampled.top_logprobs[row, i].tolist()
            alternatives = zip(ids, top, strict=True)
            told, rank = request.params.logprobs, int(sampled.rank[row, i])
            output.logprobs.append(described(tokenizer, tokens[i], logprobs[i], rank, alternatives, told))
    if request.finished and reply.detokenizer.stopped is None and params.detokenize:
        output.text += reply.detokenizer.finish()
    reply.group.output.metrics.wrote(kept)
    return kept


def _end_with_form(reply: Reply, scheduler: Scheduler) -> None:
    if isinstance(reply.failed, ShardlmError):  # too complex to go on (grammar.py): what there is stands
        scheduler.finish(reply.request, "abort")
    elif reply.failed is not None:
        raise reply.failed
    elif reply.form.complete and not reply.request.finished:
        scheduler.finish(reply.request, "stop")


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
            found[position] = described(tokenizer, token, float(scores.logprob[i]), rank, alternatives, wanted)


def collect_embeddings(started: Started, replies: Mapping[str, Reply]) -> None:
    """The last token's vector: how embedding models that are decoders are used."""
    for n, row in enumerate(started.batch.rows):
        reply = replies.get(row.request.id)
        if reply is not None and reply.group.embed and row.end == row.request.prompt_len:
            output, vector = reply.group.output, started.hidden(n)
            output.hidden, output.embedding = vector, (vector / max(np.linalg.norm(vector), 1e-12)).tolist()


def described(
    tokenizer: Tokenizer,
    token: int,
    logprob: float,
    rank: int,
    alternatives: Iterable[tuple[int, float]],
    count: int,
) -> Place:
    """The chosen token, then the `count` most likely ones."""
    most = [*alternatives][:count]
    every = [(token, logprob, rank), *((other, value, place) for place, (other, value) in enumerate(most, 1))]
    once = {each[0]: each for each in reversed(every)}  # the chosen one keeps its own number
    order = dict.fromkeys(each[0] for each in every)
    return Place.make(TokenLogprob(*once[id], tokenizer.decode([id], skip_special=False)) for id in order)
