"""Pixels on the way to an encoder: resized, as numbers, in patches; and what a folder says of it. No jax."""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from shardlm.errors import ShardlmError
from shardlm.hf_files import OF_IMAGES, OF_VIDEOS
from shardlm.tokenizer import Tokenizer
from shardlm.vision.read import MAX_PIXELS

LANCZOS, BILINEAR, BICUBIC = 1, 2, 3  # by Pillow's numbers, which files have
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)


@dataclasses.dataclass(frozen=True)
class Pixels:
    """How pixels become numbers: resized by Pillow, then (pixel * factor - mean) / std of each colour."""

    mean: tuple[float, ...] = HALF
    std: tuple[float, ...] = HALF
    factor: float = 1 / 255
    resample: int = BICUBIC

    @classmethod
    def told(cls, told: Mapping[str, Any], **usual: Any) -> "Pixels":
        """As a folder says (`processing`), `usual` where it says nothing. Raises ShardlmError for steps that are
        switched off, and for ways of resizing that there are not."""
        for step in ("do_resize", "do_rescale", "do_normalize"):
            if told.get(step) is False:
                raise ShardlmError(
                    f"the folder prepares images with {step}=false, which is not supported; set it to true"
                )
        made = cls(**usual)
        found = cls(
            tuple(map(float, told.get("image_mean") or made.mean)),
            tuple(map(float, told.get("image_std") or made.std)),
            float(told.get("rescale_factor") or made.factor),
            made.resample if told.get("resample") is None else told["resample"],
        )
        if found.resample not in (LANCZOS, BILINEAR, BICUBIC):
            raise ShardlmError(f"the folder resizes images by resample={found.resample}; supported: 1 to 3")
        if not len(found.mean) == len(found.std) == 3 or not all(found.std):
            raise ShardlmError(
                f"the folder has image_mean={found.mean} and image_std={found.std}; each needs 3 numbers, the second "
                "none of them 0"
            )
        return found

    def resized(self, pixels: np.ndarray, height: int, width: int) -> np.ndarray:
        """uint8 [H, W, 3] -> uint8 [height, width, 3]. Raises ShardlmError for more than are read."""
        check_grown(pixels, height, width)
        if pixels.shape[:2] == (height, width):
            return pixels
        return np.asarray(Image.fromarray(pixels).resize((width, height), self.resample))

    def numbers(self, pixels: np.ndarray) -> np.ndarray:
        """uint8 [H, W, 3] -> float32 of the same shape."""
        mean, std = (np.asarray(a, np.float64) for a in (self.mean, self.std))
        every = (np.arange(256)[:, None] * self.factor - mean) / std  # of each of 256 values, by colour
        return np.stack([every[:, colour].astype(np.float32)[pixels[..., colour]] for colour in range(3)], axis=-1)


def check_grown(pixels: np.ndarray, height: int, width: int) -> None:
    """Raises ShardlmError where an image that is almost a line would become far larger than it is: of 1 x 32768 pixels
    with a shorter side of 336 11 GB."""
    if height * width > MAX_PIXELS:
        raise ShardlmError(
            f"an image of {pixels.shape[1]} x {pixels.shape[0]} pixels becomes one of {width} x {height} for this "
            f"model, and at most {MAX_PIXELS} are prepared: crop it, or make it smaller"
        )


