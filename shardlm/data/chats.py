"""Conversations for supervised fine-tuning: JSONL to token shards in which only the assistant's tokens are learned.

A line is {"messages": [{"role", "content"}, ...]}, with "tools" where there are some; {"prompt", "completion"}; or
ShareGPT's {"conversations": [{"from", "value"}, ...]}; each of them with images in the forms of line_images.py.
Rendering is rendering.py's, the format shards.py's.
"""

import collections
import concurrent.futures
import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardlm.chat import ChatTemplate, read
from shardlm.data.corpus import Source, read_lines
from shardlm.data.line_images import MARK, given, with_places
from shardlm.data.rendering import Chats, Document, looked_at, rendered
from shardlm.data.shards import TokenShards
from shardlm.data.writer import ShardWriter
from shardlm.errors import ShardlmError
from shardlm.hf_files import texts_beside

ROLES = {"human": "user", "gpt": "assistant"} | {role: role for role in ("user", "assistant", "system", "tool")}


def template_of(path: str) -> ChatTemplate:
    """The template in a checkpoint's folder or file of llama.cpp, or in a file of its own. Raises ShardlmError where
    there is none."""
    found = texts_beside(Path(path))
    if found.is_file():
        return ChatTemplate(read(found), where=path)
    if not found.is_dir():
        raise ShardlmError(f"data.chat_template={path}: neither a folder with a chat template nor a file")
    return ChatTemplate.load(found)


OfLine = Callable[[Any, str, Chats], Sequence[Document]]
"""(what a line of JSON holds, FILE:LINE, how it becomes tokens) -> its documents."""
# At which lines with images are read: Pillow and numpy leave Python's lock, templates do not. A line's images may have
# a few hundred megabytes while they are unpacked, and at most twice as many lines are held.
THREADS = max(2, min(8, os.cpu_count() or 1))


def write_lines(
    sources: Sequence[Source],
    chats: Chats,
    directory: Path,
    of_line: OfLine,
    progress: Callable[[int], None] = lambda done: None,
    among: Callable[[Iterator["Line"]], Iterator["Line"]] = lambda lines: lines,
) -> TokenShards:
    """Shards of the documents of every line, as `among` has them; those of one line stay together. Raises ShardlmError
    for files that are not JSONL, and what `of_line` and `among` raise."""
    done = 0
    image_token = chats.sight.vector if chats.sight else None
    with ShardWriter(directory, chats.tokenizer, image_token=image_token) as writer:
        for documents, size in _in_order(among(_lines(sources, chats)), of_line, 0 if chats.sight is None else THREADS):
            ids, learned = (np.concatenate(parts) for parts in zip(*(d[:2] for d in documents), strict=True))
            ends = np.cumsum([len(document.ids) for document in documents])
            begins = [0, *ends[:-1].tolist()]
            images = [
                image._replace(first=begin + image.first, end=begin + image.end)
                for begin, document in zip(begins, documents, strict=True)
                for image in document.images
            ]
            writer.add(ids, ends, sum(document.num_bytes for document in documents), learned, images)
            done += size
            progress(done)
        writer.finish()
    return TokenShards.open(directory)


Line = tuple[bytes, str, Chats, int]  # the line, FILE:LINE, how, bytes on disk


def _lines(sources: Sequence[Source], chats: Chats) -> Iterator[Line]:
    for source in sources:
        if source.kind != "jsonl":
            raise ShardlmError(f"{source.path}: chats are read from .jsonl, one conversation a line")
        own = dataclasses.replace(chats, folder=source.path.parent)
        yield from ((line, f"{source.path}:{number}", own, size) for number, line, size in read_lines(source))


def _documents(line: Line, of_line: OfLine) -> Sequence[Document]:
    text, where, chats, _ = line
    return of_line(parsed(text, where), where, chats)


