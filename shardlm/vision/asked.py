"""Values of a request's mm_processor_kwargs, looked at. No jax."""

from collections.abc import Mapping, Sequence
from typing import Any

from shardlm.errors import ShardlmError


def number_asked(name: str, value: Any) -> int:
    """Raises ShardlmError for what counts no pixels."""
    if type(value) is not int or value < 1:
        raise ShardlmError(f"mm_processor_kwargs has {name}={value!r}; it is a number of pixels, 1 or more")
    return value


def count_asked(how: Mapping[str, Any], name: str) -> int | None:
    """Of frames. Raises ShardlmError for what counts none."""
    if (value := how.get(name)) is not None and (type(value) is not int or value < 1):
        raise ShardlmError(f"mm_processor_kwargs has {name}={value!r}; it is a number of frames, 1 or more")
    return value


def rate_asked(how: Mapping[str, Any]) -> float | None:
    """`fps`. Raises ShardlmError for what is no number above 0."""
    value = how.get("fps")
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6):
        raise ShardlmError(f"mm_processor_kwargs has fps={value!r}; it is a number of frames a second above 0")
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
