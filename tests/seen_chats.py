"""Conversations with images: a small sight, a tokenizer and templates as models that see have them, and PNGs."""

import base64
import functools
import hashlib
import io
import json
import pathlib

import numpy as np
from PIL import Image

from shardlm.chat import ChatTemplate
from shardlm.data.chats import conversation, write_lines
from shardlm.data.corpus import find_sources
from shardlm.data.rendering import Chats
from shardlm.errors import ShardlmError
from shardlm.tokenizer import train_bpe
from shardlm.vision.picture import Picture
from shardlm.vision.sight import Sight

PAD, ROW = "<|image_pad|>", "<|row|>"
SPECIAL = ("<|endoftext|>", PAD, ROW, "<|vision_start|>", "<|vision_end|>", "<|im_start|>", "<|im_end|>")
WHOLE = f"<|vision_start|>{PAD}<|vision_end|>"
# As Qwen's: contents are texts or parts.
PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{{ '<|vision_start|><|image_pad|><|vision_end|>' if c.type == 'image' else c.text }}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As LLaVA 1.5's: parts alone, images before the words.
LISTS = (
    "{% for m in messages %}{{ m.role | upper }}: {% for c in m.content if c.type == 'image' %}<|image_pad|>\n"
    "{% endfor %}{% for c in m.content if c.type == 'text' %}{% if m.role == 'assistant' %}{% generation %}"
    "{{ c.text }} {% endgeneration %}{% else %}{{ c.text }} {% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
# Contents are joined to other texts.
WORDS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@functools.cache
def tokenizer():
    return train_bpe(["the quick brown fox jumps over the lazy dog, user assistant é日🙂 " * 8] * 4, 320, SPECIAL)


def sight(axes=False, **options):
    """A vector for each 16 x 16 pixels; with `axes` nothing else, else a token at the end of each row."""
    ids = tokenizer().vocabulary

    def prepare(pixels):
        height, width = pixels.shape[0] // 16, pixels.shape[1] // 16
        if not height or not width:
            raise ShardlmError(f"an image has {pixels.shape[1]} x {pixels.shape[0]} pixels; it has 16 of a side")
        tiles = pixels[: height * 16, : width * 16].reshape(height, 16, width, 16, 3).mean((1, 3), dtype=np.float32)
        digest = hashlib.blake2b(pixels.tobytes(), digest_size=16).digest()
        return Picture({"tiles": tiles.reshape(-1, 3)}, (height, width), digest)

    def tokens(picture):
        return ([ids[PAD]] * picture.grid[1] + ([] if axes else [ids[ROW]])) * picture.grid[0]

    return Sight(ids[PAD], ids[PAD], prepare, tokens, (64, 1024), None, axes=axes, **options)


def chats(source=PARTS, own=None, folder=pathlib.Path()):
    return Chats(ChatTemplate(source, where="the template"), tokenizer(), own or sight(), pathlib.Path(folder))


def png(height=32, width=48, seed=0):
    """The file of one."""
    out = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def data_url(file):
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"


def said(role, *parts):
    """A message of a text, or of parts: texts, and images as they are."""
    if len(parts) == 1 and isinstance(parts[0], str):
        return {"role": role, "content": parts[0]}
    return {"role": role, "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]}


PLACE = {"type": "image"}


def shards_of(lines, folder, own=None, of_line=conversation, source=PARTS, name="chats", tokens=None):
    """Writes the lines below `folder`, and shards of them."""
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    how = chats(source, own)
    if tokens is not None:
        how = Chats(how.template, tokens, own)
    return write_lines(find_sources([str(path)]), how, folder / f"{name}-shards", of_line)
