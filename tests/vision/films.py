"""Small videos, and what transformers' processors make of them, whose modules need torchvision: functions of theirs are
taken out of the files (seeing.functions_of)."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from seeing import functions_of, noise

from shardlm.vision.images import CLIP_MEAN, CLIP_STD


def film(frames: int, height: int, width: int, seed: int = 0) -> np.ndarray:
    """uint8 [frames, height, width, 3]: noise that moves on by some pixels a frame."""
    still = noise(height, width + 3 * frames, seed)
    return np.stack([still[:, 3 * i : 3 * i + width] for i in range(frames)])


def file_of(frames: np.ndarray, rate: int = 8, kind: str = "mp4", codec: str = "libx264", **options: str) -> bytes:
    """A file of them, by PyAV."""
    import av

    out = io.BytesIO()
    with av.open(out, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=rate, options=options)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            for packet in stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return out.getvalue()


def patchified(
    frames: Sequence[np.ndarray], patch: int, merge: int, together: int, mean=CLIP_MEAN, std=CLIP_STD
) -> tuple[Any, list[int]]:
    """(pixel_values_videos, [t, h, w]) of frames that have their size, as the processors' `patchify` makes them."""
    import torch

    [patchify] = functions_of("qwen2_vl/video_processing_qwen2_vl.py", "patchify")
    pixels = torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2).float() / 255
    mean, std = (torch.tensor(a)[:, None, None] for a in (mean, std))
    values, *grid = patchify(None, ((pixels - mean) / std)[None], patch, merge, together)
    return values[0], grid
