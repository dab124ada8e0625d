"""What a request's images are checked for, and where they put its tokens. No jax."""

from collections.abc import Sequence

import numpy as np

from shardlm.errors import ShardlmError
from shardlm.serve.request import Sees
from shardlm.serve.sampling_params import SamplingParams
from shardlm.vision.axes import axes_of
from shardlm.vision.picture import Placed
from shardlm.vision.sight import Sight


def check_pictures(sight: Sight | None, pictures: Sequence[Placed], params: SamplingParams) -> None:
    """Raises ShardlmError for images that the model cannot be shown."""
    if sight is None:
        raise ShardlmError("the prompt comes with images, and this model reads text; leave them out")
    if params.truncate_prompt_tokens:
        raise ShardlmError(
            f"truncate_prompt_tokens={params.truncate_prompt_tokens} would cut into images; leave it out, or the images"
        )
    most = sight.sizes[-1]
    for number, one in enumerate(pictures):
        if one.picture.patches > most:
            raise ShardlmError(
                f"image {number} has {one.picture.patches} patches, and at most {most} are read; shrink it"
            )


def sees_of(sight: Sight | None) -> Sees:
    """Which tokens of a prompt see those after them too."""
    if sight is None or not sight.whole:
        return "before"
    return "prompt" if sight.prefix else "images"


def turns_of(sight: Sight | None, length: int, pictures: Sequence[Placed]) -> tuple[np.ndarray, int] | None:
    """Where the tokens of a prompt of so many are on three axes, int32 [length, 3], and how far from its place the next
    one is; None where all are at their places."""
    if sight is None or not sight.axes or not pictures:
        return None
    axes, following = axes_of(length, pictures)
    return np.ascontiguousarray(axes.T), following - length
