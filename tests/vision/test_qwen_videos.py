"""Videos as Qwen's models read them against transformers: frames, sizes, patches, tokens and vectors."""

import json
import types

import numpy as np
import pytest
import references
from films import film
from qwen_checkpoints import IMAGE, VIDEO, folder_of, patchified
from seeing import Eyes, close, functions_of

from shardlm.errors import ShardlmError
from shardlm.serve.images import Images
from shardlm.tokenizer import Tokenizer
from shardlm.vision.images import CLIP_MEAN, CLIP_STD, Pixels
from shardlm.vision.qwen_images import QwenImages
from shardlm.vision.qwen_videos import QwenVideos
from shardlm.vision.registry import sight_of
from shardlm.vision.video import Video, video_of_frames

PROCESSORS = {False: "qwen2_vl/video_processing_qwen2_vl.py", True: "qwen3_vl/video_processing_qwen3_vl.py"}
BOUNDS = {"temporal_patch_size": 2, "min_frames": 4, "max_frames": 768}


def videos(timed: bool, **told) -> QwenVideos:
    patch = 16 if timed else 14
    pixels = Pixels() if timed else Pixels(mean=CLIP_MEAN, std=CLIP_STD)
    images = QwenImages(56 * 56, 2**24, patch, 2, pixels, repeated=2)
    return QwenVideos.told(told, images, 7, (8, 9) if timed else (), 0.0 if timed else 2.0)


def video(count: int, rate: float | None, height: int = 100, width: int = 200) -> Video:
    return Video(count, (height, width), rate, lambda indices, then: [], of_file=True)


def test_frames_are_those_of_transformers():
    pytest.importorskip("torch", reason="transformers' processors are asked")
    [steps], [evenly] = (functions_of(PROCESSORS[timed], "sample_frames") for timed in (False, True))
    for count, rate in ((7, 24.0), (8, 3.0), (100, 29.97), (250, 25.0), (3000, 30.0), (31, 10.0), (90_000, 60.0)):
        for how in ({"fps": 2.0}, {"fps": 0.5}, {"num_frames": 6}, {"fps": 2.0, "max_frames": 10}, {"fps": 30}):
            about = types.SimpleNamespace(total_num_frames=count, fps=rate)
            own = types.SimpleNamespace(**BOUNDS | {"num_frames": None, "fps": None} | how)
            asked = {"num_frames": how.get("num_frames"), "fps": how.get("fps")}
            own.fps = how.get("fps")
            expected = [steps(own, about, **asked).tolist(), evenly(own, about, **asked).tolist()]
            found = [videos(timed).asked(how).sampled(video(count, rate)) for timed in (False, True)]
            assert found == expected, (count, rate, how)


def test_sizes_are_those_of_transformers():
    pytest.importorskip("transformers", reason="transformers' processors are asked")
    [one] = functions_of("qwen2_vl/image_processing_qwen2_vl.py", "smart_resize")
    [every] = functions_of(PROCESSORS[True], "smart_resize")
    for height, width in ((480, 640), (1080, 1920), (20, 33), (1000, 60), (90, 400)):
        for count in (2, 5, 12, 60, 768):
            for fewest, most in ((128 * 28 * 28, 768 * 28 * 28), (4096, 25_165_824)):
                size = {"shortest_edge": fewest, "longest_edge": most}
                bounds = {"min_pixels": fewest, "max_pixels": most}
                assert videos(False, size=size).size(count, height, width) == one(height, width, 28, **bounds)
                expected = every(count, height, width, 2, 32, **bounds)
                assert videos(True, size=size).size(count, height, width) == expected


