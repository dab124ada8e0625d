"""What a model that sees makes of images and videos: how many a prompt may have, each prepared once however often a
conversation sends it, and their tokens in a prompt. No jax."""

import collections
import concurrent.futures
import hashlib
import math
import os
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardlm.errors import ShardlmError
from shardlm.serve.request import PromptTooLong
from shardlm.serve.sampling_params import SamplingParams
from shardlm.serve.video_forms import key_of, video_of, videos_of
from shardlm.tokenizer import Tokenizer
from shardlm.vision.image_parts import SEEING
from shardlm.vision.picture import Clip, Picture, Placed
from shardlm.vision.read import BadImage, file_of, pixels_of
from shardlm.vision.sight import Sight
from shardlm.vision.video import Encode, Video
from shardlm.vision.video import Prepare as PrepareVideo

KEPT = 2**30  # bytes of prepared images; one of a megapixel has 3 MB, a photograph of 12 up to 37
# At once. One may take a few hundred megabytes while it is unpacked, and tens of milliseconds of a core.
THREADS = max(2, min(8, os.cpu_count() or 1))

Prepare = Callable[[np.ndarray], Picture]
Key = tuple[Any, bytes]  # how an image, or a video, is prepared, and what it is known by before that
Prepared = Picture | Clip


class Images:
    """Of one model. Any thread may call.

    Attributes:
      token: the text that stands for an image in a prompt.
      video_token: that for a video; "" where the model reads none.
      asked, found: images that were to be prepared, and those of them that were already.
    """

    def __init__(
        self,
        sight: Sight,
        tokenizer: Tokenizer,
        limits: Mapping[str, int] | None = None,
        kept: int = KEPT,
        most: int = 2**31,
    ):
        """`limits`: limit_mm_per_prompt; of what it does not name, as many as there is room for. `most`: tokens that a
        prompt has room for, above which no video is unpacked."""
        self.sight, self._limits, self._most = sight, dict(limits or {}), most
        self.token = tokenizer.decode([sight.token], skip_special=False)
        mark = tokenizer.decode([sight.videos.token], skip_special=False) if sight.videos else ""
        self.video_token = mark if mark and tokenizer.is_added(mark) else ""  # else it is a word, or none
        self._encode: Encode = tokenizer.encode
        self.threads = concurrent.futures.ThreadPoolExecutor(THREADS, "images")  # which start with the first image
        self._kept, self._bytes = kept, 0
        self.asked = self.found = 0
        self._pictures: collections.OrderedDict[Key, Prepared] = collections.OrderedDict()
        self._coming: dict[Key, concurrent.futures.Future[Prepared]] = {}  # that a thread prepares
        self._changing = threading.Lock()

    def check_count(self, count: int, kind: str = "image") -> None:
        """Raises ShardlmError for more images, or videos, than a prompt may have."""
        limit = self._limits.get(kind)
        if limit is not None and count > limit:
            wanted = f'limit_mm_per_prompt={{"{kind}": {limit}}}'
            raise ShardlmError(f"the prompt has {count} {kind}s; {wanted} allows {limit}. Send fewer, or raise it")

    def preparing(self, how: Mapping[str, Any] | None) -> Prepare:
        """What prepares the images of a request with these mm_processor_kwargs, if any. Raises ShardlmError for what
        cannot be asked for."""
        return self.sight.asked(how or {}).prepare

    def preparing_videos(self, how: Mapping[str, Any] | None) -> PrepareVideo:
        """The same of its videos. Raises ShardlmError too where the model reads none."""
        videos = self.sight.asked(how or {}).videos
        if videos is None or not self.video_token:
            raise ShardlmError("the prompt has videos, and this model reads text and images; send images of it")
        return videos.prepare

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

    def prepared_video(self, video: Any, prepare: PrepareVideo | None = None) -> Clip:
        """Of what video_forms.video_of takes, or a Clip itself. Raises ShardlmError, and PromptTooLong before anything
        of one is unpacked that has more tokens than there is room for."""
        if isinstance(video, Clip):
            return video
        prepare = prepare or self.preparing_videos({})
        return self._once((prepare, key_of(video)), lambda: video_of(video), self._watched)

    def _watched(self, prepare: PrepareVideo, video: Video) -> Clip:
        planned = prepare(video)
        if planned.vectors > self._most:
            raise PromptTooLong(
                f"a video of {video.count} frames has {planned.vectors} tokens; max_model_len={self._most} must hold "
                "it. Ask for fewer frames or pixels (fps, num_frames, max_pixels in mm_processor_kwargs), or raise "
                "max_model_len",
                planned.vectors,
                self._most,
            )
        return planned.clip(self._encode)

    def tokens(self, one: Prepared) -> int:
        """In its place."""
        return len(one.tokens if isinstance(one, Clip) else self.sight.tokens(one))

    def placed(
        self, ids: Sequence[int], pictures: Sequence[Picture], clips: Sequence[Clip] = ()
    ) -> tuple[list[int], tuple[Placed, ...]]:
        """The tokens of a prompt with those of its images and videos, and where these are. Raises ShardlmError where it
        has more or fewer places for them than there are."""
        if self.video_token and not clips and self.sight.videos.token in ids:
            raise ShardlmError(
                f"the prompt has places for videos ({self.video_token}) and comes with none; give as many videos"
            )
        return self.sight.expanded(self.sight.videos.bare(ids) if clips else ids, pictures, clips)

    def read(self, ids: Sequence[int], given: "Given", most: int) -> tuple[Sequence[int], tuple[Placed, ...]]:
        """As `placed`, of images that are still to be prepared. Raises ShardlmError, and PromptTooLong as soon as
        there are above `most` tokens."""
        asked = self.sight.asked(given.how)
        places = {self.sight.token, self.sight.videos.token} if self.video_token else {self.sight.token}
        if not given.media and places.isdisjoint(ids):  # as most prompts are
            return ids, ()
        read, tokens = {"image": [], "video": []}, 0
        kinds = {
            "image": (given.images, lambda one: self.prepared(one, asked.prepare)),
            "video": (given.videos, lambda one: self.prepared_video(one, self.preparing_videos(given.how))),
        }
        for kind, (every, prepare) in kinds.items():
            self.check_count(len(every), kind)
            for number, one in enumerate(every, 1):
                try:
                    read[kind].append(prepare(one))
                except PromptTooLong:
                    raise
                except ShardlmError as error:
                    raise BadImage(f"{kind} {number} of {len(every)}: {error}") from None
                tokens += self.tokens(read[kind][-1])
                check_tokens(tokens, number, most, kind)
        return self.placed(ids, read["image"], read["video"])

    def _once(self, key: Key, read: Callable[[], Any], made: Callable[[Any, Any], Prepared] | None = None) -> Prepared:
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
        made = made or (lambda prepare, pixels: prepare(pixels))
        return self._made(key, lambda: made(key[0], read()), own) if coming is None else coming.result()

    def _made(self, key: Key, make: Callable[[], Prepared], own: concurrent.futures.Future[Prepared]) -> Prepared:
        """Prepared here, for others who wait for the same too."""
        try:
            made = make()
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


