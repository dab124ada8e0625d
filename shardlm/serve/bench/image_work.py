"""What a benchmark asks with images: as many random ones beside each prompt, in OpenAI's chat, as of vLLM's random-mm
(https://docs.vllm.ai/en/latest/contributing/benchmarks.html). No jax."""

import base64
import io
from collections.abc import Sequence

import numpy as np
from PIL import Image

from shardlm.errors import ShardlmError
from shardlm.serve.bench.workload import Job, random_jobs

Size = tuple[int, int]  # height, width in pixels
# One token each in most vocabularies; a prompt of so many words has about as many tokens.
WORDS = (
    *("the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not"),
    *("he", "his", "but", "at", "are", "this", "have", "from", "or", "had", "an", "they", "which", "one", "you"),
    *("were", "her", "all", "she", "there", "would", "their", "we", "him", "been", "has", "when", "who", "will"),
)


def size_of(text: str) -> Size:
    """Of HEIGHTxWIDTH. Raises ShardlmError for what is none."""
    height, _, width = text.lower().partition("x")
    if not (height.isdecimal() and width.isdecimal() and int(height) and int(width)):
        raise ShardlmError(f"image_size={text}: give HEIGHTxWIDTH in pixels, as 448x896")
    return int(height), int(width)


def noise(size: Size, *seed: int) -> np.ndarray:
    """uint8 [height, width, 3]: no image is another's, so that nothing of it is kept anywhere."""
    return np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)


def data_url(pixels: np.ndarray) -> str:
    """As JPEG, which photographs come as."""
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG")
    return f"data:image/jpeg;base64,{base64.b64encode(out.getvalue()).decode()}"


def image_jobs(
    count: int, length: int, new: int, shared: int, seed: int, ratio: float, images: int, size: Size
) -> list[Job]:
    """As workload.random_jobs, of words instead of token ids, each with so many images before them."""
    asked = random_jobs(count, length, new, shared, len(WORDS), seed, ratio)
    return [_chat(job, [data_url(noise(size, seed, i, k)) for k in range(images)]) for i, job in enumerate(asked)]


def _chat(job: Job, urls: Sequence[str]) -> Job:
    body = dict(job.body)
    words = " ".join(WORDS[id] for id in body.pop("prompt"))
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return Job({"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": words}]}], **body})
