"""Videos in the forms in which users give them: a file's path, its bytes or its address, frames as a list of images or
an array, or frames with what is known of them. No jax."""

import hashlib
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardlm.errors import ShardlmError
from shardlm.vision.picture import Clip
from shardlm.vision.read import pixels_of
from shardlm.vision.video import BadVideo, Video, check_frames, video_of_frames
from shardlm.vision.video_files import MAX_BYTES, video_of_file, video_of_url

FORMS = (
    "a file's path, its bytes or data:video/mp4;base64,..., a list of images, an array uint8 [frames, height, width, "
    '3], or (frames, {"fps": n})'
)


def videos_of(prompt: Any) -> Sequence[Any]:
    """Those of a prompt in vLLM's form: one, or a list of several. A list of images is one."""
    given = prompt.get("multi_modal_data") if isinstance(prompt, Mapping) else None
    video = given.get("video") if isinstance(given, Mapping) else None
    if video is None:
        return ()
    several = isinstance(video, list) and bool(video) and all(map(_is_whole, video))
    return video if several else (video,)


def _is_whole(value: Any) -> bool:
    """Whether an element of a list is a video, and no frame of one."""
    if isinstance(value, np.ndarray):
        return value.ndim == 4
    return isinstance(value, Clip | str | os.PathLike | bytes | bytearray | list | tuple)


def video_of(value: Any) -> Video:
    """Raises BadVideo."""
    value, about = _apart(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return video_of_file(bytes(value))
    if isinstance(value, str) and value[:5].lower() == "data:":
        return video_of_url(value)
    if isinstance(value, str | os.PathLike):
        return video_of_file(file_at(value))
    if isinstance(value, np.ndarray | list | tuple):
        return video_of_frames(value, about)
    raise BadVideo(f"a video is a {type(value).__name__}; give {FORMS}")


def _apart(value: Any) -> tuple[Any, Any]:
    """(frames, what is known of them) of a pair, which vLLM has."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        return value
    return value, None


def file_at(path: str | os.PathLike) -> bytes:
    """Raises BadVideo."""
    try:
        if pathlib.Path(path).stat().st_size > MAX_BYTES:
            raise BadVideo(f"{path} has more than {MAX_BYTES} bytes; cut it, or make it smaller")
        return pathlib.Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise BadVideo(f"the video {str(path)[:120]} cannot be read: {error}; give {FORMS}") from None


def key_of(value: Any) -> bytes:
    """What a video is known by: its bytes, or those of its frames and what is known of them. Raises ShardlmError."""
    value, about = _apart(value)
    if isinstance(value, str | os.PathLike) and os.fspath(value)[:5].lower() != "data:":
        value = file_at(value)
    known = hashlib.blake2b(digest_size=32)
    if isinstance(value, str | bytes | bytearray | memoryview):
        known.update(_bytes(value))
        return known.digest()
    if not isinstance(value, np.ndarray | list | tuple):
        raise BadVideo(f"a video is a {type(value).__name__}; give {FORMS}")
    check_frames(len(value))
    about = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in (about or {}).items()}  # whole, in words
    known.update(repr(sorted(about.items(), key=str)).encode())
    for number, frame in enumerate(value):
        if isinstance(frame, str | bytes):  # a file, not unpacked before it is seen how many tokens there are
            known.update(f"{type(frame).__name__} {len(frame)}".encode())
            known.update(_bytes(frame))
            continue
        try:
            pixels = pixels_of(frame)
        except ShardlmError as error:
            raise BadVideo(f"frame {number} of a video: {error}") from None
        known.update(repr(pixels.shape).encode())
        known.update(pixels)
    return known.digest()


def _bytes(value: Any) -> Any:
    """Of an address, or a file's."""
    return value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
