"""What of a request's body decides its way: the model, and the beginning of the text that the model will read.

Bodies that make no sense, or have more values than a server takes, have no beginning; they go to some replica, which
says what is wrong with them.
"""

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from shardlm.serve.api.protocol import is_billing
from shardlm.serve.api.values import too_many

BLOCK = 256  # characters: some 64 tokens, four pages of a server
MOST_BLOCKS = 256  # of one prompt; where 64k characters are equal, the rest decides little
MOST = BLOCK * MOST_BLOCKS
# An image counts as a text of about as many tokens, 1,024 of some 4 characters, and is known by its length and so many
# characters of both ends: it may have ten million.
IMAGE, ENDS = 4096, 16_384
_IMAGES = ("image_url", "input_image", "image", "video_url", "video")


class _Body(msgspec.Struct):
    """Fields of /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages and Ollama's /api/chat and
    /api/generate, of any type: the replicas check them."""

    model: Any = None
    tools: Any = None
    system: Any = None
    messages: Any = None
    prompt: Any = None
    context: Any = None
    instructions: Any = None
    input: Any = None
    images: Any = None


@dataclasses.dataclass(frozen=True)
class Hints:
    """model: that is asked for. blocks: a hash for each beginning of the prompt, of 1, 2, ... blocks."""

    model: str | None = None
    blocks: tuple[bytes, ...] = ()


_DECODER = msgspec.json.Decoder(_Body)
_ENCODE = msgspec.json.Encoder(order="sorted").encode


def hints(body: bytes) -> Hints:
    if too_many(body):
        return Hints()
    try:
        found = _DECODER.decode(body)
        return Hints(found.model if isinstance(found.model, str) else None, tuple(_blocks(found)))
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return Hints()


def _blocks(body: _Body) -> Iterator[bytes]:
    """A model's pages are its own, so its name is hashed first."""
    hashed = hashlib.blake2b(_ENCODE(body.model), digest_size=16)
    waiting, count = "", 0
    for piece in _pieces(body):
        waiting += piece
        whole = len(waiting) - len(waiting) % BLOCK
        for start in range(0, whole, BLOCK):
            hashed.update(waiting[start : start + BLOCK].encode("utf-8", "surrogatepass"))
            yield hashed.digest()
            count += 1
            if count == MOST_BLOCKS:
                return
        waiting = waiting[whole:]


def _pieces(body: _Body) -> Iterator[str]:
    """The text in the order in which chat templates write it: tools and instructions, then the messages."""
    if isinstance(body.context, list):  # the conversation so far
        yield " ".join(map(str, body.context[:MOST]))
    if body.tools:
        yield _ENCODE(body.tools).decode()
    if isinstance(body.system, str | list):
        yield _text(body.system)
    if body.messages is not None:
        yield from _turns(body.messages)
        return
    if isinstance(body.instructions, str):
        yield body.instructions
    yield _pictures(body.images)
    prompt = body.prompt if body.prompt is not None else body.input
    if isinstance(prompt, str):
        yield prompt
    elif isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
        yield from _turns(prompt)
    elif isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        yield from _pieces(_Body(prompt=prompt[0]))  # of several prompts the first stands for all
    elif isinstance(prompt, list):
        yield " ".join(map(str, prompt[:MOST]))


def _turns(messages: Any) -> Iterator[str]:
    """Each message without what clients write differently, such as the order of its fields."""
    for message in messages if isinstance(messages, list) else ():
        if not isinstance(message, dict):
            return
        yield f"\x1e{message.get('role')}\x1f{_pictures(message.get('images'))}{_text(message.get('content'))}"
        if calls := message.get("tool_calls"):
            yield _ENCODE(calls).decode()


def _text(content: Any) -> str:
    """In parts or not, without the marks of what is to be cached, which clients move as a conversation grows."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return _joined("\n", (_part(part) for part in content if not is_billing(part)))
    return _ENCODE(content).decode()


def _part(part: Any) -> str:
    if not isinstance(part, dict):
        return _ENCODE(part).decode()
    if isinstance(part.get("text"), str):
        return part["text"]
    if part.get("type") in _IMAGES:
        return _picture(_ENCODE({name: value for name, value in part.items() if name != "cache_control"}))
    if isinstance(part.get("content"), list):  # of a tool, which may have images
        # Cut, as each text within a text is longer, and has twice the marks around its own.
        part = {**part, "content": _text(part["content"])[:MOST]}
    return _ENCODE({name: value for name, value in part.items() if name != "cache_control"}).decode()


def _pictures(images: Any) -> str:
    """Ollama's, beside the text."""
    return _joined("", (_picture(_ENCODE(one)) for one in images)) if isinstance(images, list) else ""


def _joined(between: str, pieces: Iterable[str]) -> str:
    """As many as are looked at: an image of three characters counts as thousands."""
    found, length = [], 0
    for piece in pieces:
        found.append(piece)
        length += len(piece)
        if length > MOST:
            break
    return between.join(found)


def _picture(image: bytes) -> str:
    seen = b"%d" % len(image) + image[:ENDS] + image[-ENDS:]
    return hashlib.blake2b(seen, digest_size=16).hexdigest() * (IMAGE // 32)