def parsed(text: bytes, where: str) -> Any:
    """What a line of JSON holds. Raises ShardlmError for what is none, and for halves of characters, which JSON can say
    and no tokenizer reads."""
    try:
        found = json.loads(text)
        if b"\\ud" in text.lower():
            json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ShardlmError(f"{where} has half a character, {half!a}; write both halves, or leave it out") from None
    except ValueError as error:
        raise ShardlmError(f"{where} is not JSON: {error}") from None
    return found


def _in_order(lines: Iterator[Line], of_line: OfLine, threads: int) -> Iterator[tuple[Sequence[Document], int]]:
    """The documents of each line and its size, made by so many threads; by none where it is 0."""
    if not threads:
        yield from ((_documents(line, of_line), line[-1]) for line in lines)
        return
    waiting: collections.deque = collections.deque()
    with concurrent.futures.ThreadPoolExecutor(threads, "lines") as pool:
        try:
            for line in lines:
                waiting.append((pool.submit(_documents, line, of_line), line[-1]))
                if len(waiting) >= 2 * threads:
                    made, size = waiting.popleft()
                    yield made.result(), size
            while waiting:
                made, size = waiting.popleft()
                yield made.result(), size
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def conversation(line: Any, where: str, chats: Chats) -> tuple[Document]:
    """The one document of a line, all of the assistant's messages learned. Raises ShardlmError that names file and line
    for what is not a conversation, and where the assistant says nothing."""
    messages = _messages(line, where)
    messages, images = with_places(messages, given(line, where), where)
    seen = looked_at(images, where, chats)
    return (rendered(messages, line.get("tools"), 0, where, chats, [seen[image] for image in images]),)


def _messages(line: Any, where: str) -> list[Mapping[str, Any]]:
    shapes = '{"messages": [...]}, {"prompt": ..., "completion": ...} or {"conversations": [...]}'
    if not isinstance(line, dict):
        raise ShardlmError(f"{where} is not an object; a line is {shapes}")
    if "messages" in line:
        messages = line["messages"]
    elif "prompt" in line and "completion" in line:
        question, answer = line["prompt"], line["completion"]
        asked = [{"role": "user", "content": question}] if isinstance(question, str) else question
        said = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
        messages = [*checked(asked, f"{where} (prompt)"), *checked(said, f"{where} (completion)")]
    elif "conversations" in line:
        messages = _of_sharegpt(line["conversations"], bool(given(line, where)), where)
    else:
        raise ShardlmError(f"{where} has the keys {', '.join(line) or 'none'}; a line is {shapes}")
    return checked(messages, where)


def _of_sharegpt(turns: Any, images: bool, where: str) -> list[Mapping[str, Any]]:
    """Of a line with images LLaVA's form (https://arxiv.org/abs/2304.08485): a line end stands between a mark and the
    words, which the templates of its models write themselves and others have no need of."""
    whole = isinstance(turns, list) and all(isinstance(one, dict) and {"from", "value"} <= one.keys() for one in turns)
    if not whole:
        shown = f"{turns!r:.200}"
        raise ShardlmError(f'{where}: conversations is {shown}; it is a list of {{"from": ..., "value": ...}}')
    if unknown := [turn["from"] for turn in turns if turn["from"] not in (*ROLES,)]:
        raise ShardlmError(f"{where}: a turn is from {unknown[0]!r}; known: {', '.join(ROLES)}")
    said = [{"role": ROLES[turn["from"]], "content": turn["value"]} for turn in turns]
    return [one | {"content": _joined(one["content"])} for one in said] if images else said


def _joined(words: Any) -> Any:
    return words.replace(f"{MARK}\n", MARK).replace(f"\n{MARK}", MARK) if isinstance(words, str) else words


def checked(messages: Any, where: str) -> Sequence[Mapping[str, Any]]:
    """Messages, or ShardlmError for what is none."""
    if not isinstance(messages, list):
        shown = f"{messages!r:.200}"
        raise ShardlmError(f'{where}: {shown} is no list of messages, {{"role": ..., "content": ...}}')
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ShardlmError(f"{where}: message {i} is {message!r}; it needs a role and content")
    return messages
