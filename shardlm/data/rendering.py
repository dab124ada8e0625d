"""A conversation as a document: its text by a chat template, the tokens, which of them the assistant wrote, and its
images. Forms of lines are chats.py's, preferences.py's and line_images.py's.

A place for an image becomes all of its tokens, as in a prompt that is served (Sight.expanded), and none of them is
learned, wherever it stands.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shardlm.chat import ChatTemplate, Span, assistant_tokens
from shardlm.data.line_images import SHOWN, image_file
from shardlm.data.stored_images import DocumentImage
from shardlm.errors import ShardlmError
from shardlm.tokenizer import Tokenizer
from shardlm.vision.image_parts import SEEING, content_of
from shardlm.vision.image_places import NAMED, forms, in_words, shown, written
from shardlm.vision.picture import Picture, Placed
from shardlm.vision.read import BadImage, pixels_of
from shardlm.vision.sight import Sight

Message = Mapping[str, Any]


class Document(NamedTuple):
    """ids int[n] with end-of-document, learned bool[n], bytes of the text, and the images in their order."""

    ids: np.ndarray
    learned: np.ndarray
    num_bytes: int
    images: tuple[DocumentImage, ...] = ()


class Seen(NamedTuple):
    """An image: its file, and as the model's encoder reads it."""

    file: bytes
    picture: Picture


@dataclasses.dataclass(frozen=True)
class Chats:
    """How conversations become tokens. sight: of the model, where it sees. folder: that images' paths are relative
    to."""

    template: ChatTemplate
    tokenizer: Tokenizer
    sight: Sight | None = None
    folder: Path = Path()

    @functools.cached_property
    def token(self) -> str:
        """What stands for an image in a text, "" without a sight. Raises ShardlmError for a tokenizer that does not
        know it."""
        if self.sight is None:
            return ""
        token = self.tokenizer.decode([self.sight.token], skip_special=False)
        if not self.tokenizer.is_added(token) or self.tokenizer.encode(token) != [self.sight.token]:
            raise ShardlmError(
                f"the model of data.chat_template has the token {self.sight.token} for an image, and that of "
                f"data.tokenizer is {token!r}; set data.tokenizer to the same folder"
            )
        return token


def looked_at(references: Sequence[str], where: str, chats: Chats) -> dict[str, Seen]:
    """The images of a line, each prepared once. Raises ShardlmError for one that is not there or cannot be read, and
    where the model does not see."""
    if references and chats.sight is None:
        raise ShardlmError(
            f"{where} has images, and data.chat_template ({chats.template.where}) is of no model that sees: set it to "
            f"the folder of one; {SEEING}"
        )
    if references and chats.sight.untrained:
        raise ShardlmError(f"{where} has images, and {chats.sight.untrained}; leave them out")
    found: dict[str, Seen] = {}
    for number, reference in enumerate(references, 1):
        if reference in found:
            continue
        try:
            found[reference] = _looked_at(reference, chats)
        except ShardlmError as error:
            name = reference if len(reference) <= SHOWN else f"{reference[:SHOWN]}..."
            raise BadImage(f"{where}: image {number} of {len(references)}, {name}: {error}") from error
    return found


def _looked_at(reference: str, chats: Chats) -> Seen:
    file = image_file(reference, chats.folder)
    picture, most = chats.sight.prepare(pixels_of(file)), chats.sight.sizes[-1]
    if picture.patches > most:
        raise BadImage(f"it has {picture.patches} patches, and at most {most} are read; make it smaller")
    return Seen(file, picture)


def rendered(
    messages: Sequence[Message], tools: Any, prompt: int, where: str, chats: Chats, images: Sequence[Seen] = ()
) -> Document:
    """A conversation as a document in which the assistant's words are learned, those behind the first `prompt` messages
    only. `images`: of its parts that are some."""
    try:
        text, spans = _text(messages, tools, prompt, len(images), chats)
        ids, wrote, placed = _expanded(*_tokens(text, spans, chats), [image.picture for image in images], chats)
    except ShardlmError as error:
        raise ShardlmError(f"{where}: {error}") from error
    if not any(wrote):
        raise ShardlmError(f"{where} has nothing that the assistant says; there is nothing to learn in it")
    end = chats.tokenizer.end_of_document_id
    if ids[-1] != end:
        ids, wrote = [*ids, end], [*wrote, False]  # what ends an answer is the template's
    kept = tuple(
        DocumentImage(one.start, one.end, one.picture.grid, one.picture.patches, image.file)
        for one, image in zip(placed, images, strict=True)
    )
    return Document(np.array(ids), np.array(wrote), len(shown(text, chats.token).encode()), kept)