def check_tokens(tokens: int, images: int, most: int, kind: str = "image") -> None:
    """Raises PromptTooLong where the first images, or videos, of a prompt alone have more tokens than the model has
    room for."""
    if tokens > most:
        raise PromptTooLong(
            f"the prompt has at least {tokens} tokens in its first {images} {kind}s; max_model_len={most} must hold "
            "it. Send fewer or smaller ones, or raise max_model_len",
            tokens,
            most,
        )


class Given(NamedTuple):
    """What comes with a prompt: images and videos, and how they are to be prepared otherwise than usual
    (mm_processor_kwargs)."""

    images: Sequence[Any] = ()
    how: Mapping[str, Any] = types.MappingProxyType({})
    videos: Sequence[Any] = ()

    @property
    def media(self) -> int:
        """How many."""
        return len(self.images) + len(self.videos)


def given_with(prompt: Any, how: Mapping[str, Any] | None = None) -> Given:
    """Of a prompt in vLLM's form, {"prompt": text, "multi_modal_data": {"image": one or several, "video": one or
    several}, "mm_processor_kwargs": {...}}; `how`: what holds where it does not say. Raises ShardlmError for other
    data."""
    own = prompt.get("mm_processor_kwargs") if isinstance(prompt, Mapping) else None
    return Given(images_of(prompt), checked((how if own is None else own) or {}), videos_of(prompt))


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
    if not isinstance(given, Mapping) or given.keys() - {"image", "video"}:
        what = min(map(str, given.keys() - {"image", "video"})) if isinstance(given, Mapping) else type(given).__name__
        raise ShardlmError(f'multi_modal_data has {what!r}; it is {{"image": one or a list, "video": one or a list}}')
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
    if given.media or given.how:
        kinds = {"images": len(given.images), "videos": len(given.videos)}
        what = " and ".join(f"{count} {kind}" for kind, count in kinds.items() if count)
        what = what or "mm_processor_kwargs, which are of images"
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
    if engine.sight is None:
        return None
    return Images(engine.sight, engine.tokenizer, limits, most=engine.max_model_len)


def _digest(kind: bytes, data: Any) -> bytes:
    return hashlib.blake2b(data, digest_size=32, person=hashlib.blake2b(kind, digest_size=16).digest()).digest()


def size_of(one: Prepared) -> int:
    """Bytes; what an image repeats is there once."""
    pictures = one.pictures if isinstance(one, Clip) else (one,)
    return sum(_bytes(array) for picture in pictures for array in picture.inputs.values())


def _bytes(array: np.ndarray) -> int:
    own = zip(array.shape, array.strides, strict=True)
    return math.prod(length for length, step in own if step) * array.itemsize
