"""What replies are sampled to: JSONL to prompts of tokens, and the order in which they are taken.

A line is {"prompt"}, a text, which is taken as it is, or messages [{"role", "content"}, ...], which
data.chat_template renders up to where the assistant begins, or goes on where the last message is its own; with "tools"
where there are some, and with images: of messages in the forms of data/line_images.py, of a text in the line's "images"
where the model's own token stands for them. Whatever else it has goes to the rewards, "images" too."""

import concurrent.futures
import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from shardlm.chat import ChatTemplate
from shardlm.data.chats import THREADS, checked, parsed
from shardlm.data.corpus import find_sources, read_lines
from shardlm.data.line_images import given as images_given
from shardlm.data.line_images import with_places
from shardlm.data.rendering import Chats, looked_at
from shardlm.errors import ShardlmError
from shardlm.reinforce.images import PromptImage
from shardlm.serve.messages import rendered
from shardlm.tokenizer import Tokenizer
from shardlm.vision.image_parts import SEEING, has_images
from shardlm.vision.image_places import encoded
from shardlm.vision.sight import Sight


@dataclasses.dataclass(frozen=True)
class Prompt:
    """given: the text or the messages. tokens: what the model reads, with all those of its images. columns: the rest of
    its line. written: the tokens in which one stands for each of `images`, where there are some."""

    given: str | list[Mapping[str, Any]]
    tokens: tuple[int, ...]
    columns: Mapping[str, Any]
    images: tuple[PromptImage, ...] = ()
    written: tuple[int, ...] = ()

    @property
    def asked(self) -> dict[str, Any]:
        """What an engine is asked with, the files of its images read. Raises as PromptImage.file."""
        if not self.images:
            return {"prompt_token_ids": list(self.tokens)}
        files = {"image": [image.file() for image in self.images]}
        return {"prompt_token_ids": list(self.written), "multi_modal_data": files}

    def completion(self, text: str) -> str | list[dict[str, str]]:
        """A reply in the form of the prompt, with what the assistant has said in it already, as in TRL."""
        if isinstance(self.given, str):
            return text
        begun = self.given[-1]["content"] if _begun(self.given) else ""
        return [{"role": "assistant", "content": begun + text}]


def read(
    paths: Sequence[str],
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    longest: int,
    what: str,
    sight: Sight | None = None,
) -> tuple[Prompt, ...]:
    """The prompts of these files, of at most `longest` tokens. `sight`: of the model, where it sees. Raises
    ShardlmError that names file and line for what is no prompt, and for prompts that are longer."""
    lines = _lines(paths, Chats(template, tokenizer, sight))
    if sight is None:
        found = [_prompt(*line) for line in lines]
    else:  # images are read by threads
        with concurrent.futures.ThreadPoolExecutor(THREADS, "prompts") as pool:
            try:
                found = list(pool.map(lambda line: _prompt(*line), lines))
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
    if not found:
        raise ShardlmError(f"{what}={','.join(paths)} has no line with a prompt")
    too_long = [len(prompt.tokens) for prompt in found if len(prompt.tokens) > longest]
    if too_long:
        smaller = ", data.max_pixels to less" if any(prompt.images for prompt in found) else ""
        raise ShardlmError(
            f"{len(too_long):,} of {len(found):,} prompts of {what} are longer than the {longest:,} tokens that "
            f"train.seq_len leaves beside grpo.max_tokens; the longest has {max(too_long):,}. Set train.seq_len to "
            f"more, grpo.max_tokens to less{smaller}, or leave those prompts out"
        )
    return tuple(found)


def may_show(paths: Sequence[str]) -> bool:
    """Whether some line of these files may have images: it says the word."""
    return any(b'"image' in line for source in find_sources(paths) for _, line, _ in read_lines(source))


def _lines(paths: Sequence[str], chats: Chats) -> Iterator[tuple[bytes, str, Chats]]:
    for source in find_sources(paths):
        if source.kind != "jsonl":
            raise ShardlmError(f"{source.path}: prompts are read from .jsonl, one a line")
        own = dataclasses.replace(chats, folder=source.path.parent)
        yield from ((line, f"{source.path}:{number}", own) for number, line, _ in read_lines(source))