def test_bounds_on_all_frames():
    """cap_pixels_per_frame, with the formulas of transformers' `resize`."""
    pytest.importorskip("transformers", reason="transformers' processors are asked")
    capped = videos(False, cap_pixels_per_frame=True)
    total, most = int(128_000 * 28 * 28 * 0.9), 768 * 28 * 28
    for count in (10, 700):
        share = max(min(most, total * 2 // count), int(128 * 28 * 28 * 1.05))
        [resize] = functions_of("qwen2_vl/image_processing_qwen2_vl.py", "smart_resize")
        assert capped.size(count, 1080, 1920) == resize(1080, 1920, 28, 128 * 28 * 28, share)
    capped = videos(True, cap_pixels_per_frame=True, size={"shortest_edge": 4096, "longest_edge": 25_165_824})
    [resize] = functions_of(PROCESSORS[True], "smart_resize")
    for count in (4, 700):
        share = max(min(768 * 32 * 32, 25_165_824 // count), int(4096 * 1.05)) * count
        assert capped.size(count, 1080, 1920) == resize(count, 1080, 1920, 2, 32, 4096, share)


OFTEN = ("qwen2_5_vl", "qwen3_vl")  # the others repeat these


@pytest.fixture(
    scope="module",
    params=[*OFTEN, *(pytest.param(kind, marks=pytest.mark.wide) for kind in ("qwen2_vl", "qwen3_5", "exaone4_5"))],
)
def made(request, tmp_path_factory):
    return folder_of(request.param, tmp_path_factory.mktemp(request.param))


def test_vectors(made):
    """Of each picture are those that transformers makes of the whole video, whatever its program's size; the last frame
    of an odd number is there twice."""
    import torch

    path, model = made
    eyes = Eyes(path)
    how = eyes.sight.videos.prepare.asked({"do_sample_frames": False})
    for count, height, width in ((4, 24, 40), (5, 32, 32), (2, 40, 56)):
        frames = film(count, height, width)
        clip = how(video_of_frames(frames)).clip(lambda text: [5] * len(text.split()))
        size = how.size(count, height, width)
        pixels = [how.pixels.resized(frame, *size) for frame in frames]
        values, grid = patchified(pixels, 4, 2, 2)
        with torch.no_grad():
            theirs = model.model.get_video_features(values, torch.tensor([grid]))
        deep = [each[0] for each in getattr(theirs, "deepstack_features", None) or []]
        theirs = torch.cat([theirs.pooler_output[0], *deep], -1).numpy()
        assert grid[0] == len(clip.pictures) == -(-count // 2) and clip.vectors == len(theirs)
        found = [eyes.vectors(one, patches) for one, patches in zip(clip.pictures, (0, 256, 0), strict=False)]
        close(np.concatenate(found), theirs, 2e-5)


def test_tokens(made):
    """As transformers' processor writes them in place of the video's token."""
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
    from transformers.video_utils import VideoMetadata

    path, _ = made
    config = json.loads((path / "config.json").read_text())
    sight = sight_of(path, config)
    about = {"fps": 2.5, "total_num_frames": 20, "frames_indices": [0, 3, 6, 9, 19], "do_sample_frames": False}
    clip = sight.videos.prepare(video_of_frames(film(5, 24, 32), about)).clip(lambda text: [text])
    assert sight.videos.token == VIDEO and sight.token == IMAGE
    [each] = {one.vectors for one in clip.pictures}
    if "num_position_embeddings" not in config["vision_config"]:
        assert clip.tokens == [VIDEO] * 3 * each and clip.spans == [(0, each), (each, 2 * each), (2 * each, 3 * each)]
        return
    own = object.__new__(Qwen3VLProcessor)
    own.video_processor = types.SimpleNamespace(merge_size=2, temporal_patch_size=2)
    own.video_token, own.vision_start_token, own.vision_end_token = "V", "S", "E"
    known = VideoMetadata(20, fps=2.5, frames_indices=[0, 3, 6, 9, 19])
    rows, columns = clip.pictures[0].grid
    grids = np.array([[3, rows * 2, columns * 2]])
    written = own.replace_video_token({"video_grid_thw": grids, "video_metadata": [known]}, 0)
    names = {VIDEO: "V", 92: "S", 93: "E"}
    assert "".join(names.get(one, one) for one in clip.tokens) == written
    assert [clip.tokens[start:end] for start, end in clip.spans] == [[VIDEO] * each] * 3


def test_whether_frames_are_left_out():
    """Of files, unless it is asked for; of frames where the folder, or who gives them, says so."""
    file, frames = video(48, 24.0), video_of_frames(film(48, 24, 32), {"fps": 24})
    told = video_of_frames(film(48, 24, 32), {"fps": 24, "do_sample_frames": False})
    for timed, usual in ((False, 48), (True, 4)):
        own = videos(timed)
        assert [len(own.sampled(one)) for one in (file, frames, told)] == [4, usual, 48]
        own = own.asked({"do_sample_frames": False})
        assert [len(own.sampled(one)) for one in (file, frames, told)] == [48, 48, 48]
        own = own.asked({"fps": 4})
        assert [len(own.sampled(one)) for one in (file, frames, told)] == [8, 8, 48]
        assert len(videos(timed, do_sample_frames=True).sampled(frames)) == 4


def test_other_numbers_than_those_of_images():
    """Bytes become numbers on the device, in one way."""
    with pytest.raises(ShardlmError, match=r"image_mean=\(0.1, 0.1, 0.1\) and .* for videos and \(0.5, 0.5, 0.5\)"):
        videos(True, image_mean=[0.1] * 3)


@pytest.mark.parametrize("timed", [False, True])
def test_bounds_that_are_asked_of_images(timed):
    """They have the same names, and may be below, or above, those of videos."""
    own = videos(timed)
    for how in ({"max_pixels": 64 * 28 * 28}, {"min_pixels": 1024 * 28 * 28}, {"size": {"longest_edge": 50_176}}):
        found = own.asked(how)
        [value] = how.get("size", how).values()
        assert value in (found.fewest, found.most) and found.fewest <= found.most
    with pytest.raises(ShardlmError, match="makes videos of 9000 to 8000 pixels"):
        own.asked({"min_pixels": 9000, "max_pixels": 8000})


def test_what_cannot_be_asked():
    own = videos(True)
    for how, message in (
        ({"fps": 2, "num_frames": 4}, "fps=2 and num_frames=4; give one"),
        ({"fps": 0}, "fps=0; it is a number of frames a second, 0.01 to 10000"),
        ({"fps": 1e300}, "it is a number of frames a second"),
        ({"num_frames": 10**9}, "num_frames=1000000000; it is a number of frames, 1 to 4096"),
        ({"num_frames": 2.5}, r"num_frames=2.5; it is a number of frames"),
        ({"max_frames": 0}, "max_frames=0"),
        ({"do_sample_frames": 1}, "do_sample_frames=1; it is true or false"),
        ({"size": {"height": 3}}, "an object with shortest_edge, longest_edge"),
        ({"max_pixels": 100}, "the second must be"),
    ):
        with pytest.raises(ShardlmError, match=message):
            own.asked(how)
    assert videos(False).asked({"num_frames": 1}).sampled(video(90, 2.0)) == [0, 45]  # and not all
    assert videos(False).asked({"max_frames": 1}).sampled(video(90, 2.0)) == [0, 45]
    assert videos(False).asked({"num_frames": 1}).sampled(video(1, 2.0)) == [0]
    with pytest.raises(ShardlmError, match="num_frames=10 of a video of 4 frames; ask for fewer"):
        videos(False).asked({"num_frames": 10}).sampled(video(4, 2.0))
    with pytest.raises(ShardlmError, match="nobody says how many a second they are; give its fps"):
        videos(False).asked({"fps": 1}).sampled(video(9, None))
    with pytest.raises(ShardlmError, match="more than 200 times the other; crop it"):
        own.size(4, 32, 32 * 300)


@pytest.mark.parametrize(
    "kind, stay", [("qwen2_5_vl-video", True), ("qwen3_vl-video", False), ("qwen3_5-video", False)]
)
def test_marks_around_the_place_of_a_video(kind, stay):
    """A video with times takes the place of all of <|vision_start|><|video_pad|><|vision_end|>."""
    home = references.HOME / kind
    seen = Images(sight_of(home, json.loads((home / "config.json").read_text())), Tokenizer.load(home))
    clip = seen.prepared_video((film(2, 24, 32), {"fps": 2}))
    for ids, without in (
        ([1, 92, VIDEO, 93, 92, VIDEO, 93, 4], [1, VIDEO, VIDEO, 4]),
        ([92, 1, VIDEO, 93], [92, 1, VIDEO, 93]),
        ([VIDEO], [VIDEO]),
    ):
        clips = [clip] * ids.count(VIDEO)
        found, placed = seen.placed(ids, [], clips)
        assert (found, len(placed)) == (seen.sight.expanded(ids if stay else without, [], clips)[0], len(clips))
