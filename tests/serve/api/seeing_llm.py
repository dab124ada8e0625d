"""A fake AsyncLLM that sees, and templates as models that see have them."""

import base64
import dataclasses
import functools
import hashlib
import io
from collections.abc import Callable, Mapping

import numpy as np
from fake_llm import FakeLLM
from PIL import Image

from shardlm.chat import ChatTemplate
from shardlm.errors import ShardlmError
from shardlm.serve.images import Images
from shardlm.serve.reply_form import FormCompiler
from shardlm.tokenizer import train_bpe
from shardlm.vision.picture import Clip, Picture
from shardlm.vision.sight import Sight, Videos
from shardlm.vision.video import Video

PAD, ROW, VIDEO = "<|image_pad|>", "<|row|>", "<|video_pad|>"
SPECIAL = ("<|endoftext|>", PAD, ROW, "<|vision_start|>", "<|vision_end|>", "<|im_start|>", "<|im_end|>", VIDEO)
# Qwen 2.5 VL's, without videos, and with.
PARTS = """{% set image_count = namespace(value=0) %}{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}<|im_end|>
{% else %}{% for content in message['content'] %}{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}{% set image_count.value = image_count.value + 1 %}{% if add_vision_id %}Picture {{ image_count.value }}: {% endif %}<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""  # noqa: E501
PLACE = "{% elif content['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
FILMS = PARTS.replace("{% elif 'text' in content %}", f"{PLACE}{{% elif 'text' in content %}}")
ASKS = ("num_frames",)
# LLaVA 1.5's way: contents are lists alone, and images come first.
LISTS = """{% for message in messages %}{{ message['role'] | upper }}: {% for content in message['content'] | selectattr('type', 'equalto', 'image') %}<|image_pad|>
{% endfor %}{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] }} {% endfor %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"""  # noqa: E501
WORDS = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endfor %}"""  # noqa: E501
# Results of tools are joined to other texts, and what the user says is in parts.
TOOLS = PARTS.replace(
    "{% if message['content'] is string %}",
    "{% if message['role'] == 'tool' %}{{ '<tool>' + message['content'] + '</tool>' }}<|im_end|>\n"
    "{% elif message['content'] is string %}",
)


@functools.cache
def tokenizer():
    return train_bpe(["the quick brown fox jumps over the lazy dog, é日🙂 " * 8] * 4, 320, SPECIAL)


def sight(prepared=None):
    """A vector for each 16 x 16 pixels, and a token at the end of each row. `prepared`: a list of what was."""
    ids = tokenizer().vocabulary

    def prepare(pixels):
        height, width = pixels.shape[0] // 16, pixels.shape[1] // 16
        if not height or not width:
            raise ShardlmError(f"an image has {pixels.shape[1]} x {pixels.shape[0]} pixels; it has 16 of a side")
        if prepared is not None:
            prepared.append(pixels)
        tiles = pixels[: height * 16, : width * 16].reshape(height, 16, width, 16, 3).mean((1, 3), dtype=np.float32)
        digest = hashlib.blake2b(pixels.tobytes(), digest_size=16).digest()
        return Picture({"tiles": tiles.reshape(-1, 3)}, (height, width), digest)

    def tokens(picture):
        return ([ids[PAD]] * picture.grid[1] + [ids[ROW]]) * picture.grid[0]

    return Sight(
        ids[PAD], ids[PAD], prepare, tokens, (64, 1024), None, videos=Videos(ids[VIDEO], Frames(prepare, ids), ASKS)
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Frames:
    """Videos of which every `step`th frame is an image, with a token of a row before each."""

    prepare: Callable
    ids: Mapping[str, int]
    step: int = 1

    def asked(self, how):
        return dataclasses.replace(self, step=how["num_frames"])

    def __call__(self, video):
        return Reading(self, video, video.size[0] // 16 * (video.size[1] // 16) * len(range(0, video.count, self.step)))


@dataclasses.dataclass(frozen=True, eq=False)
class Reading:
    how: Frames
    video: Video
    vectors: int

    def clip(self, encode):
        pictures = tuple(self.video.read(range(0, self.video.count, self.how.step), self.how.prepare))
        ids, tokens, spans = self.how.ids, [], []
        for one in pictures:
            tokens += [ids[ROW], *[ids[VIDEO]] * one.vectors]
            spans.append((len(tokens) - one.vectors, len(tokens)))
        return Clip(pictures, tokens, spans)


@dataclasses.dataclass
class SeeingLLM(FakeLLM):
    """limit: of images in a prompt, and of videos."""

    template_source: str = PARTS
    limit: int | None = None

    def __post_init__(self):
        super().__post_init__()
        self.prepared = []  # pixels of each image
        self.tokenizer = tokenizer()
        self.template = ChatTemplate(self.template_source)
        self._end = self.tokenizer.end_of_document_id
        self._forms = FormCompiler(self.tokenizer, self.tokenizer.vocab_size, [self._end])
        limits = None if self.limit is None else {"image": self.limit, "video": self.limit}
        self.images = Images(sight(self.prepared), self.tokenizer, limits, most=self.max_model_len)


def picture(height=32, width=48, shade=90):
    """A PNG of one shade."""
    out = io.BytesIO()
    Image.fromarray(np.full((height, width, 3), shade, np.uint8)).save(out, "PNG")
    return out.getvalue()


def data_url(file):
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"


def part(file):
    """As OpenAI's chats have an image."""
    return {"type": "image_url", "image_url": {"url": data_url(file), "detail": "low"}}


def text(words):
    return {"type": "text", "text": words}


def seen(height, width, count=1):
    """What the prompt's text has of images of so many tiles."""
    return (PAD * width + ROW) * height * count