def _prompt(text: bytes, where: str, chats: Chats) -> Prompt:
    line = parsed(text, where)
    if not isinstance(line, dict) or not line.get("prompt"):
        raise ShardlmError(
            f'{where} has no prompt; a line is {{"prompt": ...}}, a text or messages, and what rewards ask'
        )
    given, tools = line["prompt"], line.get("tools")
    columns = {name: value for name, value in line.items() if name not in ("prompt", "tools")}
    references = images_given(line, where)
    if isinstance(given, str):
        return _seeing(Prompt(given, tuple(chats.tokenizer.encode_prompt(given)), columns), references, where, chats)
    messages = checked(given, f"{where} (prompt)")
    if chats.template is None:
        raise ShardlmError(
            f"{where}: the prompt has messages; set data.chat_template to the folder or file of a template"
        )
    if references or any(map(has_images, messages)):
        messages, references = with_places(messages, references, f"{where} (prompt)")
    try:
        ids = _tokens(messages, tools, bool(references), chats)
    except ShardlmError as error:
        raise ShardlmError(f"{where} (prompt): {error}") from error
    return _seeing(Prompt(given, tuple(ids), columns), references, where, chats)


def _tokens(messages: Sequence[Mapping[str, Any]], tools: Any, images: bool, chats: Chats) -> list[int]:
    """Up to where the assistant goes on, with one for each image."""
    begun = _begun(messages)
    form = {"add_generation_prompt": not begun, "continue_final_message": begun}
    encode = chats.tokenizer.encode
    if not images or chats.sight is None:
        return encode(chats.template.render(messages, tools, **form))
    text = rendered(chats.template, messages, tools, token=chats.token, **form)
    return encoded(text, chats.token, chats.tokenizer, encode)


def _seeing(prompt: Prompt, references: Sequence[str], where: str, chats: Chats) -> Prompt:
    """With its images. Raises ShardlmError for those that are not there or cannot be read, and where it has more or
    fewer places for them."""
    if chats.sight is None:
        if references:
            raise ShardlmError(f"{where} has images, and the checkpoint's model reads text: leave them out; {SEEING}")
        return prompt
    seen = looked_at(references, where, chats)
    try:
        ids, placed = chats.sight.expanded(prompt.tokens, [seen[one].picture for one in references])
    except ShardlmError as error:
        token = chats.tokenizer.decode([chats.sight.token], skip_special=False)
        how = f"; in a text {token} stands for one" if isinstance(prompt.given, str) else ""
        raise ShardlmError(f"{where} (prompt): {error}{how}") from error
    images = tuple(
        PromptImage.of(place, seen[one], one, chats.folder, where)
        for place, one in zip(placed, references, strict=True)
    )
    written = prompt.tokens if images else ()
    return dataclasses.replace(prompt, tokens=tuple(ids), images=images, written=written)


def _begun(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the assistant has begun its reply."""
    return messages[-1]["role"] == "assistant" and isinstance(messages[-1].get("content"), str)


def digest(prompts: Sequence[Prompt]) -> int:
    """Of all that replies and rewards see of them, below 2**63."""
    content = json.dumps([(prompt.tokens, prompt.columns, _known_by([prompt])) for prompt in prompts])
    return int.from_bytes(hashlib.sha256(content.encode()).digest()[:8]) >> 1


def _known_by(prompts: Sequence[Prompt]) -> list[str]:
    """The images of all of them, as they are prepared."""
    return [image.place.picture.digest.hex() for prompt in prompts for image in prompt.images]


@dataclasses.dataclass(frozen=True)
class Order:
    """Prompts by their number in epochs laid end to end, each shuffled anew by the seed."""

    prompts: tuple[Prompt, ...]
    seed: int

    @functools.cached_property  # every checkpoint has it
    def fingerprint(self) -> str:
        """Of prompts, their images and the seed, which decide what comes."""
        images = _known_by(self.prompts)
        content = json.dumps([self.seed, [prompt.tokens for prompt in self.prompts], *([images] if images else [])])
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def take(self, first: int, count: int) -> list[Prompt]:
        """So many from there on."""
        each = len(self.prompts)
        epochs = {number: self._epoch(number) for number in range(first // each, (first + count - 1) // each + 1)}
        return [self.prompts[epochs[i // each][i % each]] for i in range(first, first + count)]

    def _epoch(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, epoch]).permutation(len(self.prompts))