def patches(pixels: np.ndarray, size: int, merge: int = 1) -> np.ndarray:
    """[rows * size, columns * size, 3] -> [rows * columns, size, size, 3], row by row; with `merge` squares of so many
    by so many patches, row by row, and inside of each row by row."""
    height, width, colours = pixels.shape
    each = size * merge
    cut = pixels.reshape(height // each, merge, size, width // each, merge, size, colours)
    return np.ascontiguousarray(cut.transpose(0, 3, 1, 4, 2, 5, 6)).reshape(-1, size, size, colours)


def places(rows: int, columns: int, merge: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """(row, column) int32 of each patch of a grid, in the order of `patches`."""
    found = np.indices((rows, columns), np.int32).reshape(2, rows // merge, merge, columns // merge, merge)
    row, column = found.transpose(0, 1, 3, 2, 4).reshape(2, -1)
    return row, column


def known_by(pixels: np.ndarray, *how: Any) -> bytes:
    """The digest of an image that is prepared so."""
    found = hashlib.blake2b(repr((pixels.shape, how)).encode(), digest_size=16)
    found.update(np.ascontiguousarray(pixels))
    return found.digest()


def program_sizes(most: int, merged: int = 1, least: int = 256) -> tuple[int, ...]:
    """Patches of an encoder's programs for images of at most so many: each twice the one before, as a program is
    compiled for each, and the last what `most` needs, in blocks of `least`."""
    block = least * merged
    last = -(-most // block) * block if most > block else -(-most // merged) * merged
    found = [block << i for i in range(max(0, (last // block).bit_length())) if block << i < last]
    return (*found, last)


def processing(folder: pathlib.Path, asked: Mapping[str, Any]) -> dict[str, Any]:
    """What a folder says of preparing images: of preprocessor_config.json, and of processor_config.json, in which
    transformers 5 has the same; empty without them. `asked`: otherwise than it says."""
    own, of_all = (_read(folder / name) for name in OF_IMAGES)
    inner = of_all.pop("image_processor", None)
    return own | (inner if isinstance(inner, dict) else {}) | dict(asked)


def video_processing(folder: pathlib.Path) -> dict[str, Any]:
    """What a folder says of preparing videos: of processor_config.json, else video_preprocessor_config.json, else what
    it says of images, as transformers reads them."""
    inner = _read(folder / OF_IMAGES[1]).get("video_processor")
    return inner if isinstance(inner, dict) else _read(folder / OF_VIDEOS) or _read(folder / OF_IMAGES[0])


def edges(told: Mapping[str, Any], usual: Mapping[str, int]) -> dict[str, int]:
    """The `size` that a folder says, by name of the edge."""
    size = told.get("size") or usual
    return {"height": size, "width": size} if isinstance(size, int) else {k: v for k, v in size.items() if v}


def token_ids(folder: pathlib.Path, names: Sequence[str]) -> tuple[int, ...]:
    """The ids of special tokens, by the folder's tokenizer.json or tokenizer_config.json. Raises ShardlmError for one
    that is in neither."""
    found = _added(folder)
    missing = [name for name in names if name not in found]
    if missing:
        raise ShardlmError(
            f"the tokenizer in {folder} has no token {', '.join(missing)}, which images need; download its "
            "tokenizer.json again"
        )
    return tuple(found[name] for name in names)


def added(folder: pathlib.Path, name: str, usual: int) -> int:
    """The id of a special token where there is one of this name, else `usual`."""
    return _added(folder).get(name, usual)


def spelt(folder: pathlib.Path, names: Sequence[str]) -> list[Sequence[int]]:
    """The tokens of each of some names, which are special tokens as a rule."""
    found = _added(folder)
    if all(name in found for name in names):
        return [(found[name],) for name in names]
    tokenizer = Tokenizer.load(folder)
    return [(found[name],) if name in found else tokenizer.encode(name) for name in names]


def _added(folder: pathlib.Path) -> dict[str, int]:
    """The ids of special tokens, by name."""
    found = {one["content"]: one["id"] for one in _read(folder / "tokenizer.json").get("added_tokens", [])}
    decoder = _read(folder / "tokenizer_config.json").get("added_tokens_decoder", {})
    return found | {one["content"]: int(id) for id, one in decoder.items() if isinstance(one, dict)}


def named(folder: pathlib.Path, name: str, usual: str) -> str:
    """The special token that a folder's tokenizer_config.json has by a name; `usual` where it says none."""
    own = _read(folder / "tokenizer_config.json")
    found = own.get(name) or (own.get("extra_special_tokens") or {}).get(name) or usual
    return found["content"] if isinstance(found, dict) else found


def newlines(folder: pathlib.Path) -> dict[int, int]:
    """The tokens of so many line ends, by how many, where the folder's tokenizer.json has one for two. Raises
    ShardlmError where it has none."""
    read = _read(folder / "tokenizer.json")
    vocabulary = read.get("model", {}).get("vocab", {})
    vocabulary = vocabulary if isinstance(vocabulary, dict) else {piece[0]: id for id, piece in enumerate(vocabulary)}
    vocabulary = vocabulary | {one["content"]: one["id"] for one in read.get("added_tokens", [])}
    found = {many: vocabulary["\n" * many] for many in range(1, 64) if "\n" * many in vocabulary}
    if 2 not in found:
        raise ShardlmError(f"{folder}/tokenizer.json has no token of two line ends, which stand beside images")
    return found


def _read(file: pathlib.Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ShardlmError(f"{file} is not JSON ({error}); download it again") from None
    return found if isinstance(found, dict) else {}
