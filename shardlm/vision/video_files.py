"""Files of videos: MP4 and MOV, WebM and Matroska, AVI by PyAV (FFmpeg), GIF, APNG and WebP by Pillow. What a file may
be is told by its first bytes and no other demuxer is asked, as some of FFmpeg's (playlists, lists of files) open
further addresses; sizes are looked at before a frame is unpacked, frames are unpacked one by one, and all of it has its
time. No jax."""

import contextlib
import ctypes
import functools
import io
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from PIL import Image

from shardlm.errors import ShardlmError
from shardlm.vision.read import MAX_PIXELS, check_size, decoded, pixels_of
from shardlm.vision.video import READING, SAID, BadVideo, Video, check_frames, in_time, is_rate, video_of_frames

MAX_BYTES = 128 * 2**20  # of a file; a request's body has its own bound
MAX_FRAMES = 2**17  # an hour of 30 a second has 108,000
DECODERS = 4  # threads that unpack one film, of which several may be read at once
# Bytes that FFmpeg may take at once. A frame of 67 million pixels has 96 MiB, twice that in 10 bits; a head of 2 KB
# that says 80 million samples took 4.8 GB for tables before a packet was read.
MOST_AT_ONCE = 2**28
# Pixels above which one film is unpacked after the other: a decoder may keep 16 frames and has four in work, 3.1 GB of
# 67 million pixels, by a file of 200 KB.
LARGE = 2**24
CODECS = ("h264", "hevc", "av1", "vp8", "vp9", "mpeg4", "mpeg2video", "mpeg1video", "mjpeg", "prores", "theora")
UNTIMED = 10.0  # frames a second of an animation that says none, as browsers show it
KNOWN = "MP4, MOV, WebM, Matroska, AVI, GIF, APNG and WebP"
_FRAMES_URL = "data:video/jpeg;base64,"  # vLLM's for frames, with commas between
_BOXES = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")  # that QuickTime's files begin with
_ANIMATED = {b"GIF8": "GIF", b"\x89PNG": "PNG"}

T = TypeVar("T")
_ONE = threading.Lock()  # large film


def video_of_url(url: str) -> Video:
    """Of data:video/mp4;base64,... or of frames, data:video/jpeg;base64,FRAME,FRAME. Raises BadVideo."""
    if url[: len(_FRAMES_URL)].lower() == _FRAMES_URL:
        check_frames(url.count(",", len(_FRAMES_URL)) + 1)
        return video_of_frames([decoded(one) for one in url[len(_FRAMES_URL) :].split(",")])
    head, comma, data = url.partition(",")
    if url[:5].lower() != "data:" or not comma or not head.lower().endswith(";base64"):
        raise BadVideo(f"a video's address is {url[:40]!r}; it is data:video/mp4;base64,... with its file")
    return video_of_file(decoded(data, "a video", MAX_BYTES))


def video_of_file(file: bytes) -> Video:
    """Raises BadVideo."""
    if len(file) > MAX_BYTES:
        raise BadVideo(
            f"a video's file has {len(file)} bytes; at most {MAX_BYTES} are read. Cut it, or make it smaller"
        )
    kind = _kind(file)
    try:
        return _animation(file, kind) if kind in ("GIF", "PNG", "WEBP") else _film(file, kind)
    except ShardlmError:
        raise
    except Exception as error:  # a file may be wrong in every way, and readers raise whatever comes of it
        raise _broken(error) from None


def _kind(file: bytes) -> str:
    """FFmpeg's name of the demuxer, or Pillow's of the format."""
    if file[4:8] in _BOXES:
        return "mov"
    if file[:4] == b"\x1aE\xdf\xa3":
        return "matroska"
    if file[:4] == b"RIFF" and file[8:12] in (b"AVI ", b"WEBP"):
        return "avi" if file[8:12] == b"AVI " else "WEBP"
    if file[:4] in _ANIMATED:
        return _ANIMATED[file[:4]]
    what = f"{len(file)} bytes that begin with {file[:12]!r}" if file else "empty"
    raise BadVideo(f"a video's file is {what}; it is none of {KNOWN}, or broken")


def _broken(error: Exception) -> BadVideo:
    return BadVideo(f"a video's file cannot be read: {type(error).__name__}: {error!s:.200}")


def _in_bounds() -> Callable[[int], None]:
    """A function to call with the number of frames so far. Raises BadVideo where there are too many, or time is up."""
    timely = in_time()

    def check(frames: int) -> None:
        if frames > MAX_FRAMES:
            raise BadVideo(f"a video has more than {MAX_FRAMES} frames; cut it")
        timely(frames)

    return check


def _read(
    frames: Callable[[], Any], size: tuple[int, int], indices: Sequence[int], then: Callable[[np.ndarray], T]
) -> list[T]:
    """What is made of frames by their numbers, ascending. `frames()`: a context of an iterator over functions that
    unpack one each."""
    wanted, found, check = set(indices), {}, _in_bounds()
    try:
        with frames() as every:
            for number, pixels in enumerate(every):
                check(number)
                if number in wanted:
                    own = pixels()
                    if own.shape[:2] != size:
                        raise BadVideo(
                            f"frame {number} of a video has {own.shape[1]} x {own.shape[0]} pixels and the first "
                            f"{size[1]} x {size[0]}; videos that change their size are not read"
                        )
                    found[number] = then(own)
                if number >= indices[-1]:
                    break
    except ShardlmError:
        raise
    except Exception as error:
        raise _broken(error) from None
    if missing := wanted - found.keys():
        raise BadVideo(f"a video ends before its frame {min(missing)}: its file is cut off or broken; write it anew")
    return [found[number] for number in indices]


