"""How a chat template is shown the images and videos of a conversation, so that it writes a place for each: as parts of
contents, {"type": "image"} or {"type": "video"} among {"type": "text"}, which templates of models that see go through,
or as the token itself before the words, for one that joins contents to other texts. Where somebody writes the token's
name it is words and no place. No jax."""

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from shardlm.chat import ChatTemplate
from shardlm.errors import ShardlmError
from shardlm.tokenizer import Tokenizer
from shardlm.vision.image_parts import IMAGE, VIDEO, has_images, has_media, is_video

Message = Mapping[str, Any]
# What a model's own template has around the token: those of Qwen, from 2 VL to 4, are the only ones with more.
_WRITTEN = {f"<|{kind}_pad|>": f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video")}
_WRITTEN |= {"<|IMAGE|>": "<|vision_bos|><|IMAGE|><|vision_eos|>"}
_WORDS = "what the user says"
NAMED = (
    "\ufdd2"  # the token's name in somebody's words, while they are rendered: no character, which texts have none of
)
NAMED_VIDEO = "\ufdd3"  # that of the token of videos


def forms(
    template: ChatTemplate, messages: Sequence[Message], token: str, video: str = ""
) -> Iterator[Sequence[Message]]:
    """The conversation as the template may want it, the usual way first. Contents are texts, or with images and videos
    lists of parts; `token` is what stands for one image in a prompt, `video` for a video."""
    special = tuple(template.special.items())
    strings, lists = _shown(template.source, special, token)
    usual = messages if strings else [_in_parts(one) for one in messages]
    if not any(map(has_media, messages)):
        yield usual
        return
    if any(is_video(part) for one in messages if has_media(one) for part in one["content"]):
        lists = (lists or not any(map(has_images, messages))) and _shown(template.source, special, video, True)[1]
    if lists:
        yield usual
        # Results of tools that have images: templates join them to other texts as a rule.
        yield [_before_words(one, token, video) if one["role"] == "tool" else one for one in usual]
    yield [_before_words(one, token, video) for one in messages]


@functools.lru_cache
def _shown(source: str, special: tuple[tuple[str, str], ...], token: str, video: bool = False) -> tuple[bool, bool]:
    """Whether a template shows contents that are texts, as one that goes through parts may not, and whether it writes
    one token for an image, or a `video`, among parts."""
    template = ChatTemplate(source, dict(special))

    def tried(content: Any) -> str | None:
        try:
            return template.render([{"role": "user", "content": content}], add_generation_prompt=True)
        except ShardlmError:
            return None

    plain, parts = tried(_WORDS), tried([VIDEO if video else IMAGE, {"type": "text", "text": _WORDS}])
    return plain is None or _WORDS in plain, parts is not None and parts.count(token) == 1 and _WORDS in parts


def _in_parts(message: Message) -> Message:
    content = message["content"]
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _before_words(message: Message, token: str, video: str = "") -> Message:
    """As vLLM writes them: a line for each image, then the words."""
    if not has_media(message):
        return message
    parts, tokens = message["content"], {"image": token, "video": video}
    places = [written(tokens[part["type"]]) for part in parts if part["type"] != "text"]
    return {**message, "content": "\n".join([*places, *(part["text"] for part in parts if part["type"] == "text")])}


def written(token: str) -> str:
    """What stands for an image in a text."""
    return _WRITTEN.get(token, token)


def in_words(value: Any, token: str, video: str = "") -> Any:
    """Texts, in lists and objects too, in which NAMED stands for the name of `token`, NAMED_VIDEO for that of
    `video`."""
    if not token:
        return value
    if isinstance(value, str):
        value = value.replace(token, NAMED)
        return value.replace(video, NAMED_VIDEO) if video else value
    if isinstance(value, Mapping):
        return {key: in_words(one, token, video) for key, one in value.items()}
    return [in_words(one, token, video) for one in value] if isinstance(value, list | tuple) else value


def shown(text: str, token: str, video: str = "") -> str:
    """A text that was rendered, as it reads."""
    text = text.replace(NAMED, token) if token else text
    return text.replace(NAMED_VIDEO, video) if video else text


def encoded(
    text: str, token: str, tokenizer: Tokenizer, encode: Callable[[str], list[int]], video: str = ""
) -> list[int]:
    """The tokens of a text that was rendered, by `encode`; names of `token` and of `video` are as characters spell
    them."""
    if not token or (NAMED not in text and NAMED_VIDEO not in text):
        return encode(text)
    names = {NAMED: token} | ({NAMED_VIDEO: video} if video else {})
    first, *rest = re.split(f"([{''.join(names)}])", text)
    ids, names = encode(first), {mark: tokenizer.encode(name, parse_special=False) for mark, name in names.items()}
    for mark, piece in zip(rest[::2], rest[1::2], strict=True):
        ids = ids + names[mark] + tokenizer.encode(piece)
    return ids
