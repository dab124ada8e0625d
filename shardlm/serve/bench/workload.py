"""What a benchmark asks for: random prompts, prompts that share their beginning, or those of a file. No jax."""

import dataclasses
import json
import os
import pathlib
import random
from collections.abc import Sequence
from typing import Any

from shardlm.errors import ShardlmError

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


@dataclasses.dataclass(frozen=True)
class Job:
    """One request: `body` is what it says beside the model's name, for /v1/chat/completions where it has messages."""

    body: dict[str, Any]

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if "messages" in self.body else "/v1/completions"


def prompts(count: int, length: int, shared: int, vocab: int, seed: int = 0) -> list[list[int]]:
    """`count` prompts of `length` random tokens, the first `shared` of which are the same in all. Raises ShardlmError
    for more shared ones than there are."""
    if shared > length:
        raise ShardlmError(f"shared_prefix={shared} is above prompt_len={length}; a prompt begins with what is shared")
    rng = random.Random(seed)
    beginning = [rng.randrange(vocab) for _ in range(shared)]
    return [beginning + [rng.randrange(vocab) for _ in range(length - shared)] for _ in range(count)]


def random_jobs(count: int, length: int, new: int, shared: int, vocab: int, seed: int) -> list[Job]:
    """Greedy requests for exactly `new` tokens."""
    fixed = {"max_tokens": new, "temperature": 0, "ignore_eos": True}
    return [Job({"prompt": prompt, **fixed}) for prompt in prompts(count, length, shared, vocab, seed)]


def file_jobs(path: str | os.PathLike, count: int, new: int, seed: int) -> list[Job]:
    """`count` requests of a JSONL file or of a JSON list, in an order that `seed` decides, from the first again where
    there are fewer. Each entry has

        prompt         a text or token ids, or
        messages       as OpenAI's chat has them, or
        conversations  as ShareGPT has them ({from: human, value}); what stands before the first answer is asked

    and perhaps max_tokens, else `new`. Raises ShardlmError for what is none of these."""
    entries = _entries(pathlib.Path(path))
    jobs = [_job(entry, new, f"{path}, entry {number}") for number, entry in enumerate(entries, 1)]
    if not jobs:
        raise ShardlmError(f"{path} holds no requests; give a line of JSON for each")
    random.Random(seed).shuffle(jobs)
    return [jobs[i % len(jobs)] for i in range(count)]


def _entries(path: pathlib.Path) -> Sequence[Any]:
    try:
        text = path.read_text(encoding="utf-8")
        if text.lstrip().startswith("["):
            return json.loads(text)
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ShardlmError(f"{path} cannot be read as JSON lines in UTF-8: {error}") from None


def _job(entry: Any, new: int, where: str) -> Job:
    found = entry if isinstance(entry, dict) else {}
    fixed = {"max_tokens": found.get("max_tokens", new), "temperature": 0}
    if "conversations" in found:
        return Job({"messages": _first_question(found["conversations"], where), **fixed})
    for name, kinds in (("messages", list), ("prompt", str | list)):
        if found.get(name) and isinstance(found[name], kinds):
            return Job({name: found[name], **fixed})
    raise ShardlmError(f"{where}: an entry is an object with prompt, messages or conversations")


def _first_question(turns: Any, where: str) -> list[dict[str, str]]:
    messages = []
    try:
        for turn in turns:
            role = ROLES[turn["from"]]
            if role == "assistant":
                break
            messages.append({"role": role, "content": turn["value"]})
    except (KeyError, TypeError):
        raise ShardlmError(f"{where}: conversations are [{{from: human, value: TEXT}}, ...]") from None
    if not messages:
        raise ShardlmError(f"{where}: nothing stands before the first answer")
    return messages
