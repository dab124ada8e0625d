"""Ranks of tiktoken, a line for each token: its bytes in base64 and its rank, which is its id and says what is merged
first. What cuts a text into words is not in the file; whose file it is says it."""

import base64
import dataclasses
import pathlib
import re
from typing import NamedTuple

from shardlm.errors import ShardlmError
from shardlm.tokenizer_files import splits
from shardlm.tokenizer_files.pieces import FILE, merges
from shardlm.tokenizer_files.told import CONFIG, Added, Told, begun_and_ended, bpe, json_of, placed

KIMI, QWEN = "tiktoken.model", "*.tiktoken"
_LINE = re.compile(rb"([A-Za-z0-9+/]+={0,2}) (\d+)\s*")


class How(NamedTuple):
    """cut      expression that cuts words
    begins   whether texts begin with bos_token unless they say otherwise
    further  names of the tokens that follow the ranks where no file names them; {} is the id
    kinds    classes whose code says all this, of which files by this name may be; (): of any
    """

    cut: str
    begins: bool = False
    further: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()


# By name of the file: Kimi K2's, Qwen 1's and Llama 3's, with the tokens that their own code has.
HOW = {
    KIMI: How(splits.KIMI, further=("<|reserved_token_{}|>",) * 256, kinds=("TikTokenTokenizer",)),
    QWEN: How(
        splits.QWEN,
        further=("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205))),
        kinds=("QWenTokenizer",),
    ),
    FILE: How(splits.SPLIT, begins=True),
}


def is_ranks(file: pathlib.Path) -> bool:
    """Whether a file begins as ranks do."""
    with open(file, "rb") as stream:
        return _LINE.fullmatch(stream.readline(4096)) is not None


def read(folder: pathlib.Path, told: Told) -> str:
    """Its tokenizer.json. Raises ShardlmError for a damaged file, and where nothing names the tokens besides."""
    file, how = next((file, how) for name, how in HOW.items() for file in sorted(folder.glob(name)) if file.is_file())
    if told.kind and how.kinds and told.kind not in how.kinds:
        raise told.refuse(
            f"{file} is of tokenizer_class={told.kind!r}, and how that cuts texts and what it adds is not known here; "
            f"such files are read of {', '.join(how.kinds)}"
        )
    vocab = _vocab(file)
    behind = {token.id for token in told.added if token.id is not None and token.id >= len(vocab)}
    if not (how.further or behind):
        raise told.refuse(
            f"{file} names no special tokens, and {CONFIG} has no added_tokens_decoder that does; get that file too"
        )
    further = enumerate(how.further, len(vocab))
    names = {token.content for token in told.added}
    more = [Added(name.format(id), id) for id, name in further if id not in behind]
    whole = dataclasses.replace(told, added=(*told.added, *(token for token in more if token.content not in names)))
    made = merges({name: (id,) for name, id in vocab.items()})
    vocab, entries = placed(whole, vocab)
    return json_of(
        bpe(vocab, made, ignore_merges=True),
        entries,
        normalizer=None,
        pre_tokenizer=splits.in_bytes(how.cut),
        post_processor=begun_and_ended(whole, entries, how.begins),
        decoder=splits.DECODER,
    )


def _vocab(file: pathlib.Path) -> dict[str, int]:
    """The tokens, spelt with a character for each byte. Raises ShardlmError for a line that is none, and for ids that
    are not 0, 1 and so on."""
    spelt = byte_characters()
    found = {}
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        match = _LINE.fullmatch(line)
        if match is None and line.strip():
            raise ShardlmError(f"{file}, line {number}, is no token in base64 and its rank; download it again")
        if match:
            found["".join(spelt[byte] for byte in base64.b64decode(match[1]))] = int(match[2])
    if sorted(found.values()) != list(range(len(found))) or not set(spelt) <= found.keys():
        raise ShardlmError(f"{file}: its {len(found)} ranks leave gaps, or some byte has none; download it again")
    return found


def byte_characters() -> list[str]:
    """The characters that stand for bytes (GPT-2's): printable ones for themselves, the others from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]
