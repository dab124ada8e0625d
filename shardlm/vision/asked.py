"""Values of a request's mm_processor_kwargs, looked at. No jax."""

from collections.abc import Mapping, Sequence
from typing import Any

from shardlm.errors import ShardlmError
from shardlm.vision.video import MOST_FRAMES, SAID, is_rate


def number_asked(name: str, value: Any) -> int:
    """Raises ShardlmError for what counts no pixels."""
    if type(value) is not int or value < 1:
        raise ShardlmError(f"mm_processor_kwargs has {name}={value!r}; it is a number of pixels, 1 or more")
    return value


def count_asked(how: Mapping[str, Any], name: str) -> int | None:
    """Of frames. Raises ShardlmError for what counts none, or more than are read."""
    if (value := how.get(name)) is not None and (type(value) is not int or not 1 <= value <= MOST_FRAMES):
        raise ShardlmError(f"mm_processor_kwargs has {name}={value!r}; it is a number of frames, 1 to {MOST_FRAMES}")
    return value


def rate_asked(how: Mapping[str, Any]) -> float | None:
    """`fps`. Raises ShardlmError for what is no number, or none that a video has."""
    if (value := how.get("fps")) is not None and not is_rate(value):
        raise ShardlmError(f"mm_processor_kwargs has fps={value!r}; it is a number of frames a second, {SAID}")
    return value


def edges_asked(how: Mapping[str, Any], names: Sequence[str]) -> Mapping[str, Any]:
    """`size`, whose edges have some of these names; empty without it. Raises ShardlmError for anything else."""
    size = how.get("size", {})
    if not isinstance(size, Mapping) or size.keys() - set(names):
        raise ShardlmError(f"mm_processor_kwargs has size={size!r}; it is an object with {', '.join(names)}")
    return size


def check_most(name: str, value: int, most: int) -> None:
    """Raises ShardlmError where images could be larger than those that the programs of an engine are for."""
    if value > most:
        raise ShardlmError(
            f"mm_processor_kwargs has {name}={value}, and the programs of this engine are for up to {most}; ask for "
            "that or less, or start the engine with mm_processor_kwargs of its own"
        )
