"""Images and videos in the contents of messages: which parts are some, and what they hold; and contents as templates of
models that see read them. No jax."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardlm.errors import ShardlmError

# Types of parts: OpenAI's chats, its responses, transformers', vLLM's for images in memory.
KINDS = ("image_url", "input_image", "image", "image_pil")
VIDEOS = ("video_url", "video")  # vLLM's for OpenAI's chats, transformers'
IMAGE, VIDEO = {"type": "image"}, {"type": "video"}  # as templates know one
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}  # type of part -> field
SEEING = (
    "images are read by checkpoints with an encoder for them, such as those of Qwen3-VL, Gemma 3 and Mistral Small 3"
)


class BadMessage(ShardlmError):
    """`param`: which part of the messages is wrong."""

    def __init__(self, message: str, param: str):
        super().__init__(message)
        self.param = param


@dataclasses.dataclass(frozen=True)
class Sent:
    """An image or a video as it was sent. value: an address (https:, file:, data:), a file's bytes, a PIL.Image or an
    array; of a video a file's path or its frames too. param: where it stands in the messages. video: it is one."""

    value: Any
    param: str
    video: bool = False

    @property
    def by_address(self) -> bool:
        """Not so of a path, which `video` parts may have in Python."""
        return isinstance(self.value, str) and (not self.video or ":" in self.value[:8])


def is_video(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in VIDEOS


def is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in KINDS


def has_images(message: Any) -> bool:
    return _has(message, is_image)


def has_media(message: Any) -> bool:
    """Images or videos."""
    return _has(message, is_image) or _has(message, is_video)


def _has(message: Any, kind: Callable[[Any], bool]) -> bool:
    content = message.get("content") if isinstance(message, Mapping) else None
    return isinstance(content, list | tuple) and any(map(kind, content))


def images_in(messages: Sequence[Any]) -> list[Sent]:
    """Those of a conversation, in their order. Raises BadMessage for a part without one."""
    return _found(messages, is_image, sent)


def videos_in(messages: Sequence[Any]) -> list[Sent]:
    """Those of a conversation, in their order. Raises BadMessage for a part without one."""
    return _found(messages, is_video, sent_video)


def _found(messages: Sequence[Any], kind: Callable[[Any], bool], read: Callable[[Any, str], Sent]) -> list[Sent]:
    found = []
    for i, message in enumerate(messages):
        if _has(message, kind):
            parts = enumerate(message["content"])
            found += [read(part, f"messages[{i}].content[{j}]") for j, part in parts if kind(part)]
    return found


def content_of(content: Any, param: str, sees: bool, watches: bool = False) -> str | list[dict[str, str]] | None:
    """A text or, with images that the model sees and videos that it `watches`, a list of parts, of which these are
    IMAGE and VIDEO. Raises BadMessage for other parts."""
    if not (sees and has_media({"content": content})):
        return plain_text(content, param)
    parts = []
    for i, part in enumerate(content):
        if is_image(part) or (watches and is_video(part)):
            parts.append(dict(IMAGE if is_image(part) else VIDEO))
            continue
        if (text := _text_of(part)) is None:
            reads = "text, images and videos" if watches else "text and images"
            message = f"{param}[{i}] is of type {_kind(part)!r}; this model reads {reads}"
            raise BadMessage(message, f"{param}[{i}]")
        parts.append({"type": "text", "text": text})
    return parts


def plain_text(content: Any, param: str) -> str | None:
    """The text of a message's content. Raises BadMessage for parts that are not text."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise BadMessage(f"{param} is a {type(content).__name__}; it is a text or a list of parts", param)
    texts = []
    for i, part in enumerate(content):
        if (text := _text_of(part)) is None:
            hint = f": {SEEING}" if is_image(part) or is_video(part) else ""
            message = f"{param}[{i}] is of type {_kind(part)!r}; this model reads text{hint}"
            raise BadMessage(message, f"{param}[{i}]")
        texts.append(text)
    return "\n".join(texts)


def _kind(part: Any) -> Any:
    return part.get("type") if isinstance(part, Mapping) else type(part).__name__


def _text_of(part: Any) -> str | None:
    """None: it is no text. A text among parts is one to vLLM too."""
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get(_TEXTS[kind]) if isinstance(kind, str) and kind in _TEXTS else None
    return text if isinstance(text, str) else None


def sent(part: Mapping[str, Any], param: str) -> Sent:
    """Raises BadMessage for a part without an image."""
    kind = part["type"]
    if kind in ("image_url", "input_image"):
        value = part.get("image_url")
        value = value.get("url") if isinstance(value, Mapping) else value
        if not isinstance(value, str) or not value:
            wrong = "file_id" if part.get("file_id") else None
            hint = "files are not kept here: send it whole, as" if wrong else "it is"
            message = f"{param} is of type {kind} without an address; {hint} data:image/png;base64,... or https://..."
            raise BadMessage(message, param)
        return Sent(value, param)
    value = _given(part, (kind, "image", "url"))
    if value is None:
        raise BadMessage(f"{param} is of type {kind} and has no {kind}; give a PIL.Image or an address", param)
    return Sent(value, param)


def sent_video(part: Mapping[str, Any], param: str) -> Sent:
    """Raises BadMessage for a part without a video."""
    kind = part["type"]
    value = part.get("video_url") if kind == "video_url" else _given(part, ("video", "url", "path"))
    value = value.get("url") if isinstance(value, Mapping) and kind == "video_url" else value
    if value is None or (kind == "video_url" and not isinstance(value, str)) or (isinstance(value, str) and not value):
        wanted = "an address, data:video/mp4;base64,... or https://..." if kind == "video_url" else "a file or frames"
        raise BadMessage(f"{param} is of type {kind} without a video; give {wanted}", param)
    return Sent(value, param, video=True)


def _given(part: Mapping[str, Any], names: Sequence[str]) -> Any:
    """What the first of these names has; None: none has anything."""
    return next((part[name] for name in names if part.get(name) is not None), None)
