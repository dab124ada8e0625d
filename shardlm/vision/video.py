"""A video on the way to a model: its frames, of which some are sampled, and what is planned to be read of it before any
is unpacked. Files are video_files.py's. No jax."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
from PIL import Image

from shardlm.errors import ShardlmError
from shardlm.vision.picture import Clip
from shardlm.vision.read import BadImage, check_size, pixels_of

MOST_FRAMES = 4096  # that a list or an array may have, and that may be asked for: a model reads some hundreds
SLOWEST, FASTEST = 1e-2, 1e4  # frames a second: times that are counted from others would have no end
MOST_SECONDS = 1e7  # 116 days, so that positions on an axis of time are integers of 32 bits
SAID = f"{SLOWEST:g} to {FASTEST:g}"
# Seconds that unpacking one may take: frames of a file before a wanted one are unpacked too, 300 of 1080p in a second
# of a core.
READING = 60.0

T = TypeVar("T")
Encode = Callable[[str], Sequence[int]]  # a text -> its tokens


class BadVideo(BadImage):
    """A video that cannot be read."""


@dataclasses.dataclass(frozen=True, eq=False)
class Video:
    """count  frames that there are
    size   (height, width) of each
    rate   frames a second; None: nobody said
    read   (indices, ascending; what is made of each frame uint8 [H, W, 3] as soon as it is unpacked) -> what was made.
           Raises BadVideo
    sample whether models may leave frames out; None: as they usually do, which differs between files and frames
    chosen which of a longer video's frames these are, where `total` says how many that has
    """

    count: int
    size: tuple[int, int]
    rate: float | None
    read: Callable[[Sequence[int], Callable[[np.ndarray], T]], list[T]]
    sample: bool | None = None
    chosen: Sequence[int] | None = None
    total: int | None = None
    of_file: bool = False


class Planned(Protocol):
    """What is to be read of a video. vectors: how many the encoder makes of it."""

    vectors: int

    def clip(self, encode: Encode) -> Clip:
        """Reads it. Raises ShardlmError."""
        ...


class Prepare(Protocol):
    """How a model reads videos. Equal ones read them alike."""

    def __call__(self, video: Video) -> Planned:
        """Raises ShardlmError for one that cannot be."""
        ...

    def asked(self, how: Mapping[str, Any]) -> "Prepare":
        """As a request wants them. Raises ShardlmError."""
        ...


def video_of_frames(frames: Any, about: Mapping[str, Any] | None = None) -> Video:
    """Of images, or of an array uint8 [T, H, W, 3]. `about`: what is known of the video that they are of, by vLLM's
    names: fps, total_num_frames, frames_indices, do_sample_frames. Raises BadVideo."""
    if isinstance(frames, np.ndarray) and frames.ndim != 4:
        raise BadVideo(f"a video is an array of shape {list(frames.shape)}; it is uint8 [frames, height, width, 3]")
    check_frames(len(frames))
    size = _size_of(frames[0])

    def read(indices: Sequence[int], then: Callable[[np.ndarray], T]) -> list[T]:
        check, found = in_time(), []
        for i in indices:
            check(len(found))
            found.append(then(_frame(frames[i], i, size)))
        return found

    about = _about(about, len(frames))
    return Video(len(frames), size, about.get("fps"), read, *(about.get(name) for name in _KNOWN[1:]))


def check_frames(count: int) -> None:
    """Raises BadVideo for a list of none, or of too many."""
    if not count:
        raise BadVideo("a video has no frames; give one or more")
    if count > MOST_FRAMES:
        raise BadVideo(f"a video has {count} frames; at most {MOST_FRAMES} are taken. Leave some out")


def in_time() -> Callable[[int], None]:
    """A function to call with the number of frames so far. Raises BadVideo where time is up (READING)."""
    end = time.monotonic() + READING

    def check(frames: int) -> None:
        if time.monotonic() > end:
            raise BadVideo(f"{frames} frames of a video took more than {READING:g} seconds; cut it, or make it smaller")

    return check


_KNOWN = ("fps", "do_sample_frames", "frames_indices", "total_num_frames")


def _about(about: Any, count: int) -> Mapping[str, Any]:
    if about is None:
        return {}
    if not isinstance(about, Mapping):
        raise BadVideo(f"what is said beside a video's frames is a {type(about).__name__}; it is an object with fps")
    found = {name: about[name] for name in _KNOWN if about.get(name) is not None}
    rate, chosen, total = found.get("fps"), found.get("frames_indices"), found.get("total_num_frames")
    if rate is not None and not is_rate(rate):
        raise BadVideo(f"a video has fps={rate!r}; it is a number of frames a second, {SAID}")
    if not isinstance(found.get("do_sample_frames", False), bool):
        raise BadVideo(f"a video has do_sample_frames={found['do_sample_frames']!r}; it is true or false")
    if total is not None and (type(total) is not int or total < count):
        raise BadVideo(f"a video has total_num_frames={total!r} and {count} frames; it is a number of at least these")
    if rate is not None and (seconds := (total or count) / rate) > MOST_SECONDS:
        raise BadVideo(f"a video of fps={rate!r} would last {seconds:g} seconds; at most {MOST_SECONDS:g} are read")
    if chosen is not None:
        chosen = chosen.tolist() if isinstance(chosen, np.ndarray) else chosen
        fits = isinstance(chosen, list | tuple) and all(isinstance(i, int | np.integer) for i in chosen)
        fits = fits and len(chosen) == count and list(chosen) == sorted(chosen)
        if not fits or chosen[0] < 0 or chosen[-1] >= 2**31:
            raise BadVideo(f"a video's frames_indices must be {count} numbers that ascend, one for each of its frames")
        chosen = [int(i) for i in chosen]
        found["frames_indices"] = chosen
    return found


def is_rate(value: Any) -> bool:
    """Whether it is a number of frames a second that a video has."""
    return isinstance(value, int | float) and not isinstance(value, bool) and SLOWEST <= value <= FASTEST


def _size_of(frame: Any) -> tuple[int, int]:
    if isinstance(frame, Image.Image):
        size = frame.size[::-1]
    elif isinstance(frame, np.ndarray) and frame.ndim >= 2:
        size = frame.shape[:2]
    else:
        size = pixels_of(frame).shape[:2]
    check_size(size[1], size[0])
    return size


def _frame(frame: Any, number: int, size: tuple[int, int]) -> np.ndarray:
    try:
        pixels = pixels_of(frame)
    except ShardlmError as error:
        raise BadVideo(f"frame {number} of a video: {error}") from None
    if pixels.shape[:2] != size:
        raise BadVideo(
            f"frame {number} of a video has {pixels.shape[1]} x {pixels.shape[0]} pixels and the first {size[1]} x "
            f"{size[0]}; make all of one size"
        )
    return pixels
