"""How few tokens a text can have, told from its characters alone: 30 MB take a tokenizer 45 s, and this 0.1 s.

A token stands for a piece of the text, so that a text with n characters of a kind has at least n / m tokens, where no
token of the vocabulary has more than m of that kind. That holds where nothing is taken out of the text before: each
part of the tokenizer is looked at, and for one that is not known to keep the text the bound is 0. No jax.
"""

import dataclasses
import json
import math
import string
from collections.abc import Mapping
from typing import Any

# Unicode composes at most four characters to one (U+1F82), each but the first of which is not of ASCII.
MOST_COMPOSED = 4
_FORMS = ("NFC", "NFKC", "NFD", "NFKD")
_KEEP = ("ByteLevel", "Metaspace", "Digits")  # pre-tokenizers that only cut, or add
_WORDS = (string.ascii_letters + string.digits).encode()
_OTHERS = bytes(byte for byte in range(256) if byte not in _WORDS)
_SPACES = "".join(char for char in map(chr, range(0x3001)) if char.isspace())


@dataclasses.dataclass(frozen=True)
class TokenBound:
    """longest      bytes of the longest token, or characters where `in_bytes` is False; 0: nothing can be said
    words        letters and digits of ASCII in the token with the most
    in_bytes     tokens are made of bytes, and nothing comes before them that changes characters
    composes     characters may be composed before
    eats_spaces  some token takes the space beside it, however much
    """

    longest: int
    words: int
    in_bytes: bool
    composes: bool
    eats_spaces: bool

    @classmethod
    def of(cls, tokenizer_json: str) -> "TokenBound":
        """Of the text of a tokenizer.json."""
        made = json.loads(tokenizer_json)
        model, added = made["model"], made.get("added_tokens") or []
        norms, cuts = _parts(made.get("normalizer"), "normalizers"), _parts(made.get("pre_tokenizer"), "pretokenizers")
        in_bytes = any(one["type"] == "ByteLevel" for one in (*cuts, *norms))
        if not (all(map(_keeps, norms)) and all(map(_cuts, cuts)) and _whole(model, in_bytes)):
            return cls(0, 0, False, False, False)
        vocab = model["vocab"]
        tokens = [*(vocab if isinstance(vocab, dict) else (token for token, _ in vocab))]
        texts = [one["content"] for one in added]
        words = max(_words(text.encode()) for text in (*tokens, *texts))
        longest = max(max(map(len, tokens)), *(len(text.encode()) for text in texts), 1)
        composes = any(one["type"] in _FORMS for one in norms)
        eats = any(one["lstrip"] or one["rstrip"] for one in added)
        plain = all(one["type"] in ("Prepend", "ByteLevel") for one in norms)
        return cls(longest, words, in_bytes and plain, composes, eats)

    def least(self, text: str) -> int:
        """A number of tokens that `text` has at least."""
        if not self.longest:
            return 0
        coded = text.encode(errors="replace")
        foreign = len(text) - len(text.encode("ascii", "ignore")) if len(coded) > len(text) else 0
        units, words = len(coded) if self.in_bytes else len(text), _words(coded)
        if self.composes:
            units, words = max(len(text) - foreign, math.ceil(len(text) / MOST_COMPOSED)), words - foreign
        if self.eats_spaces:
            units -= sum(len(space.encode()) * text.count(space) for space in _SPACES)
        return max(math.ceil(units / self.longest), math.ceil(words / self.words) if self.words else 0, 0)

    def may_exceed(self, text: str, limit: int) -> bool:
        """Whether it is worth a look: cheap, and False where `least` is at most `limit` for sure."""
        return bool(self.longest) and 4 * len(text) > limit * min(self.longest, self.words or self.longest)


def _parts(part: Mapping[str, Any] | None, name: str) -> list[Mapping[str, Any]]:
    """Of a normaliser or pre-tokenizer, those of a sequence one by one."""
    if part is None:
        return []
    return [one for inner in part[name] for one in _parts(inner, name)] if part["type"] == "Sequence" else [part]


def _keeps(norm: Mapping[str, Any]) -> bool:
    """Whether a normaliser leaves at least as many characters, but for what `MOST_COMPOSED` says."""
    if norm["type"] == "Replace":
        taken = norm["pattern"].get("String")
        return taken is not None and len(norm["content"]) >= len(taken) and not (set(taken) & set(map(chr, _WORDS)))
    return norm["type"] in (*_FORMS, "Prepend", "ByteLevel")


def _cuts(cut: Mapping[str, Any]) -> bool:
    """Whether a pre-tokenizer leaves every character in its place."""
    if cut["type"] in ("Split", "Punctuation"):
        return cut.get("behavior") not in (None, "Removed")
    return cut["type"] in _KEEP


def _whole(model: Mapping[str, Any], in_bytes: bool) -> bool:
    """Whether a model has tokens for any text: none is left out, and no run of unknown characters is one token."""
    if model["type"] not in ("BPE", "Unigram"):
        return False
    vocab = model["vocab"]
    known = set(vocab if isinstance(vocab, dict) else (token for token, _ in vocab))
    if in_bytes:
        return _byte_symbols() <= known
    return bool(model.get("byte_fallback")) and {f"<0x{byte:02X}>" for byte in range(256)} <= known


def _byte_symbols() -> set[str]:
    """The characters that stand for bytes (GPT-2's): printable ones for themselves, the others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    return {chr(byte) for byte in printable} | {chr(0x100 + i) for i in range(256 - len(printable))}


def _words(coded: bytes) -> int:
    return len(coded.translate(None, _OTHERS))
