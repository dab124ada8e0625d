"""What SamplingParams mean to the sampler on the device: one request's row of numbers."""

import dataclasses
import secrets
from collections.abc import Collection, Sequence

import numpy as np

from shardlm.errors import ShardlmError
from shardlm.ops.batch_sampling import Edits, RowSettings
from shardlm.serve.sampling_params import SamplingParams
from shardlm.serve.state import MAX_BANNED, MAX_BIASES


@dataclasses.dataclass(frozen=True)
class RequestSettings:
    """Of one request, ready for the device.

    seed       64 bits
    until      position before which `banned` tokens are forbidden
    biases     added to logits by token
    """

    params: SamplingParams
    seed: int
    until: int
    banned: tuple[int, ...]
    biases: tuple[tuple[int, float], ...]

    @classmethod
    def make(
        cls, params: SamplingParams, prompt_len: int, stop_ids: Collection[int], bad_tokens: Sequence[int], index: int
    ) -> "RequestSettings":
        """Of the `index`-th reply to a prompt. Raises ShardlmError for more edits than the device keeps."""
        seed = secrets.randbits(64) if params.seed is None else (params.seed + index) % 2**64
        biases = dict(params.logit_bias or {})
        biases |= dict.fromkeys(bad_tokens, -1e30)
        if len(biases) > MAX_BIASES:
            raise ShardlmError(f"logit_bias has with bad_words {len(biases)} tokens; at most {MAX_BIASES} are possible")
        banned = tuple(sorted(stop_ids)) if params.min_tokens else ()
        if len(banned) > MAX_BANNED:
            raise ShardlmError(
                f"min_tokens={params.min_tokens} with {len(banned)} stop tokens: at most {MAX_BANNED} can be held "
                "back; give fewer stop_token_ids"
            )
        return cls(params, seed, prompt_len + params.min_tokens, banned, tuple(biases.items()))

    @property
    def penalised(self) -> bool:
        """Whether what was said counts."""
        params = self.params
        return (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0)

    def fill(self, rows: RowSettings, edits: Edits, told: np.ndarray, i: int) -> None:
        """Writes row i of numpy arrays."""
        params = self.params
        rows.temperature[i], rows.top_p[i], rows.min_p[i] = params.temperature, params.top_p, params.min_p
        rows.top_k[i] = max(0, params.top_k) if params.top_k < 2**31 else 0
        rows.repetition[i], rows.frequency[i] = params.repetition_penalty, params.frequency_penalty
        rows.presence[i], rows.banned_until[i] = params.presence_penalty, self.until
        rows.seed[i] = self.seed >> 32, self.seed & 0xFFFFFFFF
        told[i] = 0 if params.logprobs is None else 1 if params.logprobs == 0 else 2
        edits.banned_ids[i, : len(self.banned)] = self.banned
        for j, (token, bias) in enumerate(self.biases):
            edits.bias_ids[i, j], edits.bias[i, j] = token, bias
