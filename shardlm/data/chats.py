"""Conversations for supervised fine-tuning: JSONL to token shards in which only the assistant's tokens are learned.

A line is {"messages": [{"role", "content"}, ...]}, with "tools" where there are some; {"prompt", "completion"}; or
ShareGPT's {"conversations": [{"from", "value"}, ...]}. Rendering is shardlm/chat.py's, the format shards.py's.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardlm.chat import ChatTemplate, assistant_tokens, read
from shardlm.data.corpus import Source, read_lines
from shardlm.data.shards import TokenShards
from shardlm.data.writer import ShardWriter
from shardlm.errors import ShardlmError
from shardlm.tokenizer import Tokenizer

ROLES = {"human": "user", "gpt": "assistant"} | {role: role for role in ("user", "assistant", "system", "tool")}


def template_of(path: str) -> ChatTemplate:
    """The template in a checkpoint's folder, or in a file of its own. Raises ShardlmError where there is none."""
    if Path(path).is_file():
        return ChatTemplate(read(Path(path)), where=path)
    if not Path(path).is_dir():
        raise ShardlmError(f"data.chat_template={path}: neither a folder with a chat template nor a file")
    return ChatTemplate.load(path)


def write_chats(
    sources: Sequence[Source],
    template: ChatTemplate,
    tokenizer: Tokenizer,
    directory: Path,
    progress: Callable[[int], None] = lambda done: None,
) -> TokenShards:
    """Renders and tokenises each conversation as a document. Raises ShardlmError that names file and line for what is
    not a conversation, and where the assistant says nothing."""
    done = 0
    with ShardWriter(directory, tokenizer) as writer:
        for source in sources:
            if source.kind != "jsonl":
                raise ShardlmError(f"{source.path}: chats are read from .jsonl, one conversation a line")
            for number, line, size in read_lines(source):
                where = f"{source.path}:{number}"
                ids, wrote, nbytes = _document(line, where, template, tokenizer)
                writer.add(ids, np.array([len(ids)]), nbytes, wrote)
                done += size
                progress(done)
        writer.finish()
    return TokenShards.open(directory)


def _document(line: bytes, where: str, template: ChatTemplate, tokenizer: Tokenizer):
    """(tokens, whether each is learned, bytes of the text)."""
    try:
        conversation = json.loads(line)
    except ValueError as error:
        raise ShardlmError(f"{where} is not JSON: {error}") from None
    messages, tools = _messages(conversation, where), conversation.get("tools")
    try:
        text, spans = template.spans(messages, tools)
    except ShardlmError as error:
        raise ShardlmError(f"{where}: {error}") from error
    ids, wrote = assistant_tokens(tokenizer, text, spans)
    if not any(wrote):
        raise ShardlmError(f"{where} has nothing that the assistant says; there is nothing to learn in it")
    end = tokenizer.end_of_document_id
    if ids[-1] != end:
        ids, wrote = [*ids, end], [*wrote, False]  # what ends an answer is the template's
    return np.array(ids), np.array(wrote), len(text.encode())


def _messages(conversation: Any, where: str) -> list[Mapping[str, Any]]:
    shapes = '{"messages": [...]}, {"prompt": ..., "completion": ...} or {"conversations": [...]}'
    if not isinstance(conversation, dict):
        raise ShardlmError(f"{where} is not an object; a line is {shapes}")
    if "messages" in conversation:
        messages = conversation["messages"]
    elif "prompt" in conversation and "completion" in conversation:
        question, answer = conversation["prompt"], conversation["completion"]
        asked = [{"role": "user", "content": question}] if isinstance(question, str) else question
        messages = [*asked, *([{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer)]
    elif "conversations" in conversation:
        turns = conversation["conversations"]
        unknown = [turn.get("from") for turn in turns if turn.get("from") not in ROLES]
        if unknown:
            raise ShardlmError(f"{where}: a turn is from {unknown[0]!r}; known: {', '.join(ROLES)}")
        messages = [{"role": ROLES[turn["from"]], "content": turn["value"]} for turn in turns]
    else:
        raise ShardlmError(f"{where} has the keys {', '.join(conversation) or 'none'}; a line is {shapes}")
    for i, message in enumerate(messages if isinstance(messages, list) else [None]):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ShardlmError(f"{where}: message {i} is {message!r}; it needs a role and content")
    return messages
