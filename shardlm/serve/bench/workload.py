"""What a benchmark asks for, and a serving plan foresees: random prompts, of equal lengths or spread ones, prompts that
share their beginning, or those of a file. No jax."""

import dataclasses
import json
import math
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

    @property
    def images(self) -> int:
        """Among the parts of its messages."""
        contents = [message.get("content") for message in self.body.get("messages", ()) if isinstance(message, dict)]
        parts = [part for content in contents if isinstance(content, list) for part in content]
        return sum(isinstance(part, dict) and part.get("type") == "image_url" for part in parts)


def spread(length: int, ratio: float) -> range:
    """The lengths that are as likely as each other: from `length` x (1 - ratio) to x (1 + ratio), as of vLLM's
    --random-range-ratio. Raises ShardlmError for a ratio that is not from 0 to below 1."""
    if not 0 <= ratio < 1:
        raise ShardlmError(f"range_ratio={ratio:g} is a share of the lengths, from 0 (all are equal) to below 1")
    least, most = round(length * (1 - ratio), 6), round(length * (1 + ratio), 6)
    return range(max(1, math.floor(least)), math.ceil(most) + 1)


def check_shared(shared: int, length: int, ratio: float) -> None:
    """Raises ShardlmError for more shared tokens than the shortest prompt has."""
    least = spread(length, ratio)[0]
    if shared > least:
        shortest = f", of which range_ratio={ratio:g} makes the shortest {least}" if ratio else ""
        raise ShardlmError(
            f"shared_prefix={shared} is above prompt_len={length}{shortest}; a prompt begins with what is shared"
        )


def lengths(count: int, length: int, new: int, ratio: float, seed: int) -> list[tuple[int, int]]:
    """(tokens of the prompt, of the reply) of `count` requests, each drawn from its `spread`."""
    rng, asked, told = random.Random(f"lengths {seed}"), spread(length, ratio), spread(new, ratio)
    return [(rng.choice(asked), rng.choice(told)) for _ in range(count)]


def prompts(count: int, length: int, shared: int, vocab: int, seed: int = 0) -> list[list[int]]:
    """`count` prompts of `length` random tokens, the first `shared` of which are the same in all. Raises ShardlmError
    for more shared ones than there are."""
    check_shared(shared, length, 0)
    return _prompts([length] * count, shared, vocab, seed)


def _prompts(every: Sequence[int], shared: int, vocab: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    beginning = [rng.randrange(vocab) for _ in range(shared)]
    return [beginning + [rng.randrange(vocab) for _ in range(length - shared)] for length in every]


def random_jobs(count: int, length: int, new: int, shared: int, vocab: int, seed: int, ratio: float = 0.0) -> list[Job]:
    """Greedy requests for exactly so many tokens: `new`, or `lengths` around it. Raises ShardlmError as `spread` and
    `check_shared` do."""
    check_shared(shared, length, ratio)
    both = lengths(count, length, new, ratio, seed)
    found = zip(_prompts([one for one, _ in both], shared, vocab, seed), both, strict=True)
    fixed = {"temperature": 0, "ignore_eos": True}
    return [Job({"prompt": prompt, "max_tokens": told, **fixed}) for prompt, (_, told) in found]


def file_jobs(path: str | os.PathLike, count: int, new: int, seed: int) -> list[Job]:
    """`count` requests of a JSONL file or of a JSON list, in an order that `seed` decides, from the first again where
    there are fewer. Each entry has

        prompt         a text or token ids, or
        messages       as OpenAI's chat has them, with images too, or
        conversations  as ShareGPT has them ({from: human, value}); what stands before the first answer is asked

    and perhaps max_tokens, else `new`. Raises ShardlmError for what is none of these."""
    jobs = read_jobs(path, new)
    random.Random(seed).shuffle(jobs)
    return [jobs[i % len(jobs)] for i in range(count)]


def read_jobs(path: str | os.PathLike, new: int) -> list[Job]:
    """All of such a file, in its order."""
    entries = _entries(pathlib.Path(path))
    jobs = [_job(entry, new, f"{path}, entry {number}") for number, entry in enumerate(entries, 1)]
    if not jobs:
        raise ShardlmError(f"{path} holds no requests; give a line of JSON for each")
    return jobs


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
