"""Answers that are wanted or not, one to a prompt: JSONL to token shards, of each line two documents, its own and its
prompt with another line's completion, by which KTO tells how far the model has moved (train/kto.py).

A line is {"prompt", "completion", "label"}, TRL's unpaired shape: label true or false, the others a text or messages,
with "tools" and images as in chats.py. In both documents the completion is learned. Whether an answer is wanted stands
at its document's first token, which nothing predicts: there `learned` is the label.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardlm.data.chats import Line, checked, parsed
from shardlm.data.line_images import given, with_places
from shardlm.data.rendering import Chats, Document, looked_at, rendered
from shardlm.errors import ShardlmError

SHAPE = '{"prompt": ..., "completion": ..., "label": true or false}'


def with_others(lines: Iterator[Line]) -> Iterator[Line]:
    """Each line beside another one's completion, {"line", "other"}: of the nearest line before it that asks something
    else, or for the first ones behind them. Raises ShardlmError for lines of other shapes, and where all ask the
    same."""
    # (prompt with its images, completion) of the last line that asks something else than the last, and of the last
    before = now = None
    waiting: list[tuple[Line, Any]] = []
    where = ""
    for one in lines:
        where = one[1]
        line = _shaped(parsed(one[0], where), where)
        asked = json.dumps([line["prompt"], line.get("images"), line.get("image")])
        if now and now[0] != asked:
            before = now
        now = asked, line["completion"]
        if before is None:
            waiting.append((one, line))
            continue
        for first, held in waiting:
            yield _beside(first, held, line["completion"])
        waiting = []
        yield _beside(one, line, before[1])
    if waiting:
        raise ShardlmError(f"{where}: all lines have the same prompt; a completion is compared with those of others")


def _beside(one: Line, line: Any, other: Any) -> Line:
    return (json.dumps({"line": line, "other": other}).encode(), *one[1:])


def labelled(both: Any, where: str, chats: Chats) -> tuple[Document, Document]:
    """(the line's own document, its prompt with the other completion). Raises ShardlmError that names file and line for
    what is no prompt with a completion."""
    line = both["line"]
    asked = _messages(line["prompt"], "user", f"{where} (prompt)")
    own = given(line, where)
    found = []
    for completion in (line["completion"], both["other"]):
        said = _messages(completion, "assistant", f"{where} (completion)")
        if not asked or not said or said[0]["role"] != "assistant":
            raise ShardlmError(f"{where}: behind a prompt comes a completion of the assistant; a line is {SHAPE}")
        messages, images = with_places([*asked, *said], own, where)
        seen = looked_at(images, where, chats)
        how = line.get("tools"), len(asked), where, chats, [seen[image] for image in images]
        found.append(rendered(messages, *how))
    found[0].learned[0], found[1].learned[0] = line["label"], False
    return tuple(found)


def _messages(said: Any, role: str, where: str) -> Sequence[Mapping[str, Any]]:
    return [{"role": role, "content": said}] if isinstance(said, str) else checked(said, where)


def _shaped(line: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(line, dict) or not {"prompt", "completion", "label"} <= line.keys():
        keys = ", ".join(line) or "none" if isinstance(line, dict) else type(line).__name__
        raise ShardlmError(f"{where} has the keys {keys}; a line is {SHAPE}")
    if not isinstance(line["label"], bool):
        raise ShardlmError(f"{where}: label is {line['label']!r}; it is true or false")
    return line