def _text(messages, tools, prompt: int, images: int, chats: Chats) -> tuple[str, list[Span]]:
    """(text, what of it is learned), in which NAMED stands where somebody says the name of the token of images."""
    template, token = chats.template, chats.token
    if not token:
        return _spans(messages, tools, prompt, template)
    plain = [
        {**message, "content": content_of(message.get("content"), f"messages[{i}].content", sees=True)}
        for i, message in enumerate(messages)
    ]
    plain, tools = (in_words(one, token) for one in (plain, tools))
    wrong = None
    for shape in forms(template, plain, token):
        try:
            text, spans = _spans(shape, tools, prompt, template)
        except ShardlmError as error:
            wrong = wrong or error  # of the usual form, about which the others say less
            continue
        if (places := text.count(token)) == images:
            return text, _outside(spans, [found.span() for found in re.finditer(re.escape(written(token)), text)])
        wrong = wrong or ShardlmError(
            f"{template.where} writes places for {places} images ({token}), and the messages have {images}; have them "
            "in what the user says"
        )
    raise wrong


def _spans(messages, tools, prompt: int, template: ChatTemplate) -> tuple[str, list[Span]]:
    text, spans = template.spans(messages, tools)
    if prompt:
        before = template.render(messages[:prompt], tools, add_generation_prompt=True)
        if not text.startswith(before):
            raise ShardlmError(f"{template.where} rewrites the prompt once an answer follows it")
        spans = [span for span in spans if span[0] >= len(before)]
    return text, spans


def _outside(spans: Sequence[Span], holes: Sequence[Span]) -> list[Span]:
    """What is left of spans."""
    for begin, end in holes:
        cut = [piece for start, stop in spans for piece in ((start, min(stop, begin)), (max(start, end), stop))]
        spans = [(start, stop) for start, stop in cut if start < stop]
    return list(spans)


def _tokens(text: str, spans: Sequence[Span], chats: Chats) -> tuple[list[int], list[bool]]:
    """As `assistant_tokens`; names of the token of images are as characters spell them (image_places.encoded)."""
    if not chats.token:
        return assistant_tokens(chats.tokenizer, text, spans)
    name = chats.tokenizer.encode(chats.token, parse_special=False)
    ids, wrote, at = [], [], 0
    for number, piece in enumerate(text.split(NAMED)):
        if number:
            ids, wrote = ids + name, wrote + [any(start <= at < end for start, end in spans)] * len(name)
            at += 1
        own = [(max(start - at, 0), min(end - at, len(piece))) for start, end in spans]
        found = assistant_tokens(chats.tokenizer, piece, [(start, end) for start, end in own if start < end])
        ids, wrote, at = ids + found[0], wrote + found[1], at + len(piece)
    return ids, wrote


def _expanded(
    ids: list[int], wrote: list[bool], pictures: Sequence[Picture], chats: Chats
) -> tuple[list[int], list[bool], tuple[Placed, ...]]:
    """With all tokens of pictures, of which none is learned, nor one that a picture's first or last was joined with."""
    if chats.sight is None:
        return ids, wrote, ()
    found, placed = chats.sight.expanded(ids, pictures)
    if (largest := max(found, default=0)) >= chats.tokenizer.vocab_size:
        raise ShardlmError(f"an image has the token {largest}, and data.tokenizer has no such; set it to the model's")
    learned = np.zeros(len(found), bool)
    places = [i for i, id in enumerate(ids) if id == chats.sight.token]
    begins = [0, *(place + 1 for place in places)]
    starts = [0, *(one.end for one in placed)]
    for begin, place, start, stop in zip(
        begins, [*places, len(ids)], starts, [*(one.start for one in placed), len(found)], strict=True
    ):
        # Words between two pictures, of which the first may be in the picture's last token, and the last has its first.
        words = np.array(wrote[begin:place], bool)
        learned[start:stop] = words[len(words) - (stop - start) :]
        if stop > start and found[stop - 1] != ids[place - 1]:
            learned[stop - 1] = False
    return found, learned.tolist(), placed
