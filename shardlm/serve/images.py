"""What a model that sees makes of images: how many a prompt may have, each prepared once however often a conversation
sends it, and their tokens in a prompt. No jax."""

import collections
import concurrent.futures
import hashlib
import os
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardlm.errors import ShardlmError
from shardlm.serve.request import PromptTooLong
from shardlm.serve.sampling_params import SamplingParams
from shardlm.tokenizer import Tokenizer
from shardlm.vision.image_parts import SEEING
from shardlm.vision.picture import Picture, Placed
from shardlm.vision.read import BadImage, file_of, pixels_of
from shardlm.vision.sight import Sight

KEPT = 2**30  # bytes of prepared images; one of a megapixel has 3 MB, a photograph of 12 up to 37
# At once. One may take a few hundred megabytes while it is unpacked, and tens of milliseconds of a core.
THREADS = max(2, min(8, os.cpu_count() or 1))

Prepare = Callable[[np.ndarray], Picture]
Key = tuple[Prepare, bytes]  # how an image is prepared, and what it is known by before that


class Images:
    """Of one model. Any thread may call.

    Attributes:
      token: the text that stands for an image in a prompt.
      asked, found: images that were to be prepared, and those of them that were already.
    """

    def __init__(self, sight: Sight, tokenizer: Tokenizer, limits: Mapping[str, int] | None = None, kept: int = KEPT):
        """`limits`: limit_mm_per_prompt; without "image" in it, as many as there is room for."""
        self.sight, self._limit = sight, (limits or {}).get("image")
        self.token = tokenizer.decode([sight.token], skip_special=False)
        self.threads = concurrent.futures.ThreadPoolExecutor(THREADS, "images")  # which start with the first image
        self._kept, self._bytes = kept, 0
        self.asked = self.found = 0
        self._pictures: collections.OrderedDict[Key, Picture] = collections.OrderedDict()
        self._coming: dict[Key, concurrent.futures.Future[Picture]] = {}  # that a thread prepares
        self._changing = threading.Lock()

    def check_count(self, count: int) -> None:
        """Raises ShardlmError for more images than a prompt may have."""
        if self._limit is not None and count > self._limit:
            wanted = f'limit_mm_per_prompt={{"image": {self._limit}}}'
            raise ShardlmError(f"the prompt has {count} images; {wanted} allows {self._limit}. Send fewer, or raise it")

    def preparing(self, how: Mapping[str, Any] | None) -> Prepare:
        """What prepares the images of a request with these mm_processor_kwargs, if any. Raises ShardlmError for what
        cannot be asked for."""
        return self.sight.asked(how or {}).prepare

    def prepared(self, image: Any, prepare: Prepare | None = None) -> Picture:
        """Of what `pixels_of` takes, or a Picture itself; as usual, or by what `preparing` gave. Raises ShardlmError
        for what is no image, or cannot be prepared."""
        if isinstance(image, Picture):
            return image
        prepare = prepare or self.sight.prepare
        if isinstance(image, str):
            image = file_of(image)
        if isinstance(image, bytes | bytearray | memoryview):
            return self._once((prepare, _digest(b"file", image)), lambda: pixels_of(image))
        pixels = pixels_of(image)
        return self._once((prepare, _digest(repr(pixels.shape).encode(), pixels)), lambda: pixels)

    def tokens(self, picture: Picture) -> int:
        """In its place."""
        return len(self.sight.tokens(picture))

    def placed(self, ids: Sequence[int], pictures: Sequence[Picture]) -> tuple[list[int], tuple[Placed, ...]]:
        """The tokens of a prompt with those of its images, and where these are. Raises ShardlmError where it has more
        or fewer places for images than there are."""
        return self.sight.expanded(ids, pictures)

    def read(self, ids: Sequence[int], given: "Given", most: int) -> tuple[Sequence[int], tuple[Placed, ...]]:
        """As `placed`, of images that are still to be prepared. Raises ShardlmError, and PromptTooLong as soon as
        there are above `most` tokens."""
        images, prepare = given.images, self.preparing(given.how)
        if not images and self.sight.token not in ids:  # as most prompts are
            return ids, ()
        self.check_count(len(images))
        pictures, tokens = [], 0
        for number, image in enumerate(images, 1):
            try:
                pictures.append(self.prepared(image, prepare))
            except ShardlmError as error:
                raise BadImage(f"image {number} of {len(images)}: {error}") from None
            tokens += self.tokens(pictures[-1])
            check_tokens(tokens, len(pictures), most)
        return self.placed(ids, pictures)

    def _once(self, key: Key, pixels: Callable[[], np.ndarray]) -> Picture:
        with self._changing:
            self.asked += 1
            if (found := self._pictures.get(key)) is not None:
                self._pictures.move_to_end(key)
                self.found += 1
                return found
            coming = self._coming.get(key)
            if coming is None:
                own = self._coming[key] = concurrent.futures.Future()
            else:
                self.found += 1
        return self._made(key, pixels, own) if coming is None else coming.result()

    def _made(self, key: Key, pixels: Callable[[], np.ndarray], own: concurrent.futures.Future[Picture]) -> Picture:
        """Prepared here, for others who wait for the same too."""
        try:
            made = key[0](pixels())
        except BaseException as error:
            with self._changing:
                del self._coming[key]
            own.set_exception(error)
            raise
        with self._changing:
            del self._coming[key]
            self._pictures[key] = made
            self._bytes += size_of(made)
            while self._bytes > self._kept:
                self._bytes -= size_of(self._pictures.popitem(last=False)[1])
        own.set_result(made)
        return made


