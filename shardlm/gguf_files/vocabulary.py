"""The tokens of a file's metadata (tokenizer.ggml.*): names, kinds and the ids that mean something. Defaults are those
of llama.cpp's src/llama-vocab.cpp. Leaves how text is cut to `splits` and `merges`."""

import collections
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from shardlm.errors import ShardlmError
from shardlm.gguf_files.splits import KEY, UNNAMED, pre

# Kinds of tokens (tokenizer.ggml.token_type).
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_BYTES, _PIECES = "gpt2", "llama"  # tokenizer.ggml.model: pairs of bytes, and SentencePiece's pairs of characters
# Names of tokens that end a turn or a text, which llama.cpp stops at whatever the file says of them.
_ENDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>"),
    *("<｜end▁of▁sentence｜>", "[e~["),
)
# Where these are, <|end|> ends a message after which the model goes on (gpt-oss, Solar).
_AFTER_END = tuple({stop, call} for stop in ("<|return|>", "<|flush|>") for call in ("<|call|>", "<|calls|>"))


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """tokens     by id; one without a name has one made up
    kinds      NORMAL and so on, by id
    in_bytes   tokens are spelt with a character for each byte
    metadata   of the file
    """

    tokens: Sequence[str]
    kinds: Sequence[int]
    in_bytes: bool
    metadata: Mapping[str, Any]

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> "Vocabulary":
        """Raises ShardlmError for a file without tokens, with some twice, or of a kind that is not supported."""
        model = metadata.get("tokenizer.ggml.model")
        if model not in (_BYTES, _PIECES):
            raise ShardlmError(
                f"the file's tokenizer is tokenizer.ggml.model = {model!r}; supported are {_BYTES!r} (pairs of bytes) "
                f"and {_PIECES!r} (SentencePiece's). Open the model's Hugging Face folder, which has its tokenizer.json"
            )
        tokens = [name or f"[EMPTY_{id}]" for id, name in enumerate(metadata.get("tokenizer.ggml.tokens") or ())]
        if len(set(tokens)) < max(len(tokens), 1):
            twice = [name for name, times in collections.Counter(tokens).items() if times > 1]
            what = f"has {twice[0]!r} twice" if twice else "is empty"
            raise ShardlmError(f"the file's list of tokens (tokenizer.ggml.tokens) {what}; download it again")
        kinds = list(of_tokens(metadata, "token_type", len(tokens)) or [NORMAL] * len(tokens))
        for id, name in enumerate(tokens):
            if name in _ENDS:
                kinds[id] = CONTROL
        return cls(tokens, kinds, model == _BYTES, metadata)

    @functools.cached_property
    def ids(self) -> dict[str, int]:
        return {name: id for id, name in enumerate(self.tokens)}

    @property
    def pre(self) -> str:
        return self.metadata.get(KEY) or UNNAMED

    @property
    def bos(self) -> int | None:
        return self._id("bos", 1)

    @property
    def eos(self) -> int | None:
        return self._id("eos", 2)

    @property
    def unknown(self) -> int | None:
        return self._id("unknown", 0)

    @property
    def padding(self) -> int | None:
        return self._id("padding", None)

    @functools.cached_property
    def ends(self) -> tuple[int, ...]:
        """Tokens that a reply ends with: of a text, of a turn and of a call, those that Ollama lists, and those
        known by name."""
        named = {name: self.ids[name] for name in _ENDS if name in self.ids}
        if any(pair <= named.keys() for pair in _AFTER_END):
            named.pop("<|end|>", None)
        listed = self.metadata.get("tokenizer.ggml.eos_token_ids") or ()
        found = [self.eos, self._id("eot", None), self._id("eom", None), *listed, *named.values()]
        return tuple(dict.fromkeys(id for id in found if id is not None and 0 <= id < len(self.tokens)))

    @property
    def begins(self) -> bool:
        """Whether texts begin with `bos`."""
        return self._flag("add_bos_token", pre(self.pre).begins if self.in_bytes else True, self.bos)

    @property
    def closes(self) -> bool:
        """Whether texts end with `eos`."""
        return self._flag("add_eos_token", False, self.eos)

    def _id(self, name: str, of_pieces: int | None) -> int | None:
        """None where it is beyond the vocabulary, as files write what they do not have."""
        id = self.metadata.get(f"tokenizer.ggml.{name}_token_id", None if self.in_bytes else of_pieces)
        return id if id is not None and 0 <= id < len(self.tokens) else None

    def _flag(self, name: str, unsaid: bool, id: int | None) -> bool:
        asked = bool(self.metadata.get(f"tokenizer.ggml.{name}", unsaid))
        if asked and id is None:
            kind = name.split("_")[1]
            raise ShardlmError(
                f"texts of this file begin or end with a token (tokenizer.ggml.{name}), and the file does not say "
                f"which: tokenizer.ggml.{kind}_token_id is missing or beyond its {len(self.tokens)} tokens. "
                "Download it again, or open the model's Hugging Face folder"
            )
        return asked


def of_tokens(metadata: Mapping[str, Any], name: str, count: int) -> Sequence[Any]:
    """A list with something for each token; empty without it. Raises ShardlmError for one that is too short."""
    found = metadata.get(f"tokenizer.ggml.{name}")
    if not found:
        return ()
    if len(found) < count:
        raise ShardlmError(
            f"the file has {count} tokens and tokenizer.ggml.{name} for {len(found)} of them; download it again"
        )
    return found[:count]
