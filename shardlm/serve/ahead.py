"""How far the decoding of a request may go ahead of what the host has heard of it. No jax.

A request whose next token is held to what those before say, as a grammar's is, runs a token at a time and waits for
each (`bound`). Where that begins within what landed, the tokens after it are taken back, in the scheduler and in
flight: the request goes on from those it has, in its slot and its pages, or is computed anew where the model remembers
all it read.

Where drafts are verified (speculation/), how many tokens a decode brings is known when it lands, and the device alone
knows where the next one begins: it holds pages as if all drafts before it and its own were right, for as many batches
ahead as DRAFTS_AHEAD says. Nobody loses pages to what may not be needed: if they lack, it waits for what is in flight.
"""

from shardlm.serve.request import Request
from shardlm.serve.scheduler_config import DRAFTS_AHEAD, SchedulerConfig


def must_land(request: Request, config: SchedulerConfig) -> bool:
    """Whether the request's next row waits for what is in flight."""
    if most_ahead(request, config) <= 0:
        return request.in_flight > 0
    return config.drafts > 0 and request.batches_in_flight >= DRAFTS_AHEAD


def left(request: Request, config: SchedulerConfig) -> int:
    """Tokens that a row may sample in one program."""
    return min(request.remaining, max(1, most_ahead(request, config)))


def most_ahead(request: Request, config: SchedulerConfig) -> int:
    """Tokens that may be scheduled now without a look at those before."""
    bound = request.bound - len(request.tokens)
    if request.revocable:  # it keeps the pages that its last known token sees
        bound = min(bound, config.longest_step)
    return bound - request.most_in_flight


def end_of(request: Request, samples: int) -> int:
    """One past the last position that so many more samples may write; a reply's last token is never written."""
    return min(request.computed + samples, request.max_len - 1)
