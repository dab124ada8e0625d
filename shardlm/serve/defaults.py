"""What a checkpoint's authors recommend for sampling, for requests that leave it open."""

from collections.abc import Mapping
from typing import Any

from shardlm.errors import ShardlmError
from shardlm.serve.sampling_params import SamplingParams

# Of generation_config.json, under the names that SamplingParams has too.
_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def recommended(generation: Mapping[str, Any]) -> dict[str, float]:
    """Of a folder's generation_config.json the values that vLLM takes as defaults, whatever `do_sample` says (its
    ModelConfig.get_diff_sampling_param), but for the length. Raises ShardlmError for values that cannot be."""
    found = {name: generation[name] for name in _NAMES if generation.get(name) is not None}
    try:
        SamplingParams(**found)
    except ShardlmError as error:
        raise ShardlmError(
            f"generation_config.json: {error}; mend it, or serve with --generation_config=none"
        ) from None
    return found
