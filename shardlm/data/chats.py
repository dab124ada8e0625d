"""Conversations for supervised fine-tuning: JSONL to token shards in which only the assistant's tokens are learned.

A line is {"messages": [{"role", "content"}, ...]}, with "tools" where there are some; {"prompt", "completion"}; or
ShareGPT's {"conversations": [{"from", "value"}, ...]}. Rendering is shardlm/chat.py's, the format shards.py's.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shardlm.chat import ChatTemplate, assistant_tokens, read
from shardlm.data.corpus import Source, read_lines
from shardlm.data.shards import TokenShards
from shardlm.data.writer import ShardWriter
from shardlm.errors import ShardlmError
from shardlm.hf_files import texts_beside
from shardlm.tokenizer import Tokenizer

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


class Document(NamedTuple):
    """ids int[n] with end-of-document, learned bool[n], and bytes of the text."""

    ids: np.ndarray
    learned: np.ndarray
    num_bytes: int


OfLine = Callable[[Any, str, ChatTemplate, Tokenizer], Sequence[Document]]
"""(what a line of JSON holds, FILE:LINE, template, tokenizer) -> its documents."""


def write_lines(
    sources: Sequence[Source],
    template: ChatTemplate,
    tokenizer: Tokenizer,
    directory: Path,
    of_line: OfLine,
    progress: Callable[[int], None] = lambda done: None,
) -> TokenShards:
    """Shards of the documents of every line; those of one line stay together. Raises ShardlmError for files that are
    not JSONL, and what `of_line` raises."""
    done = 0
    with ShardWriter(directory, tokenizer) as writer:
        for source in sources:
            if source.kind != "jsonl":
                raise ShardlmError(f"{source.path}: chats are read from .jsonl, one conversation a line")
            for number, line, size in read_lines(source):
                where = f"{source.path}:{number}"
                try:
                    found = json.loads(line)
                except ValueError as error:
                    raise ShardlmError(f"{where} is not JSON: {error}") from None
                documents = of_line(found, where, template, tokenizer)
                ids, learned = (np.concatenate(parts) for parts in zip(*(d[:2] for d in documents), strict=True))
                ends = np.cumsum([len(document.ids) for document in documents])
                writer.add(ids, ends, sum(document.num_bytes for document in documents), learned)
                done += size
                progress(done)
        writer.finish()
    return TokenShards.open(directory)


def conversation(line: Any, where: str, template: ChatTemplate, tokenizer: Tokenizer) -> tuple[Document]:
    """The one document of a line, all of the assistant's messages learned. Raises ShardlmError that names file and line
    for what is not a conversation, and where the assistant says nothing."""
    return (rendered(_messages(line, where), line.get("tools"), 0, where, template, tokenizer),)


def rendered(
    messages: Sequence[Mapping[str, Any]], tools: Any, prompt: int, where: str, template: ChatTemplate, tokenizer
) -> Document:
    """A conversation as a document in which the assistant's words are learned, those behind the first `prompt` messages
    only."""
    try:
        text, spans = template.spans(messages, tools)
        if prompt:
            before = template.render(messages[:prompt], tools, add_generation_prompt=True)
            if not text.startswith(before):
                raise ShardlmError(f"{template.where} rewrites the prompt once an answer follows it")
            spans = [span for span in spans if span[0] >= len(before)]
    except ShardlmError as error:
        raise ShardlmError(f"{where}: {error}") from error
    ids, wrote = assistant_tokens(tokenizer, text, spans)
    if not any(wrote):
        raise ShardlmError(f"{where} has nothing that the assistant says; there is nothing to learn in it")
    end = tokenizer.end_of_document_id
    if ids[-1] != end:
        ids, wrote = [*ids, end], [*wrote, False]  # what ends an answer is the template's
    return Document(np.array(ids), np.array(wrote), len(text.encode()))


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
        messages = _of_sharegpt(line["conversations"], where)
    else:
        raise ShardlmError(f"{where} has the keys {', '.join(line) or 'none'}; a line is {shapes}")
    return checked(messages, where)


def _of_sharegpt(turns: Any, where: str) -> list[Mapping[str, Any]]:
    whole = isinstance(turns, list) and all(isinstance(one, dict) and {"from", "value"} <= one.keys() for one in turns)
    if not whole:
        shown = f"{turns!r:.200}"
        raise ShardlmError(f'{where}: conversations is {shown}; it is a list of {{"from": ..., "value": ...}}')
    if unknown := [turn["from"] for turn in turns if turn["from"] not in (*ROLES,)]:
        raise ShardlmError(f"{where}: a turn is from {unknown[0]!r}; known: {', '.join(ROLES)}")
    return [{"role": ROLES[turn["from"]], "content": turn["value"]} for turn in turns]


def checked(messages: Any, where: str) -> Sequence[Mapping[str, Any]]:
    """Messages, or ShardlmError for what is none."""
    if not isinstance(messages, list):
        shown = f"{messages!r:.200}"
        raise ShardlmError(f'{where}: {shown} is no list of messages, {{"role": ..., "content": ...}}')
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ShardlmError(f"{where}: message {i} is {message!r}; it needs a role and content")
    return messages
