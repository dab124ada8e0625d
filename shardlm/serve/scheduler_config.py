"""The sizes that the scheduler works with. No jax."""

import dataclasses

from shardlm.errors import ShardlmError
from shardlm.serve.chunk_programs import Cuts

# Batches of a request under way whose drafts are not verified yet: each more would hold pages for as many tokens again.
DRAFTS_AHEAD = 2


@dataclasses.dataclass(frozen=True)
class SchedulerConfig:
    """max_rows: requests that run at once (slots). max_batch_tokens: the budget of a mixed step (see `room`).
    max_model_len: of prompt and reply together. decode_steps: the numbers of steps that decode programs have.
    drafts: tokens that may be verified in a step of decoding besides the one that is sampled. cuts: of prompts.
    memories: layers remember a text in a way that cannot go back to before its last token (memories.py).
    image_places: of vectors of images (encoder_cache.py).

    Raises: ShardlmError for sizes with which nothing could run.
    """

    max_rows: int = 256
    max_batch_tokens: int = 2048
    max_model_len: int = 4096
    decode_steps: tuple[int, ...] = (1, 8)
    drafts: int = 0
    cuts: Cuts = Cuts()
    memories: bool = False
    image_places: int = 0

    def __post_init__(self):
        if self.max_rows < 1 or self.max_model_len < 1:
            raise ShardlmError(f"max_rows={self.max_rows} and max_model_len={self.max_model_len} must be at least 1")
        if self.max_batch_tokens <= self.max_rows * (1 + self.drafts):
            each = f"{1 + self.drafts} tokens" if self.drafts else "a token"
            raise ShardlmError(
                f"max_batch_tokens={self.max_batch_tokens} must be above max_rows={self.max_rows}"
                f"{f' times {1 + self.drafts}' if self.drafts else ''}: each row may decode {each}, and a prompt needs "
                "room beside them. Raise it, or lower max_rows"
            )
        if 1 not in self.decode_steps or min(self.decode_steps) < 1:
            raise ShardlmError(
                f"decode_steps={self.decode_steps} must be numbers of steps, each at least 1, with 1 among them (for "
                "when pages are short); give for example (1, 8)"
            )
        object.__setattr__(self, "decode_steps", tuple(sorted(set(self.decode_steps))))

    def room(self, decoding: int) -> int:
        """Tokens of prompts in a step, beside so many rows that decode. Where prompts have programs of their own these
        take nothing: 64 of them beside would make three chunks of two of 1,024 tokens, which take a tenth longer."""
        return self.max_batch_tokens - (0 if self.cuts.lengths else decoding * (1 + self.drafts))

    @property
    def longest_step(self) -> int:
        """The most tokens between the first that a request may need next and the last that it holds pages for."""
        return max(self.max_batch_tokens, most_decoded(self.decode_steps[-1], self.drafts))


def most_decoded(steps: int, drafts: int) -> int:
    """The most tokens of a request that are decoded and not known to the host, where each of its programs runs `steps`
    steps; without drafts it knows how many they are."""
    return DRAFTS_AHEAD * steps * (1 + drafts) if drafts else steps
