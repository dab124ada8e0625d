"""Images as they are given, in a file, a text or memory, as pixels. Formats are those below and no others, and what a
file's head says of its size is checked before anything of it is unpacked. No jax."""

import base64
import binascii
import io
import re
from typing import Any

import numpy as np
from PIL import Image

from shardlm.errors import ShardlmError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
MAX_BYTES = 32 * 2**20  # of a file, as of a request's body
MAX_PIXELS = 2**26  # 8192 x 8192, 192 MiB once unpacked: a file of 100 KB may say it has 10^9
MAX_SIDE = 2**15
# Each goes over all pixels, in 12 ms for 16 million, and may take 56 bytes of a file: 32 MiB of them hours of a core.
# Programs write ten or so; libtiff has the same bound.
MAX_SCANS = 100
WHITE = (255, 255, 255)

_HEAD = 200  # characters before a data URL's comma
_SPACE = re.compile(r"\s+")
_ORIENTATION = 0x0112  # of Exif
_TILE = (322, 323)  # width and height of a TIFF's tiles, each of which is unpacked as a whole
_MARKER = re.compile(rb"\xff([^\x00\x01\xd0-\xd7\xff])")  # of a JPEG, but for those without a length within scans
_SEGMENTS = 4096  # of a JPEG: 32 MiB of profiles are 512
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class BadImage(ShardlmError):
    """An image that cannot be read."""


def pixels_of(image: Any) -> np.ndarray:
    """uint8 [height, width, 3], RGB, of a file's bytes, a data URL, a PIL.Image or an array. Of several frames the
    first, turned as its camera was held, and on white where it is transparent (as vLLM has it; transformers leaves the
    colour that is underneath). Raises BadImage."""
    if isinstance(image, str):
        image = file_of(image)
    if isinstance(image, bytes | bytearray | memoryview):
        return _of_file(bytes(image))
    if isinstance(image, Image.Image):
        check_size(*image.size)
        return _unpacked(image, "image")
    if isinstance(image, np.ndarray):
        return _of_array(image)
    raise BadImage(
        f"an image is a {type(image).__name__}; give a PIL.Image, an array uint8 [height, width, 3], the bytes of a "
        "file or a data URL"
    )


def file_of(url: str) -> bytes:
    """Of a data URL, data:image/png;base64,... (https://www.rfc-editor.org/rfc/rfc2397). Raises BadImage."""
    comma = url.find(",", 0, _HEAD)
    if url[:5].lower() != "data:" or comma < 0:
        raise BadImage(f"an image's address is {url[:40]!r}; it is data:image/png;base64,... with its file")
    if not url[:comma].lower().endswith(";base64"):
        raise BadImage(f"an image's address begins with {url[:comma][:60]!r}; its file must be in base64")
    return decoded(url[comma + 1 :])


