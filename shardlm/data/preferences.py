"""Pairs of answers to one prompt, of which one was preferred: JSONL to token shards, the chosen answer's document and
then the rejected one's. In each only the answer is learned.

A line is {"prompt", "chosen", "rejected"}, each a text or messages [{"role", "content"}, ...], or without "prompt"
where both answers' messages begin with it; with "tools" where there are some, and with images in the forms of
line_images.py, those of the line for each of the two conversations. These are the shapes of TRL
(https://huggingface.co/docs/trl/dataset_formats). Which document stands where is packing.py's (`PairRows`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from shardlm.data.chats import checked
from shardlm.data.line_images import given, with_places
from shardlm.data.rendering import Chats, Document, looked_at, rendered
from shardlm.errors import ShardlmError

Messages = Sequence[Mapping[str, Any]]
SHAPES = (
    '{"prompt": ..., "chosen": ..., "rejected": ...} or {"chosen": [...], "rejected": [...]} with the prompt in both'
)


def pair(line: Any, where: str, chats: Chats) -> tuple[Document, Document]:
    """(chosen, rejected) of a line. Raises ShardlmError that names file and line for what is no preference."""
    if not isinstance(line, dict):
        raise ShardlmError(f"{where} is not an object; a line is {SHAPES}")
    if not {"chosen", "rejected"} <= line.keys():
        raise ShardlmError(f"{where} has the keys {', '.join(line) or 'none'}; a line is {SHAPES}")
    both = {name: _conversation(line, name, where) for name in ("chosen", "rejected")}
    prompt = _prompt(**both, where=where)
    own = given(line, where)
    shown = {name: with_places(messages, own, f"{where} ({name})") for name, messages in both.items()}
    seen = looked_at([image for _, images in shown.values() for image in images], where, chats)
    chosen, rejected = (
        rendered(messages, line.get("tools"), prompt, f"{where} ({name})", chats, [seen[image] for image in images])
        for name, (messages, images) in shown.items()
    )
    return chosen, rejected


def _conversation(line: Mapping[str, Any], name: str, where: str) -> Messages:
    """All messages up to the end of an answer: the prompt is before it, unless messages begin with the prompt."""
    answer, prompt = line[name], line.get("prompt", [])
    if isinstance(answer, str):
        if not prompt:
            raise ShardlmError(f"{where}: {name} is a text and there is no prompt; a line is {SHAPES}")
        answer = [{"role": "assistant", "content": answer}]
    elif not checked(answer, f"{where} ({name})"):
        raise ShardlmError(f"{where}: {name} has no messages")
    elif answer[0]["role"] != "assistant":
        return answer
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return [*checked(asked, f"{where} (prompt)"), *answer]


def _prompt(chosen: Messages, rejected: Messages, where: str) -> int:
    """How many messages both begin with."""
    same = [one == other for one, other in zip(chosen, rejected, strict=False)]
    count = same.index(False) if False in same else len(same)
    if chosen == rejected:
        raise ShardlmError(f"{where}: chosen and rejected are the same; there is nothing to prefer, leave the line out")
    if not count:
        raise ShardlmError(f"{where}: chosen and rejected begin with different messages; both begin with the prompt")
    for name, messages in (("chosen", chosen), ("rejected", rejected)):
        role = messages[count]["role"] if count < len(messages) else None
        if role != "assistant":
            what = f"is from {role!r}" if role else "is missing"
            raise ShardlmError(
                f"{where}: message {count} of {name} {what}; behind the prompt, which is what chosen and rejected "
                "begin with, both go on with an answer of the assistant"
            )
    return count
