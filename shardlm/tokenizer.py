"""Text to token ids and back: a thin layer over the `tokenizers` library, with a byte-level BPE trainer.

Owns training, loading, saving, the end-of-document token and streamed decoding. Leaves reading text to
`shardlm.data.corpus` and storing tokens to `shardlm.data.shards`.
"""

import functools
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from shardlm import tokenizer_files
from shardlm.errors import ShardlmError
from shardlm.files import user_cache, write_atomically
from shardlm.token_bound import TokenBound
from shardlm.tokenizer_files.splits import SPLIT
from shardlm.tokenizer_files.told import JSON

END_OF_DOCUMENT = "<|endoftext|>"
# The names that the usual model families give it, the most specific first.
END_OF_DOCUMENT_NAMES = (
    END_OF_DOCUMENT,
    "<|end_of_text|>",
    "<｜end▁of▁sentence｜>",
    "<eos>",
    "</s>",
    "[EOS]",
    "<|eos|>",
    "<|END_OF_TURN_TOKEN|>",
)

_MANY = 10_000  # tokens
_PROBE = "Hello,  World!\n\tdef f(x_1):\r\n    return 12345.678  # naïve ½ 日本語 🙂🏽 İ ﬁ\n\n\n don't"


class Tokenizer:
    """An immutable tokenizer; equal `fingerprint` means equal token ids for equal text."""

    def __init__(self, backend: tokenizers.Tokenizer):
        # Files made for inference may ask for truncation or padding: neither belongs in a training stream.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Tokenizer":
        """Reads a tokenizer.json, or the tokenizer of a directory, of any form (tokenizer_files).

        Raises:
          ShardlmError: the file is missing or is not a tokenizer.
        """
        file = Path(path)
        if file.is_dir():
            file = file / JSON
            if not file.is_file():
                return cls._made(Path(path))
        if not file.is_file():
            raise ShardlmError(
                f"no tokenizer at {file}: give the path of a tokenizer.json or of a directory that holds one,"
                " or bpe:4096 to train one"
            )
        try:
            return cls(tokenizers.Tokenizer.from_file(str(file)))
        except Exception as error:  # the library raises plain Exception for every kind of malformed file
            raise ShardlmError(
                f"{file} is not a tokenizer that the `tokenizers` library reads: {error}. Expected the"
                " tokenizer.json of a Hugging Face model or one written by shardlm"
            ) from error

    @classmethod
    def _made(cls, folder: Path) -> "Tokenizer":
        made = tokenizer_files.tokenizer_json(folder)
        try:
            return cls(tokenizers.Tokenizer.from_str(made))
        except Exception as error:  # as above
            raise ShardlmError(
                f"what the files of {folder} say is no tokenizer to the `tokenizers` library: {error}. Download them "
                "again"
            ) from error

    def save(self, path: str | os.PathLike) -> None:
        """Writes a tokenizer.json, all of it or nothing.

        Raises:
          ShardlmError: the file cannot be written.
        """
        write_atomically(Path(path), self._backend.to_str(pretty=True).encode())

    def to_json(self) -> str:
        """What `save` writes, on one line."""
        return self._backend.to_str()

    def encode(self, text: str, *, parse_special: bool = True) -> list[int]:
        """Token ids of `text`, nothing added at either end.

        Args:
          parse_special: read the name of a special token as that token (prompts, chat templates) rather than
            as the characters it is spelt with (documents, where `<|endoftext|>` must not end one early).
        """
        return self.encode_batch([text], parse_special=parse_special)[0]

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a prompt, with what the tokenizer puts at its ends (Llama's <|begin_of_text|>), as transformers
        does. Text of a chat template has that already: `encode` it."""
        # The library's `encode` holds Python's lock, and a server's event loop with it: 52 s for 30 MB.
        return _encoded(self._backend, [text], True)[0].ids

    @functools.cached_property
    def ends(self) -> tuple[list[int], list[int]]:
        """What `encode_prompt` puts before and behind a text."""
        plain, whole = self.encode("a"), self.encode_prompt("a")
        size = len(plain)
        at = next((i for i in range(len(whole) - size + 1) if whole[i : i + size] == plain), None)
        return ([], []) if at is None else (whole[:at], whole[at + size :])

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Token ids of two texts, one behind the other, with what the tokenizer puts around such."""
        return self._backend.encode(first, second).ids

    def encode_batch(self, texts: Sequence[str], *, parse_special: bool = True) -> list[list[int]]:
        """`encode` of many texts, on all cores unless TOKENIZERS_PARALLELISM=false."""
        backend = self._backend if parse_special else self._plain
        return [one.ids for one in _encoded(backend, list(texts), False)]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of a prompt, and the characters [start, end) of `text` that each stands for."""
        encoded = self._backend.encode(text, add_special_tokens=False)
        return encoded.ids, encoded.offsets

    def least_tokens(self, text: str, limit: int) -> int:
        """A number of tokens that `text` has at least, or one up to `limit`; many times as fast as to count them."""
        return self._bound.least(text) if self._bound.may_exceed(text, limit) else 0

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of `ids`; bytes that form no UTF-8 character become U+FFFD."""
        if len(ids) > _MANY:  # as in `encode_prompt`: 0.2 s for a million
            return self._backend.decode_batch([list(ids)], skip_special_tokens=skip_special)[0]
        return self._backend.decode(list(ids), skip_special_tokens=skip_special)

    def texts(self, ids: Sequence[int]) -> list[str]:
        """The text of each id alone, special ones too."""
        own = list(dict.fromkeys(ids))
        text_of = dict(
            zip(own, self._backend.decode_batch([[id] for id in own], skip_special_tokens=False), strict=True)
        )
        return [text_of[id] for id in ids]

    def stream(self, *, skip_special: bool = True) -> "DecodeStream":
        """A decoder for ids that arrive one at a time."""
        return DecodeStream(self._backend, skip_special)

    def is_special(self, text: str) -> bool:
        """Whether a special token, which `decode` skips unless told, has this name."""
        return text in self._special

    def is_added(self, text: str) -> bool:
        """Whether a token has this name that is found in texts before they are split, a special one or not."""
        return any(token.content == text for token in self._backend.get_added_tokens_decoder().values())

    def token_texts(self) -> list[str]:
        """The text of each id alone, special ones too; "" of ids that are none."""
        return self.texts(range(self.vocab_size))

    @functools.cached_property
    def _bound(self) -> TokenBound:
        return TokenBound.of(self.to_json())

    @property
    def special_ids(self) -> dict[str, int]:
        """The special tokens, by name."""
        return {token.content: id for id, token in self._backend.get_added_tokens_decoder().items() if token.special}

    @functools.cached_property
    def _special(self) -> frozenset[str]:
        added = self._backend.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special)

    @functools.cached_property
    def vocabulary(self) -> dict[str, int]:
        """The id of each token by its name, added ones too."""
        return self._backend.get_vocab(with_added_tokens=True)

    @property
    def plain_vocab_size(self) -> int:
        """How many tokens there are without added ones."""
        return self._backend.get_vocab_size(with_added_tokens=False)

    @functools.cached_property
    def vocab_size(self) -> int:
        """Rows that an embedding needs: the highest id plus one (ids may have gaps)."""
        return max(self.vocabulary.values()) + 1

    @functools.cached_property
    def end_of_document_id(self) -> int:
        """The id that closes every document.

        Raises:
          ShardlmError: no token has one of the usual names.
        """
        for name in END_OF_DOCUMENT_NAMES:
            if (token := self._backend.token_to_id(name)) is not None:
                return token
        special = sorted(self._special)
        raise ShardlmError(
            f"the tokenizer has no end-of-document token: none of {', '.join(END_OF_DOCUMENT_NAMES)} is in"
            f" its vocabulary (special tokens: {', '.join(special[:20]) or 'none'}). Add one of these names"
            " to tokenizer.json, as add_tokens(NAME, special_tokens=True) of transformers' tokenizer does,"
            " where the model has an embedding to spare"
        )

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of the vocabulary and of how a probe text splits: stable over file layouts and releases."""
        vocabulary = sorted(self.vocabulary.items(), key=lambda item: item[1])
        content = json.dumps([vocabulary, self.encode(_PROBE, parse_special=False)])
        return hashlib.sha256(content.encode()).hexdigest()

    @functools.cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        plain = tokenizers.Tokenizer.from_str(self._backend.to_str())
        plain.encode_special_tokens = True
        return plain


def file_of(path: str | os.PathLike) -> Path:
    """The tokenizer.json that a path names: a file as it is, or that of a directory. Where the directory's tokenizer is
    of another form it is one in the user's cache, with the same ids.

    Raises:
      ShardlmError: the directory has no tokenizer, or the cache cannot be written.
    """
    path = Path(path)
    if not path.is_dir() or (path / JSON).is_file():
        return path / JSON if path.is_dir() else path
    made = tokenizer_files.tokenizer_json(path).encode()
    cache = user_cache("tokenizers", f"the tokenizer.json may be that is made of {path}")
    file = cache / f"{hashlib.sha256(made).hexdigest()[:24]}.json"
    if not file.is_file():
        write_atomically(file, made)
    return file


def _encoded(backend: tokenizers.Tokenizer, texts: list[str], ends: bool) -> "list[tokenizers.Encoding]":
    """`ends`: with what the tokenizer puts at the ends of a text. Raises ShardlmError for half a character, as JSON
    may have one, of which the library says no more than that it is no text."""
    try:
        return backend.encode_batch_fast(texts, add_special_tokens=ends)
    except TypeError:
        if half := next((c for text in texts if isinstance(text, str) for c in text if "\ud800" <= c <= "\udfff"), ""):
            raise ShardlmError(
                f"a text holds {half!r}, half of a surrogate pair, which no tokenizer reads: replace it, as by "
                "text.encode('utf-8', 'replace').decode()"
            ) from None
        raise


class DecodeStream:
    """Text of ids that arrive one at a time; the pieces concatenate to the text of the whole.

    A piece is empty while a character is incomplete: `decode` of single ids would give U+FFFD there. Tokenizers
    that fall back to bytes (Llama 2, Gemma) spoil valid bytes in `decode` when invalid ones follow; a stream keeps
    what it gave.
    """

    def __init__(self, backend: tokenizers.Tokenizer, skip_special: bool):
        self._backend = backend
        self._skip_special = skip_special
        self._stream = decoders.DecodeStream(skip_special_tokens=skip_special)
        self._pending: list[int] = []

    def step(self, token: int) -> str:
        """The text that became complete with `token`."""
        self._pending.append(token)
        try:
            piece = self._stream.step(self._backend, token)
        except Exception:  # "Invalid prefix": the token changed text that was given already; begin anew after that text
            self._stream = decoders.DecodeStream(skip_special_tokens=self._skip_special)
            pending, self._pending = self._pending, []
            return "".join(self.step(one) for one in pending)
        if piece is None:
            return ""
        self._pending.clear()
        return piece

    def finish(self) -> str:
        """What is left at the end: U+FFFD for a character that was never completed, else nothing."""
        rest = self._backend.decode(self._pending, skip_special_tokens=self._skip_special)
        self._pending.clear()
        return rest


def train_bpe(texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = (END_OF_DOCUMENT,)) -> Tokenizer:
    """Trains a byte-level BPE: every text is encodable, and decodes to itself.

    The result depends only on the texts, not on threads. It has fewer than `vocab_size` entries where no
    pair occurs twice any more. Special tokens take the first ids.

    Raises:
      ShardlmError: `vocab_size` has no room for the 256 bytes and the special tokens.
    """
    bytes_alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    least = len(bytes_alphabet) + len(special_tokens)
    if vocab_size < least:
        raise ShardlmError(
            f"a byte-level BPE of vocabulary {vocab_size} is too small: it needs at least {least}"
            f" (256 bytes and {len(special_tokens)} special tokens). Ask for bpe:{least} or more"
        )
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(special_tokens),
        initial_alphabet=bytes_alphabet,
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return Tokenizer(backend)
