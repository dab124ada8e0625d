"""Videos as GLM's models read them: as Qwen3-VL's, two frames a picture, each between tokens of its own, and after it a
text that says when it is. transformers' video_processing_glm4v.py and video_processing_glm46v.py are the definition:
the first samples by rate, the second more coarsely the longer a video is. No jax."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from shardlm.errors import ShardlmError
from shardlm.vision.glm_images import EDGES, FEWEST, GlmImages
from shardlm.vision.images import CLIP_MEAN, CLIP_STD
from shardlm.vision.qwen_videos import QwenVideos, pixels_told
from shardlm.vision.video import Video

ASKS = ("fps", "size", "do_sample_frames")
MOST = 28 * 28 * 2 * 30_000  # pixels of all frames, where a folder does not say
RATE, LONGEST = 2.0, 300.0  # frames a second, and seconds up to which that holds
# Of the later ones: pictures a second of videos up to so many seconds, the last for longer ones too; frames at most.
_BY_LENGTH = ((30, 3.0), (300, 1.0), (2400, 0.5))
_MOST_FRAMES = 640


@dataclasses.dataclass(frozen=True)
class GlmVideos(QwenVideos):
    """rate: frames a second, of a video of up to `longest` seconds; of a longer one as many as of that. later: those of
    GLM-4.6V, which are sampled by length."""

    longest: float = LONGEST
    later: bool = False

    @classmethod
    def of_folder(
        cls, told: Mapping[str, Any], images: GlmImages, token: int, ends: tuple[int, int], later: bool
    ) -> "GlmVideos":
        """By what a folder says of preparing videos (images.video_processing). Raises ShardlmError for what means
        nothing."""
        size = dict(zip(EDGES, (FEWEST, MOST), strict=True))
        size |= {name: n for name, n in (told.get("size") or {}).items() if n}
        return cls(
            images,
            pixels_told(told, images, {"mean": CLIP_MEAN, "std": CLIP_STD}),
            token,
            ends,
            size["shortest_edge"],
            size["longest_edge"],
            float(told.get("fps") or RATE),
            None,
            0,
            0,
            told.get("do_sample_frames", True) or None,
            longest=float(told.get("max_duration") or LONGEST),
            later=later,
        )

    def sampled(self, video: Video) -> list[int]:
        """The frames to be read, ascending, an even number of them. Raises ShardlmError where nobody says how many a
        second there are."""
        if not self.samples(video):
            return list(range(video.count))
        if video.rate is None:
            raise ShardlmError(
                "a video's frames are to be sampled and nobody says how many a second they are; give its fps beside "
                "them, or do_sample_frames=false"
            )
        seconds = video.count / video.rate if video.of_file else round((video.count - 1) / video.rate) + 1
        found = self._by_length(video, seconds) if self.later else self._by_rate(video, seconds)
        found = list(dict.fromkeys(found)) or [0]
        return found + found[-1:] * (len(found) % 2)

    def _by_rate(self, video: Video, seconds: float) -> Sequence[int]:
        last = video.count - 1
        if seconds <= self.longest:
            number = max(math.floor(seconds * self.rate), 1)
            return [min(last, math.ceil(i * video.rate / self.rate)) for i in range(number)]
        number = int(self.longest * self.rate)
        if number >= video.count:
            return range(video.count)
        return [min(last, math.ceil(when * video.rate)) for when in np.linspace(0, seconds, number)]

    def _by_length(self, video: Video, seconds: float) -> Sequence[int]:
        counted = min(seconds, _BY_LENGTH[-1][0])
        rate = next(rate for most, rate in _BY_LENGTH if counted <= most)
        number, last = min(int(counted * rate * self.frames), _MOST_FRAMES), video.count - 1
        if video.count < number:
            return np.linspace(0, last, number, dtype=int).tolist()
        found = list(_spread(video, 1 / (self.frames * rate), int(seconds)))
        if len(found) < number:
            return np.linspace(found[0], found[-1], number, dtype=int).tolist()
        return found if len(found) == number else np.linspace(0, last, number, dtype=int).tolist()

    def seconds_of(self, where: Sequence[int], rate: float) -> list[float]:
        """When pictures of these frames are: with the first of each."""
        return [index / rate for index in where[:: self.frames]]

    def written(self, when: float) -> tuple[str, str]:
        return "", f"{when:.1f} seconds" if self.later else f"{int(when)}"


def _spread(video: Video, step: float, end: int) -> Iterator[int]:
    """The first frame, and the first after each `step` seconds from there."""
    following, each = 0, 1 / video.rate
    for number in range(video.count):
        if number * each >= following:
            following += step
            yield number
            if following >= end:
                return
