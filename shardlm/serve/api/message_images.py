"""Images of Anthropic's messages (https://docs.anthropic.com/en/docs/build-with-claude/vision) as chats have them, and
what is said with them: a text, or a list of parts."""

from collections.abc import Mapping
from typing import Any

from shardlm.serve.api.errors import ApiError

Part = dict[str, Any]
Said = str | list[Part]


def image_part(block: Mapping[str, Any], param: str) -> Part:
    """Raises ApiError for a source that is not here."""
    source = block.get("source")
    kind = source.get("type") if isinstance(source, Mapping) else None
    name = {"base64": "data", "url": "url"}.get(kind) if isinstance(kind, str) else None
    value = source.get(name) if name else None
    if not isinstance(value, str) or not value:
        message = f"{param}.source={source!r:.100} must be of type base64 with data, or of type url with a url"
        raise ApiError(message, param=f"{param}.source")
    media_type = source.get("media_type")
    media_type = media_type if isinstance(media_type, str) else ""
    return {"type": "image_url", "image_url": {"url": value if kind == "url" else f"data:{media_type};base64,{value}"}}


def joined(before: Said, said: Said) -> Said:
    """Texts that follow each other are one."""
    if isinstance(before, str) and isinstance(said, str):
        return "\n".join(filter(None, (before, said)))
    parts = _parts(before)
    for part in _parts(said):
        if parts and part["type"] == parts[-1]["type"] == "text":
            part = {"type": "text", "text": f"{parts.pop()['text']}\n{part['text']}"}
        parts.append(part)
    return parts


def _parts(said: Said) -> list[Part]:
    if isinstance(said, str):
        return [{"type": "text", "text": said}] if said else []
    return list(said)
