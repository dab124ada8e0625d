"""How a chat template is shown the images of a conversation, so that it writes a place for each: as parts of contents,
{"type": "image"} among {"type": "text"}, which templates of models that see go through, or as the token itself before
the words, for one that joins contents to other texts. Where somebody writes the token's name it is words and no
place. No jax."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from shardlm.chat import ChatTemplate
from shardlm.errors import ShardlmError
from shardlm.tokenizer import Tokenizer
from shardlm.vision.image_parts import IMAGE, has_images

Message = Mapping[str, Any]
# What a model's own template has around the token: those of Qwen, from 2 VL to 4, are the only ones with more.
_WRITTEN = {"<|image_pad|>": "<|vision_start|><|image_pad|><|vision_end|>"}
_WRITTEN |= {"<|IMAGE|>": "<|vision_bos|><|IMAGE|><|vision_eos|>"}
_WORDS = "what the user says"
NAMED = (
    "\ufdd2"  # the token's name in somebody's words, while they are rendered: no character, which texts have none of
)


def forms(template: ChatTemplate, messages: Sequence[Message], token: str) -> Iterator[Sequence[Message]]:
    """The conversation as the template may want it, the usual way first. Contents are texts, or with images lists of
    parts; `token` is what stands for one image in a prompt."""
    strings, lists = _shown(template.source, tuple(template.special.items()), token)
    usual = messages if strings else [_in_parts(one) for one in messages]
    if not any(map(has_images, messages)):
        yield usual
        return
    if lists:
        yield usual
        # Results of tools that have images: templates join them to other texts as a rule.
        yield [_before_words(one, token) if one["role"] == "tool" else one for one in usual]
    yield [_before_words(one, token) for one in messages]


@functools.lru_cache
def _shown(source: str, special: tuple[tuple[str, str], ...], token: str) -> tuple[bool, bool]:
    """Whether a template shows contents that are texts, as one that goes through parts may not, and whether it writes
    one token for an image among parts."""
    template = ChatTemplate(source, dict(special))

    def tried(content: Any) -> str | None:
        try:
            return template.render([{"role": "user", "content": content}], add_generation_prompt=True)
        except ShardlmError:
            return None

    plain, parts = tried(_WORDS), tried([IMAGE, {"type": "text", "text": _WORDS}])
    return plain is None or _WORDS in plain, parts is not None and parts.count(token) == 1 and _WORDS in parts


def _in_parts(message: Message) -> Message:
    content = message["content"]
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _before_words(message: Message, token: str) -> Message:
    """As vLLM writes them: a line for each image, then the words."""
    if not has_images(message):
        return message
    parts = message["content"]
    places = [written(token) for part in parts if part["type"] == "image"]
    return {**message, "content": "\n".join([*places, *(part["text"] for part in parts if part["type"] == "text")])}


def written(token: str) -> str:
    """What stands for an image in a text."""
    return _WRITTEN.get(token, token)


def in_words(value: Any, token: str) -> Any:
    """Texts, in lists and objects too, in which NAMED stands for the name of `token`."""
    if not token:
        return value
    if isinstance(value, str):
        return value.replace(token, NAMED)
    if isinstance(value, Mapping):
        return {key: in_words(one, token) for key, one in value.items()}
    return [in_words(one, token) for one in value] if isinstance(value, list | tuple) else value


def shown(text: str, token: str) -> str:
    """A text that was rendered, as it reads."""
    return text.replace(NAMED, token) if token else text


def encoded(text: str, token: str, tokenizer: Tokenizer, encode: Callable[[str], list[int]]) -> list[int]:
    """The tokens of a text that was rendered, by `encode`; names of `token` are as characters spell them."""
    if not token or NAMED not in text:
        return encode(text)
    first, *rest = text.split(NAMED)
    ids, name = encode(first), tokenizer.encode(token, parse_special=False)
    for piece in rest:
        ids = ids + name + tokenizer.encode(piece)
    return ids
