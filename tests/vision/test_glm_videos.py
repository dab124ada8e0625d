"""Videos as GLM's models read them against transformers."""

import types

import numpy as np
import pytest
from films import film
from glm_checkpoints import BEGIN, END, IMAGE, VIDEO, folder_of, inputs
from qwen_checkpoints import patchified
from seeing import Eyes, close, functions_of
from served import SIZES, Family, asked, held_to_transformers, replies

from shardlm import LLM
from shardlm.errors import ShardlmError
from shardlm.vision.glm_images import GlmImages
from shardlm.vision.glm_videos import GlmVideos
from shardlm.vision.images import CLIP_MEAN, CLIP_STD, Pixels
from shardlm.vision.video import Video, video_of_frames

LONG, SHORT = (film(6, 24, 40), 0.8), (film(3, 32, 24, 1), 24.0)
ASKS = [
    ([1, 20, BEGIN, VIDEO, END, 21, 22], [], [LONG]),
    ([BEGIN, VIDEO, END, 5, 6, BEGIN, VIDEO, END, 7], [], [SHORT, LONG]),
    ([7, 8, 9], [], []),
]


def videos(later: bool, **told) -> GlmVideos:
    images = GlmImages(56 * 56, 2**24, 14, 2, Pixels(mean=CLIP_MEAN, std=CLIP_STD), repeated=2, frames=2)
    return GlmVideos.of_folder(told, images, 7, (8, 9), later)


def test_frames_are_those_of_transformers():
    pytest.importorskip("transformers", reason="transformers' processors are asked")
    for later in (False, True):
        file = f"glm4{'6' * later}v/video_processing_glm4{'6' * later}v.py"
        [theirs] = functions_of(file, "sample_frames")
        for count, rate in (
            (7, 24.0),
            (2, 3.0),
            (100, 29.97),
            (3000, 30.0),
            (31, 10.0),
            (20_000, 25.0),
            (90_000, 25.0),
        ):
            for seconds in (None, count / rate):
                about = types.SimpleNamespace(total_num_frames=count, fps=rate, duration=seconds)
                own = types.SimpleNamespace(fps=2, max_duration=300, temporal_patch_size=2)
                one = Video(count, (9, 9), rate, lambda indices, then: [], of_file=seconds is not None)
                assert videos(later).sampled(one) == theirs(own, about).tolist(), (later, count, rate, seconds)
        with pytest.raises(ShardlmError, match="nobody says how many a second they are; give its fps"):
            videos(later).sampled(Video(9, (9, 9), None, lambda indices, then: []))


def test_sizes_are_those_of_transformers():
    pytest.importorskip("transformers", reason="transformers' processors are asked")
    [theirs] = functions_of("glm4v/video_processing_glm4v.py", "smart_resize")
    for height, width in ((480, 640), (1080, 1920), (20, 33), (1000, 60)):
        for count in (2, 12, 600):
            expected = theirs(count, height, width, 2, 28, 112 * 112, 28 * 28 * 2 * 30_000)
            assert videos(False).size(count, height, width) == expected


@pytest.fixture(scope="module", params=["glm4v", pytest.param("glm46v", marks=pytest.mark.wide)])
def seen(request, tmp_path_factory):
    pytest.importorskip("transformers", reason="what transformers made is in references/")
    return request.param, *folder_of(request.param, tmp_path_factory.mktemp(request.param))


def test_vectors_and_tokens(seen):
    import torch
    from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
    from transformers.models.glm46v.processing_glm46v import Glm46VProcessor
    from transformers.video_utils import VideoMetadata

    kind, path, model = seen
    eyes, frames = Eyes(path), film(5, 24, 40)
    about = {"fps": 2.5, "total_num_frames": 20, "frames_indices": [0, 3, 6, 9, 19], "do_sample_frames": False}
    clip = eyes.sight.videos.prepare(video_of_frames(frames, about)).clip(lambda text: [text])
    values, grid = patchified(frames, 4, 2, 2)
    with torch.no_grad():
        theirs = model.model.get_video_features(values, torch.tensor([grid])).pooler_output[0].numpy()
    close(np.concatenate([eyes.vectors(one) for one in clip.pictures]), theirs, 2e-5)
    own = object.__new__(Glm4vProcessor if kind == "glm4v" else Glm46VProcessor)
    own.video_processor, own.image_token = types.SimpleNamespace(merge_size=2), "I"
    known = VideoMetadata(20, fps=2.5, frames_indices=[0, 3, 6, 9, 19])
    written = own.replace_video_token({"video_grid_thw": np.array([grid]), "video_metadata": [known]}, 0)
    names = {IMAGE: "I", 92: "<|begin_of_image|>", 93: "<|end_of_image|>"}
    assert "".join(names.get(one, one) for one in clip.tokens) == written
    assert [clip.tokens[start:end] for start, end in clip.spans] == [[IMAGE] * 15] * 3
    assert (eyes.sight.videos.token, eyes.sight.token) == (VIDEO, IMAGE)


@pytest.mark.wide
@pytest.mark.parametrize("kind", [pytest.param(kind, id=f"{kind}-video") for kind in ("glm4v", "glm4v_moe", "glm46v")])
def test_replies_are_those_of_transformers(kind, tmp_path):
    """All at once; once more, when what they begin with is in pages."""
    pytest.importorskip("transformers", reason="what transformers made is in references/")
    family = Family(*folder_of(kind, tmp_path), inputs)
    llm = LLM(family.folder, **SIZES)
    held_to_transformers(family, llm, ASKS)
    again = asked(llm, ASKS)
    assert again[0].num_cached_tokens and replies(again) == replies(asked(llm, ASKS))