def _film(file: bytes, kind: str) -> Video:
    check = _in_bounds()
    with _opened(file, kind) as (container, stream):
        count, coding = 0, stream.codec_context.codec.canonical_name
        for packet in container.demux(stream):
            count += _is_shown(packet, coding)
            check(count)
        told = stream.frames  # 0 where the file does not say; packets are there in any case
        count = min(count, told) if told > 0 else count
        rate = stream.average_rate or stream.guessed_rate
    with _frames(file, kind) as frames:
        first = next(frames, None)
        if first is None or not count:
            raise BadVideo("a video's file has no frame that can be shown; write it anew")
        size = first().shape[:2]
    if not rate or not is_rate(float(rate)):
        said = f"has {float(rate):g}" if rate else "does not say how many"
        raise BadVideo(f"a video's file {said} frames a second; it is {SAID}. Write it anew")
    read = functools.partial(_read, functools.partial(_frames, file, kind), size)
    return Video(count, size, float(rate), read, of_file=True)


def _is_shown(packet: Any, coding: str) -> bool:
    """Whether a packet of PyAV gives a frame: not so of one that a cut left for those after it to stand on (an edit
    list), nor of VP8's frames that others alone refer to, whose head says so (RFC 6386, 9.1)."""
    return packet.size > 0 and not packet.is_discard and (coding != "vp8" or bool(memoryview(packet)[0] & 0x10))


@contextlib.contextmanager
def _opened(file: bytes, kind: str) -> Iterator[tuple[Any, Any]]:
    """(container, its stream of frames) of PyAV. Raises BadVideo for what is not unpacked."""
    try:
        import av
    except ModuleNotFoundError:
        raise BadVideo(
            "videos' files are read by PyAV, which is not installed: pip install 'shardlm[video]', or give frames"
        ) from None
    ctypes.CDLL(av._core.__file__).av_max_alloc(ctypes.c_size_t(MOST_AT_ONCE))
    bound = {"max_pixels": str(MAX_PIXELS)}
    # Titles may be no text, which later ones pass over by themselves.
    own = {"metadata_errors": "ignore"} if int(av.__version__.partition(".")[0]) < 19 else {}
    with av.open(io.BytesIO(file), format=kind, options=bound, **own) as container:
        if not container.streams.video:
            raise BadVideo("a video's file has no frames, only sound or text")
        stream = container.streams.video[0]
        codec = stream.codec_context
        name = "unknown" if codec is None else codec.codec.canonical_name
        if name not in CODECS:
            raise BadVideo(f"a video is coded as {name}; it is one of {', '.join(CODECS)}")
        check_size(codec.width, codec.height)
        large = codec.width * codec.height > LARGE
        codec.options = bound if large else {"max_pixels": str(min(LARGE, MAX_PIXELS))}
        codec.thread_type, codec.thread_count = "AUTO", DECODERS
        with _alone() if large else contextlib.nullcontext():
            yield container, stream


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """While no other large film is unpacked. Raises BadVideo where that takes too long."""
    if not _ONE.acquire(timeout=READING):
        raise BadVideo(f"other videos of more than {LARGE} pixels a frame are read just now; make it smaller, or wait")
    try:
        yield
    finally:
        _ONE.release()


@contextlib.contextmanager
def _frames(file: bytes, kind: str) -> Iterator[Iterator[Callable[[], np.ndarray]]]:
    with _opened(file, kind) as (container, stream):
        yield (functools.partial(_upright, frame) for frame in container.decode(stream))


def _upright(frame: Any) -> np.ndarray:
    """uint8 [H, W, 3] of a frame of PyAV, turned as its camera was held."""
    check_size(frame.width, frame.height)
    pixels = frame.to_ndarray(format="rgb24")
    turns = round(frame.rotation / 90) % 4
    return np.ascontiguousarray(np.rot90(pixels, turns)) if turns else pixels


def _animation(file: bytes, kind: str) -> Video:
    with _shots(file, kind) as shots:
        count, milliseconds, size, check = 0, 0, None, _in_bounds()
        for shot in shots:
            count += 1
            check(count)
            image = shot()
            milliseconds += image.info.get("duration", 0)
            size = size or image.size[::-1]
    if count == 1 and not milliseconds:
        raise BadVideo(f"a video's {kind} file does not move; send it as an image")
    rate = 1000 * count / milliseconds if milliseconds else UNTIMED
    if not is_rate(rate):
        raise BadVideo(f"a video's {kind} file has {rate:g} frames a second; it is {SAID}. Write it anew")
    read = functools.partial(_read, functools.partial(_unpacked, file, kind), size)
    return Video(count, size, rate, read, of_file=True)


@contextlib.contextmanager
def _shots(file: bytes, kind: str) -> Iterator[Iterator[Callable[[], Image.Image]]]:
    """Functions that load one frame each, in turn, into the same image."""
    with Image.open(io.BytesIO(file), formats=(kind,)) as image:
        check_size(*image.size)
        yield _each(image)


def _each(image: Image.Image) -> Iterator[Callable[[], Image.Image]]:
    for number in range(MAX_FRAMES + 2):
        try:
            image.seek(number)
        except EOFError:
            return
        check_size(*image.size)  # a GIF's grows with its frames

        def loaded() -> Image.Image:
            image.load()
            return image

        yield loaded


@contextlib.contextmanager
def _unpacked(file: bytes, kind: str) -> Iterator[Iterator[Callable[[], np.ndarray]]]:
    with _shots(file, kind) as shots:
        yield (functools.partial(lambda shot: pixels_of(shot()), shot) for shot in shots)
