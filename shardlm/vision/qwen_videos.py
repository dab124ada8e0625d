"""Videos as Qwen's models read them: frames sampled, brought to one size, and two by two (`frames`) one picture of
their encoder, whose attention stays inside of each such pair. Of Qwen2-VL and Qwen2.5-VL all vectors stand together and
time is an axis of positions, in seconds for Qwen2.5-VL (https://arxiv.org/abs/2502.13923, section 2.1.2); of Qwen3-VL
and 3.5 a text before each pair says when it is (https://arxiv.org/abs/2511.21631). No jax.

transformers' video_processing_qwen2_vl.py, video_processing_qwen3_vl.py and processing_*.py are the definition, but for
files whose folder says nothing of sampling: they are read at 2 frames a second, as Qwen's own qwen-vl-utils does, where
transformers reads all frames. The marks that templates write around a video with times go, as transformers had it when
these models came (4.57), and vLLM has it; 5.24 leaves them beside those of each picture. Frames are
resized by Pillow, as images are.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardlm.errors import ShardlmError
from shardlm.vision.asked import count_asked, edges_asked, number_asked, rate_asked
from shardlm.vision.images import CLIP_MEAN, CLIP_STD, Pixels
from shardlm.vision.picture import Clip
from shardlm.vision.qwen_images import LONGEST, QwenImages, resized_to
from shardlm.vision.video import Encode, Video

EDGES = ("shortest_edge", "longest_edge")
ASKS = ("min_pixels", "max_pixels", "size", "fps", "num_frames", "min_frames", "max_frames", "do_sample_frames")
RATE = 2.0  # frames a second, where nobody says
UNKNOWN = 24.0  # of frames of which nobody says how many a second are


@dataclasses.dataclass(frozen=True)
class QwenVideos:
    """images: how frames become patches; pixels: how they are resized; token: that stands for a vector; ends: tokens
    around those of a picture, (): times are no texts; fewest, most: pixels, of a frame or (`timed`) of all; rate,
    number: frames a second, or of a video, that are sampled, None: it is not said; least_frames, most_frames: of one
    that is sampled by rate; sample: whether frames may be left out, None: of files; seconds: positions a second on the
    axis of time, 0: one for each picture; capped: tokens that bound a video's pixels further, 0: none do."""

    images: QwenImages
    pixels: Pixels
    token: int
    ends: tuple[int, ...]
    fewest: float
    most: float
    rate: float | None
    number: int | None
    least_frames: int
    most_frames: int
    sample: bool | None
    seconds: float = 0.0
    capped: int = 0

    @property
    def timed(self) -> bool:
        """Whether texts say when frames are."""
        return bool(self.ends)

    @property
    def frames(self) -> int:
        """Of a picture."""
        return self.images.repeated

    @classmethod
    def told(
        cls, told: Mapping[str, Any], images: QwenImages, token: int, ends: tuple[int, ...], seconds: float
    ) -> "QwenVideos":
        """By what a folder says of preparing videos (images.video_processing). Raises ShardlmError for what means
        nothing."""
        timed, unit = bool(ends), (images.patch * images.merge) ** 2
        size = {name: n for name, n in (told.get("size") or {}).items() if n}
        fewest = told.get("min_pixels") if not timed else None
        most = told.get("max_pixels") if not timed else None
        found = cls(
            images,
            pixels_told(told, images, {} if timed else {"mean": CLIP_MEAN, "std": CLIP_STD}),
            token,
            ends,
            fewest or size.get("shortest_edge") or 128 * (32 if timed else 28) ** 2,
            most or size.get("longest_edge") or 768 * (32 if timed else 28) ** 2,
            told.get("fps", RATE if timed else None),
            told.get("num_frames"),
            told.get("min_frames") or 4,
            told.get("max_frames") or 768,
            told.get("do_sample_frames", timed) or None,
            seconds,
            (told.get("max_video_tokens") or (768 if timed else 128_000)) if told.get("cap_pixels_per_frame") else 0,
        )
        found = dataclasses.replace(found, rate=None) if found.number else found
        if found.most < unit:
            raise ShardlmError(f"the folder's videos have up to {found.most} pixels; a vector needs {unit}")
        return found

    def asked(self, how: Mapping[str, Any]) -> "QwenVideos":
        """As a request wants its videos (ASKS). Raises ShardlmError."""
        size = edges_asked(how, EDGES)
        bounds = {"shortest_edge": how.get("min_pixels"), "longest_edge": how.get("max_pixels")}
        edges = {name: bounds[name] or size.get(name) for name in EDGES}
        fewest, most = (number_asked(name, edges[name]) if edges[name] else own for name, own in self._edges())
        # Images have the same names and other bounds: what is asked of them moves the one that is not asked for.
        fewest = fewest if edges["shortest_edge"] else min(fewest, most)
        most = most if edges["longest_edge"] else max(fewest, most)
        unit = (self.images.patch * self.images.merge) ** 2
        if most < max(unit, fewest):
            raise ShardlmError(
                f"mm_processor_kwargs makes videos of {fewest} to {most} pixels; the second must be "
                f"{max(unit, fewest)} or more"
            )
        rate, number = rate_asked(how), count_asked(how, "num_frames")
        if rate and number:
            raise ShardlmError(f"mm_processor_kwargs has fps={rate} and num_frames={number}; give one of them")
        sample = how.get("do_sample_frames", bool(rate or number) or self.sample)
        if not isinstance(sample, bool | None):
            raise ShardlmError(f"mm_processor_kwargs has do_sample_frames={sample!r}; it is true or false")
        chosen = (rate, number) if rate or number else (self.rate, self.number)
        least, longest = (count_asked(how, name) for name in ("min_frames", "max_frames"))
        bounds = least or self.least_frames, longest or self.most_frames
        return dataclasses.replace(
            self,
            fewest=fewest,
            most=most,
            rate=chosen[0],
            number=chosen[1],
            least_frames=bounds[0],
            most_frames=bounds[1],
            sample=sample,
        )

    def _edges(self) -> tuple[tuple[str, float], ...]:
        return ("shortest_edge", self.fewest), ("longest_edge", self.most)

    def __call__(self, video: Video) -> "QwenPlanned":
        """Raises ShardlmError for one that cannot be read."""
        indices = self.sampled(video)
        height, width = self.size(len(indices), *video.size)
        count = height // self.images.patch * (width // self.images.patch)
        if count > self.images.most_patches:
            raise ShardlmError(
                f"frames of {video.size[1]} x {video.size[0]} make {count} patches and the model's encoder takes "
                f"{self.images.most_patches}; ask for less by max_pixels in mm_processor_kwargs"
            )
        return QwenPlanned(self, video, tuple(indices), (height, width))

    def sampled(self, video: Video) -> list[int]:
        """The frames to be read, ascending. Raises ShardlmError for more than there are."""
        if not self.samples(video):
            return list(range(video.count))
        rate = None if self.number else self.rate or RATE
        return (self._evenly if self.timed else self._by_steps)(video, self.number, rate)

    def samples(self, video: Video) -> bool:
        """Whether frames of it may be left out."""
        said = self.sample if video.sample is None else video.sample
        return video.of_file if said is None else said

    def _evenly(self, video: Video, number: int | None, rate: float | None) -> list[int]:
        """From the first to the last."""
        count = video.count
        if number is None:
            number = int(count / (video.rate or UNKNOWN) * rate)
            number = min(max(number, self.least_frames), self.most_frames, count)
        return np.linspace(0, count - 1, number).round().astype(int).tolist()

    def _by_steps(self, video: Video, number: int | None, rate: float | None) -> list[int]:
        """Each the first of an equal part; as many as pictures have frames, or a multiple."""
        count, frames = video.count, self.frames
        if number is not None:
            number = round(number / frames) * frames
        else:
            if video.rate is None:
                raise ShardlmError(
                    "a video's frames are to be sampled by fps and nobody says how many a second they are; give its "
                    "fps beside them, or ask for num_frames"
                )
            longest = min(self.most_frames, count) // frames * frames
            number = min(max(count / video.rate * rate, self.least_frames), longest, count)
            number = math.floor(number / frames) * frames
        number = number or min(frames, count)  # of one picture, where not even that was asked for
        if number > count:
            raise ShardlmError(f"num_frames={number} of a video of {count} frames; ask for fewer")
        steps = (np.arange(number) * (count / number)).astype(np.float32)
        return np.minimum(steps.astype(int), count - 1).tolist()

    def seconds_of(self, where: Sequence[int], rate: float) -> list[float]:
        """When pictures of these frames are: in the middle between the first and the last of each."""
        frames, where = self.frames, list(where)
        where += [where[-1]] * (-len(where) % frames)
        return [(where[i] / rate + where[i + frames - 1] / rate) / 2 for i in range(0, len(where), frames)]

    def written(self, when: float) -> tuple[str, str]:
        """The texts before and after a picture."""
        return f"<{when:.1f} seconds>", ""

    def size(self, count: int, height: int, width: int) -> tuple[int, int]:
        """Height and width that each of so many frames is brought to. Raises ShardlmError for one that is too long."""
        factor = self.images.patch * self.images.merge
        if self.timed:
            return self._size_of_all(max(count, self.frames), height, width, factor)
        most = self.most
        if self.capped:
            share = int(self.capped * factor * factor * 0.9) * self.frames // count
            most = max(min(most, share), int(self.fewest * 1.05))
        return resized_to(height, width, factor, self.fewest, most)

    def _size_of_all(self, count: int, height: int, width: int, factor: int) -> tuple[int, int]:
        most = self.most
        if self.capped:
            each = max(min(self.capped * factor * factor, most // count), int(self.fewest * 1.05))
            most = each * count
        if height < factor or width < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        if max(height, width) / min(height, width) > LONGEST:
            wrong = f"a video of {width} x {height} has one side of more than {LONGEST} times the other"
            raise ShardlmError(f"{wrong}; crop it")
        rows, columns = round(height / factor) * factor, round(width / factor) * factor
        pixels = round(count / self.frames) * self.frames * rows * columns
        if pixels > most:
            shrink = math.sqrt(count * height * width / most)
            rows, columns = (max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width))
        elif pixels < self.fewest:
            grow = math.sqrt(self.fewest / (count * height * width))
            rows, columns = (math.ceil(side * grow / factor) * factor for side in (height, width))
        return rows, columns


def pixels_told(told: Mapping[str, Any], images: QwenImages, usual: Mapping[str, Any]) -> Pixels:
    """How frames are resized. Raises ShardlmError where they would become other numbers than images do."""
    pixels = Pixels.told(told, **usual)
    if dataclasses.replace(pixels, resample=images.pixels.resample) != images.pixels:
        raise ShardlmError(
            f"the folder has image_mean={pixels.mean} and image_std={pixels.std} for videos and {images.pixels.mean} "
            f"and {images.pixels.std} for images"
        )
    return pixels


@dataclasses.dataclass(frozen=True, eq=False)
class QwenPlanned:
    """indices: of the video's frames; size: (height, width) that they are brought to."""

    how: QwenVideos
    video: Video
    indices: tuple[int, ...]
    size: tuple[int, int]

    @property
    def pictures(self) -> int:
        return -(-len(self.indices) // self.how.frames)

    @property
    def vectors(self) -> int:
        """Of all pictures."""
        height, width = self.size
        return self.pictures * (height * width) // (self.how.images.patch * self.how.images.merge) ** 2

    def clip(self, encode: Encode) -> Clip:
        """Reads the frames. Raises ShardlmError."""
        how, frames = self.how, self.how.frames
        read = self.video.read(self.indices, lambda pixels: how.pixels.resized(pixels, *self.size))
        read += [read[-1]] * (-len(read) % frames)
        pictures = tuple(how.images.picture(read[i : i + frames]) for i in range(0, len(read), frames))
        each = pictures[0].vectors
        if not how.timed:
            spans = [(i * each, (i + 1) * each) for i in range(len(pictures))]
            return Clip(pictures, [how.token] * (each * len(pictures)), spans, self._times())
        tokens, spans, (begin, end) = [], [], how.ends
        for when in how.seconds_of(self._where() or self.indices, self.video.rate or UNKNOWN):
            before, after = how.written(when)
            tokens += [*(encode(before) if before else ()), begin]
            spans.append((len(tokens), len(tokens) + each))
            tokens += [how.token] * each + [end, *(encode(after) if after else ())]
        return Clip(pictures, tokens, spans)

    def _times(self) -> tuple[int, ...]:
        """Of each picture, on the axis of time."""
        steps = np.arange(self.pictures)
        if not self.how.seconds:
            return tuple(steps.tolist())
        rate, where = self.video.rate or UNKNOWN, self._where()
        if self.video.rate is not None and where is not None:
            rate = len(where) / (self.video.total or self.video.count) * rate
        interval = np.float32(self.how.seconds) * np.float32(self.how.frames / rate)
        return tuple((steps.astype(np.float32) * interval).astype(int).tolist())

    def _where(self) -> Sequence[int] | None:
        """Which of the video's frames these are; None: nobody said."""
        if self.how.samples(self.video) or self.video.of_file:
            return self.indices
        return self.video.chosen
