"""Images in a line of JSONL: in which of the usual forms it has them, and their files.

They are parts of a message's content that bring their own, {"type": "image", "image" | "url" | "path": ...} or
{"type": "image_url", "image_url": {"url": ...}}, or the line's "images" (or "image"), in the order of their places.
Those are parts {"type": "image"}, or without such parts <image> in what is said, or without that too the beginning of
what the user first says. Where the line has no images, <image> is words.
"""

import re
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardlm.errors import ShardlmError
from shardlm.vision.image_parts import IMAGE, has_images, is_image
from shardlm.vision.read import MAX_BYTES, BadImage, file_of

Message = Mapping[str, Any]
MARK = "<image>"
SHOWN = 120  # characters of an address in messages
_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+):")  # of two letters or more
_NAMES = ("url", "path", "image")


def given(line: Mapping[str, Any], where: str) -> list[str]:
    """The paths and addresses in its "images" or "image". Raises ShardlmError for what is neither."""
    found = [name for name in ("images", "image") if line.get(name)]
    if len(found) > 1:
        raise ShardlmError(f"{where} has both image and images; put all of them into images")
    values = line[found[0]] if found else []
    every = values if isinstance(values, list) else [values]
    return [_reference(value, f"{where}: {found[0]}[{i}]") for i, value in enumerate(every)]


def with_places(messages: Sequence[Message], images: Sequence[str], where: str) -> tuple[list[Message], list[str]]:
    """(messages in which images are parts, the image of each part). `images`: those of the line. Raises ShardlmError
    where they are more or fewer than the places for them."""
    messages = list(messages)
    if images and not any(map(has_images, messages)):
        marked = [_split(message) for message in messages]
        messages = marked if any(map(has_images, marked)) else _before_words(messages, len(images), where)
    own = [
        _of_part(part, f"{where}: messages[{i}].content[{j}]")
        for i, message in enumerate(messages)
        if has_images(message)
        for j, part in enumerate(message["content"])
        if is_image(part)
    ]
    if (places := own.count(None)) != len(images):
        raise ShardlmError(
            f"{where} has {len(images)} images and {places} places for them; give as many in images as there are parts"
            f' {{"type": "image"}} without an image of their own, or {MARK} in what is said'
        )
    rest = iter(images)
    return messages, [next(rest) if one is None else one for one in own]


def image_file(reference: str, folder: Path) -> bytes:
    """The bytes of a data URL or of a file, whose path may be relative to `folder`. Raises BadImage."""
    scheme = match[1].lower() if (match := _SCHEME.match(reference)) else ""
    if scheme == "data":
        return file_of(reference)
    if scheme == "file":
        reference = urllib.request.url2pathname(urllib.parse.urlsplit(reference).path)
    elif scheme and reference[len(scheme) :].startswith("://"):
        raise BadImage("images are read from files: download it first, and give the file's path")
    path = folder / reference
    try:
        if not path.is_file():  # a pipe would be waited for
            raise BadImage(f"there is no file {path}; paths are relative to the folder of the JSONL")
        if (size := path.stat().st_size) > MAX_BYTES:
            raise BadImage(f"{path} has {size} bytes; at most {MAX_BYTES} are read. Make it smaller")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        raise BadImage(f"{path} cannot be read: {error}") from None


def _split(message: Message) -> Message:
    """Its content in parts, where it has marks."""
    content = message.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    texts = [p.get("text") for p in parts if isinstance(p, Mapping)] if isinstance(parts, list) else []
    if not any(isinstance(text, str) and MARK in text for text in texts):
        return message
    found: list[Any] = []
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) else None
        pieces = text.split(MARK) if isinstance(text, str) else []
        if len(pieces) < 2:
            found.append(part)
            continue
        for number, piece in enumerate(pieces):
            found += [dict(IMAGE)] * bool(number) + [{**part, "text": piece}] * bool(piece)
    return {**message, "content": found}


def _before_words(messages: list[Message], count: int, where: str) -> list[Message]:
    """As TRL does (data_utils.prepare_multimodal_messages)."""
    first = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        raise ShardlmError(f"{where} has {count} images, no place for them and no message of role user to begin with")
    content = messages[first].get("content")
    if not isinstance(content, str | list | None):
        raise ShardlmError(f"{where}: the content of message {first} is {content!r:.{SHOWN}}; it is a text or parts")
    words = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
    changed = {**messages[first], "content": [*(dict(IMAGE) for _ in range(count)), *words]}
    return [*messages[:first], changed, *messages[first + 1 :]]


def _of_part(part: Message, where: str) -> str | None:
    """None: it is a place for one of the line's."""
    names = dict.fromkeys((part["type"], "image", "url", "path", "image_url"))
    value = next((part[name] for name in names if part.get(name) is not None), None)
    if value is None and isinstance(part.get("base64"), str):  # transformers'
        value = f"data:image/png;base64,{part['base64']}"
    return None if value is None else _reference(value, where)


def _reference(value: Any, where: str) -> str:
    if isinstance(value, Mapping):  # OpenAI's has an address in it, a data set's a path
        value = next((value[name] for name in _NAMES if value.get(name)), value)
    if not isinstance(value, str) or not value:
        raise ShardlmError(f"{where} is {value!r:.{SHOWN}}; an image is a file's path or data:image/png;base64,...")
    return value