def decoded(text: str, what: str = "an image", most: int = MAX_BYTES) -> bytes:
    """From base64. Raises BadImage."""
    if len(text) > 2 * most:
        raise BadImage(f"{what} in base64 has {len(text)} characters, of a file above {most} bytes; send less")
    try:
        return base64.b64decode(_SPACE.sub("", text) if _SPACE.search(text) else text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadImage(f"{what} is not in base64 ({error}); it begins with {text[:20]!r}") from None


def check_size(width: int, height: int) -> None:
    """Raises BadImage for a size that is not unpacked."""
    if width < 1 or height < 1:
        raise BadImage(f"an image has {width} x {height} pixels; it has at least one")
    if width * height > MAX_PIXELS or max(width, height) > MAX_SIDE:
        raise BadImage(
            f"an image has {width} x {height} pixels; at most {MAX_PIXELS} are read, and {MAX_SIDE} of a side. Make it "
            "smaller: models read a few million"
        )


def _of_file(file: bytes) -> np.ndarray:
    if len(file) > MAX_BYTES:
        raise BadImage(f"an image's file has {len(file)} bytes; at most {MAX_BYTES} are read. Make it smaller")
    try:
        with Image.open(io.BytesIO(file), formats=FORMATS) as image:
            check_size(*image.size)
            _check_work(image, file)
            return _unpacked(image, image.format)
    except Image.UnidentifiedImageError:
        what = f"{len(file)} bytes that begin with {file[:12]!r}" if file else "empty"
        raise BadImage(f"an image's file is {what}; it is none of {', '.join(FORMATS)}, or broken") from None
    except Image.DecompressionBombError as error:  # of a size above Pillow's own limit
        raise BadImage(f"an image is too large: at most {MAX_PIXELS} pixels are read ({error})") from None
    except ShardlmError:
        raise
    except Exception as error:  # a file may be wrong in every way, and Pillow's readers raise whatever comes of it
        raise BadImage(f"an image's file cannot be read: {type(error).__name__}: {error}") from None


def _check_work(image: Image.Image, file: bytes) -> None:
    """Raises BadImage for a file that takes far more memory or time than its pixels do."""
    tags = getattr(image, "tag_v2", {})
    if image.format == "TIFF" and all(tag in tags for tag in _TILE):
        check_size(*(tags[tag] for tag in _TILE))
    # Anything but a scan's beginning may have these bytes too, which is no reason to look closer as a rule.
    if file.startswith(b"\xff\xd8") and file.count(b"\xff\xda") > MAX_SCANS and _scans(file) > MAX_SCANS:
        raise BadImage(f"an image's JPEG data has more than {MAX_SCANS} scans; save it again")


def _scans(jpeg: bytes) -> int:
    """How many scans its first image has, up to one above MAX_SCANS. Raises BadImage for one of too many segments."""
    found, at = 0, 2
    for _ in range(_SEGMENTS):
        marker = _MARKER.search(jpeg, at)
        if marker is None or marker[1] == b"\xd9" or found > MAX_SCANS:  # its end
            return found
        found += marker[1] == b"\xda"
        at = marker.end() + int.from_bytes(jpeg[marker.end() : marker.end() + 2], "big")
    raise BadImage(f"an image's JPEG data has more than {_SEGMENTS} segments; save it again")


def _unpacked(image: Image.Image, kind: str) -> np.ndarray:
    try:
        return np.ascontiguousarray(np.asarray(_in_colours(_upright(image))))
    except ShardlmError:
        raise
    except Exception as error:
        raise BadImage(f"an image's {kind} data is broken: {type(error).__name__}: {error}") from None


def _upright(image: Image.Image) -> Image.Image:
    image.load()
    try:
        turn = _TURNS.get(image.getexif().get(_ORIENTATION))
    except Exception:  # of Exif that is broken, which viewers show as if it were not there
        turn = None
    return image if turn is None else image.transpose(turn)


def _in_colours(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        return Image.fromarray(_of_16_bits(np.asarray(image))).convert("RGB")
    if image.mode == "F":
        raise BadImage("an image has pixels in float32, whose range it does not say; save it in 8 bits")
    if image.has_transparency_data:
        seen = image.convert("RGBA")
        ground = Image.new("RGB", seen.size, WHITE)
        ground.paste(seen, mask=seen.getchannel("A"))
        return ground
    return image if image.mode == "RGB" else image.convert("RGB")


def _of_16_bits(grey: np.ndarray) -> np.ndarray:
    """uint8 of 16 bits, which may lie in 32: Pillow's own conversion cuts at 255."""
    if grey.min() < 0 or grey.max() > 65535:
        raise BadImage(f"an image has greys from {grey.min()} to {grey.max()}; save it in 8 or 16 bits")
    return (grey >> 8).astype(np.uint8)


def _of_array(array: np.ndarray) -> np.ndarray:
    if array.dtype != np.uint8 or array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3, 4)):
        raise BadImage(
            f"an image is an array {array.dtype} {list(array.shape)}; it is uint8 [height, width, 3] in RGB (or of one "
            "channel, or four with transparency), of values from 0 to 255"
        )
    check_size(array.shape[1], array.shape[0])
    if array.ndim == 3 and array.shape[2] == 3:
        return np.ascontiguousarray(array)
    return _unpacked(Image.fromarray(array[..., 0] if array.ndim == 3 and array.shape[2] == 1 else array), "array")
