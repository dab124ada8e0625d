"""What replies are sampled to: JSONL to prompts of tokens, and the order in which they are taken.

A line is {"prompt"}, a text, which is taken as it is, or messages [{"role", "content"}, ...], which
data.chat_template renders up to where the assistant begins, or goes on where the last message is its own; with "tools"
where there are some. Whatever else it has goes to the rewards."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardlm.chat import ChatTemplate
from shardlm.data.chats import checked
from shardlm.data.corpus import find_sources, read_lines
from shardlm.errors import ShardlmError
from shardlm.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Prompt:
    """given: the text or the messages. tokens: what the model reads. columns: the rest of its line."""

    given: str | list[Mapping[str, Any]]
    tokens: tuple[int, ...]
    columns: Mapping[str, Any]

    def completion(self, text: str) -> str | list[dict[str, str]]:
        """A reply in the form of the prompt, with what the assistant has said in it already, as in TRL."""
        if isinstance(self.given, str):
            return text
        begun = self.given[-1]["content"] if _begun(self.given) else ""
        return [{"role": "assistant", "content": begun + text}]


def read(
    paths: Sequence[str], tokenizer: Tokenizer, template: ChatTemplate | None, longest: int, what: str
) -> tuple[Prompt, ...]:
    """The prompts of these files, of at most `longest` tokens. Raises ShardlmError that names file and line for what is
    no prompt, and for prompts that are longer."""
    found = []
    for source in find_sources(paths):
        if source.kind != "jsonl":
            raise ShardlmError(f"{source.path}: prompts are read from .jsonl, one a line")
        for number, line, _ in read_lines(source):
            where = f"{source.path}:{number}"
            try:
                found.append(_prompt(json.loads(line), where, tokenizer, template))
            except ValueError as error:
                raise ShardlmError(f"{where} is not JSON: {error}") from None
    if not found:
        raise ShardlmError(f"{what}={','.join(paths)} has no line with a prompt")
    too_long = [len(prompt.tokens) for prompt in found if len(prompt.tokens) > longest]
    if too_long:
        raise ShardlmError(
            f"{len(too_long):,} of {len(found):,} prompts of {what} are longer than the {longest:,} tokens that "
            f"train.seq_len leaves beside grpo.max_tokens; the longest has {max(too_long):,}. Set train.seq_len to "
            "more, grpo.max_tokens to less, or leave those prompts out"
        )
    return tuple(found)


def _prompt(line: Any, where: str, tokenizer: Tokenizer, template: ChatTemplate | None) -> Prompt:
    if not isinstance(line, dict) or not line.get("prompt"):
        raise ShardlmError(
            f'{where} has no prompt; a line is {{"prompt": ...}}, a text or messages, and what rewards ask'
        )
    given, tools = line["prompt"], line.get("tools")
    columns = {name: value for name, value in line.items() if name not in ("prompt", "tools")}
    if isinstance(given, str):
        return Prompt(given, tuple(tokenizer.encode_prompt(given)), columns)
    messages = checked(given, f"{where} (prompt)")
    if template is None:
        raise ShardlmError(
            f"{where}: the prompt has messages; set data.chat_template to the folder or file of a template"
        )
    begun = _begun(messages)
    try:
        text = template.render(messages, tools, add_generation_prompt=not begun, continue_final_message=begun)
    except ShardlmError as error:
        raise ShardlmError(f"{where} (prompt): {error}") from error
    return Prompt(given, tuple(tokenizer.encode(text)), columns)


def _begun(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the assistant has begun its reply."""
    return messages[-1]["role"] == "assistant" and isinstance(messages[-1].get("content"), str)


def digest(prompts: Sequence[Prompt]) -> int:
    """Of all that replies and rewards see of them, below 2**63."""
    content = json.dumps([(prompt.tokens, prompt.columns) for prompt in prompts])
    return int.from_bytes(hashlib.sha256(content.encode()).digest()[:8]) >> 1


@dataclasses.dataclass(frozen=True)
class Order:
    """Prompts by their number in epochs laid end to end, each shuffled anew by the seed."""

    prompts: tuple[Prompt, ...]
    seed: int

    @functools.cached_property  # every checkpoint has it
    def fingerprint(self) -> str:
        """Of prompts and seed, which decide what comes."""
        content = json.dumps([self.seed, [prompt.tokens for prompt in self.prompts]])
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def take(self, first: int, count: int) -> list[Prompt]:
        """So many from there on."""
        each = len(self.prompts)
        epochs = {number: self._epoch(number) for number in range(first // each, (first + count - 1) // each + 1)}
        return [self.prompts[epochs[i // each][i % each]] for i in range(first, first + count)]

    def _epoch(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, epoch]).permutation(len(self.prompts))
