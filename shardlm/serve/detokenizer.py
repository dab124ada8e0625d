"""Text of one reply from its tokens, as they come: complete characters only, cut at the first stop string.

Owns what may be sent and when, and how many tokens belong to the reply. Stop tokens are the engine's: it does not push
them. No jax.
"""

from collections.abc import Iterable, Sequence

from shardlm.errors import ShardlmError
from shardlm.serve.text_progress import TextProgress
from shardlm.tokenizer import Tokenizer


class Detokenizer:
    """Push tokens, in groups of any size; the strings returned concatenate to the reply's text whatever the groups.

    The text ends before the stop string that is complete first (of several that end together, the longest), or after it
    with `include_stop`. Text that may still become a stop string is held back, and nothing else is. As in vLLM, a stop
    string counts from the token after `min_tokens` on; its beginning may be older.

    Attributes:
      stopped: the stop string that ended the text, or None. Tokens pushed later are ignored.
      pieces: the characters that each token of the reply completed, "" inside a character; for log-probabilities. The
        token that completed the stop string is the last one. Together they are the text before it is cut.

    Raises: ShardlmError for an empty stop string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special: bool = True,
    ):
        if "" in stop:
            raise ShardlmError(f"stop={list(stop)} has an empty string, which any text holds; leave it out")
        self.stopped: str | None = None
        self.pieces: list[str] = []
        self._stream = tokenizer.stream(skip_special=skip_special)
        self._stops = [TextProgress(one) for one in sorted(stop, key=len, reverse=True)]
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._held = ""

    @property
    def num_tokens(self) -> int:
        """How many of the pushed tokens belong to the reply: up to the one that completed a stop string."""
        return len(self.pieces)

    def push(self, tokens: Iterable[int]) -> str:
        """The text that can be sent after these tokens."""
        ready = []
        for token in tokens:
            if self.stopped is not None:
                break
            self.pieces.append(self._stream.step(token))
            ready.append(self._release(self.pieces[-1]))
        return "".join(ready)

    def finish(self) -> str:
        """The rest, when no token follows: text that was held back, U+FFFD for an incomplete character."""
        if self.stopped is not None:
            return ""
        rest = self._stream.finish()
        if self.pieces:
            self.pieces[-1] += rest
        ready = self._release(rest) + self._held
        self._held = ""
        return ready

    def _release(self, piece: str) -> str:
        """What can be sent once `piece`, of the newest token, follows the text."""
        counts = self.num_tokens > self._min_tokens
        for end, char in enumerate(piece, 1):
            complete = [stop.text for stop in self._stops if stop.advance(char)]
            if complete and counts:
                self.stopped = complete[0]
                text, self._held = self._held + piece[:end], ""
                return text if self._include_stop else text.removesuffix(self.stopped)
        text = self._held + piece
        keep = 0 if self._include_stop else max((stop.matched for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]
