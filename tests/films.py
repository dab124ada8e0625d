"""Small videos, as frames and in files."""

import io

import numpy as np


def film(frames: int, height: int, width: int, seed: int = 0) -> np.ndarray:
    """uint8 [frames, height, width, 3]: squares that move on by some pixels a frame."""
    wide = width + 3 * frames
    coarse = np.random.default_rng(seed).integers(0, 256, (-(-height // 8), -(-wide // 8), 3), np.uint8)
    still = np.kron(coarse, np.ones((8, 8, 1), np.uint8))[:height, :wide]
    return np.stack([still[:, 3 * i : 3 * i + width] for i in range(frames)])


def file_of(
    frames: np.ndarray, rate: int = 8, kind: str = "mp4", codec: str = "libx264", pixels: str = "yuv420p"
) -> bytes:
    """A file of them, by PyAV."""
    import av

    out = io.BytesIO()
    with av.open(out, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = pixels
        for frame in frames:
            for packet in stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return out.getvalue()