def check_tokens(tokens: int, images: int, most: int) -> None:
    """Raises PromptTooLong where the first images of a prompt alone have more tokens than the model has room for."""
    if tokens > most:
        raise PromptTooLong(
            f"the prompt has at least {tokens} tokens in its first {images} images; max_model_len={most} must hold it. "
            "Send fewer or smaller ones, or raise max_model_len",
            tokens,
            most,
        )


class Given(NamedTuple):
    """What comes with a prompt: images, and how they are to be prepared otherwise than usual (mm_processor_kwargs)."""

    images: Sequence[Any] = ()
    how: Mapping[str, Any] = types.MappingProxyType({})


def given_with(prompt: Any, how: Mapping[str, Any] | None = None) -> Given:
    """Of a prompt in vLLM's form, {"prompt": text, "multi_modal_data": {"image": one or several},
    "mm_processor_kwargs": {...}}; `how`: what holds where it does not say. Raises ShardlmError for other data."""
    own = prompt.get("mm_processor_kwargs") if isinstance(prompt, Mapping) else None
    return Given(images_of(prompt), checked((how if own is None else own) or {}))


def checked(how: Any) -> Mapping[str, Any]:
    """Raises ShardlmError for what is no mm_processor_kwargs."""
    if not isinstance(how, Mapping):
        raise ShardlmError(f'mm_processor_kwargs is a {type(how).__name__}; it is an object, {{"max_pixels": N}}')
    return how


def images_of(prompt: Any) -> Sequence[Any]:
    """Those that a prompt has. Raises ShardlmError for other data."""
    given = prompt.get("multi_modal_data") if isinstance(prompt, Mapping) else None
    if given is None:
        return ()
    if not isinstance(given, Mapping) or given.keys() - {"image"}:
        what = min(map(str, given.keys() - {"image"})) if isinstance(given, Mapping) else type(given).__name__
        raise ShardlmError(f'multi_modal_data has {what!r}; it is {{"image": one or a list}}')
    if (images := given.get("image")) is None:
        return ()
    return images if isinstance(images, list | tuple) else (images,)


def with_images(
    images: Images | None, ids: Sequence[int], given: Given, most: int
) -> tuple[Sequence[int], tuple[Placed, ...]]:
    """Of a prompt and what comes with it, where `images` is None with a model that does not see. Raises
    ShardlmError."""
    if images is not None:
        return images.read(ids, given, most)
    if given.images or given.how:
        what = f"{len(given.images)} images" if given.images else "mm_processor_kwargs, which are of images"
        raise ShardlmError(f"this model reads text, and the prompt has {what}; {SEEING}")
    return ids, ()


def check_cut(params: SamplingParams) -> None:
    """Raises ShardlmError where a prompt with images is to be cut, which could be within one."""
    if params.truncate_prompt_tokens is not None:
        raise ShardlmError(
            f"truncate_prompt_tokens={params.truncate_prompt_tokens} of a prompt with images, of which it could leave "
            "half of one; leave it out"
        )


def of_engine(engine: Any, limits: Mapping[str, int] | None) -> Images | None:
    """None: its model does not see."""
    return None if engine.sight is None else Images(engine.sight, engine.tokenizer, limits)


def _digest(kind: bytes, data: Any) -> bytes:
    return hashlib.blake2b(data, digest_size=32, person=hashlib.blake2b(kind, digest_size=16).digest()).digest()


def size_of(picture: Picture) -> int:
    """Bytes."""
    return sum(array.nbytes for array in picture.inputs.values())
