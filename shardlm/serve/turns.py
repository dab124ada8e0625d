"""The order in which a scheduler serves its requests: whose prompt is read first, and who is turned out last. No jax.

The order is (priority, due, arrival), the smallest first. A prompt is due once PASSES times as many tokens of prompts
have been read as it has itself, counted from its arrival: shorter ones that come later pass it, until then. Prompts of
one length are read in the order of arrival, and so are all behind a long one that has waited for its time. Once it is
read, a request has the place of its arrival: it is the latest to come that loses its pages.
"""

import itertools
import operator
from collections.abc import Iterable

from shardlm.serve.request import Request

# With 0, first come first served. Estimated by plan/serving/arrivals.py for Llama 3 8B on an H100 at 0.5 and 0.9 of the
# most, with 4 | with 0. Prompts of 200 to 16,000 tokens (lognormal, median 1,500): mean first token 196 | 225 ms and
# 611 | 804, of 99 in 100 within 980 | 984 and 3,251 | 3,285; of those below 1,000 tokens 107 | 151 and 365 | 697, above
# 4,000 tokens 460 | 422 and 1,307 | 1,053. Prompts of 200 to 1,000 tokens, one in 200 of 100,000: theirs 0.23 | 2.98 s
# and 2.5 | 14.6, its own 14.6 | 10.3 and 31 | 19. With 2 the short ones gain half as much at 0.9; with 1,000 one of
# 3,000 lognormal ones waited 23 s where it was 4. Tokens a second are the same.
PASSES = 4

by_turn = operator.attrgetter("turn")


class Turns:
    """Gives requests their places; `read` is its clock."""

    def __init__(self):
        self._arrivals = itertools.count()
        self._read = 0  # tokens of prompts

    def enter(self, request: Request, unread: int, before: Iterable[Request] = ()) -> None:
        """Gives a new request its place, of which so many tokens are to be read; behind those `before` it, whose pages
        it will share, where they are of its priority."""
        request.came = self._read
        due = self._read + PASSES * unread
        due = max([due, *(other.turn[1] for other in before if other.priority == request.priority)])
        request.turn = (request.priority, due, next(self._arrivals))

    def read(self, tokens: int) -> None:
        """So many of a prompt are read in the next batch."""
        self._read += tokens

    def settle(self, request: Request) -> None:
        """A request whose prompt is read to its end."""
        priority, _, arrival = request.turn
        request.turn = (priority, request.came, arrival)
