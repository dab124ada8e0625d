"""Images in the contents of messages: which parts are some, and what they hold; and contents as templates of models
that see read them. No jax."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from shardlm.errors import ShardlmError

# Types of parts: OpenAI's chats, its responses, transformers', vLLM's for images in memory.
KINDS = ("image_url", "input_image", "image", "image_pil")
IMAGE = {"type": "image"}  # as templates know one
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
    """An image as it was sent. value: an address (https:, file:, data:), a file's bytes, a PIL.Image or an array.
    param: where it stands in the messages."""

    value: Any
    param: str


def is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in KINDS


def has_images(message: Any) -> bool:
    content = message.get("content") if isinstance(message, Mapping) else None
    return isinstance(content, list | tuple) and any(map(is_image, content))


def images_in(messages: Sequence[Any]) -> list[Sent]:
    """Those of a conversation, in their order. Raises BadMessage for a part without one."""
    found = []
    for i, message in enumerate(messages):
        if has_images(message):
            parts = enumerate(message["content"])
            found += [sent(part, f"messages[{i}].content[{j}]") for j, part in parts if is_image(part)]
    return found


def content_of(content: Any, param: str, sees: bool) -> str | list[dict[str, str]] | None:
    """A text or, with images that the model sees, a list of parts, of which images are IMAGE. Raises BadMessage for
    other parts."""
    if not (sees and has_images({"content": content})):
        return plain_text(content, param)
    parts = []
    for i, part in enumerate(content):
        if is_image(part):
            parts.append(dict(IMAGE))
            continue
        if (text := _text_of(part)) is None:
            message = f"{param}[{i}] is of type {_kind(part)!r}; this model reads text and images"
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
            hint = f": {SEEING}" if is_image(part) else ""
            message = f"{param}[{i}] is of type {_kind(part)!r}; this model reads text{hint}"
            raise BadMessage(message, f"{param}[{i}]")
        texts.append(text)
    return "\n".join(texts)


def _kind(part: Any) -> Any:
    return part.get("type") if isinstance(part, Mapping) else type(part).__name__


def _text_of(part: Any) -> str | None:
    """None: it is no text."""
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
    value = next((part[name] for name in (kind, "image", "url") if part.get(name) is not None), None)
    if value is None:
        raise BadMessage(f"{param} is of type {kind} and has no {kind}; give a PIL.Image or an address", param)
    return Sent(value, param)
