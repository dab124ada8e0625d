"""vocab.json and merges.txt: pairs of bytes, as GPT-2's tokenizer and its descendants have them. What cuts a text into
words is not in the files; the class that tokenizer_config.json names says it."""

import dataclasses
import json
import pathlib
from typing import NamedTuple

from shardlm.errors import ShardlmError
from shardlm.tokenizer_files.splits import DECODER, MARKS_IN_WORDS, QWEN, in_bytes
from shardlm.tokenizer_files.told import CONFIG, Added, Told, begun_and_ended, bpe, json_of, placed

VOCAB, MERGES = "vocab.json", "merges.txt"
END = "<|endoftext|>"
# Names that all of these classes have where files do not say them; GPT-NeoX's alone has the last.
UNSAID = {"bos_token": END, "eos_token": END, "unk_token": END, "pad_token": "<|padding|>"}


class How(NamedTuple):
    """cuts  expressions, none: GPT-2's own
    nfc      characters are composed first
    """

    cuts: tuple[str, ...] = ()
    nfc: bool = False


KINDS = {
    "GPT2Tokenizer": How(),
    "OPTTokenizer": How(),
    "CodeGenTokenizer": How(),
    "GPTNeoXTokenizer": How(nfc=True),
    "Qwen2Tokenizer": How((QWEN,), nfc=True),
    "Qwen3_5Tokenizer": How((MARKS_IN_WORDS,), nfc=True),
}
# By model_type, where nothing names a class.
OF_MODELS = {
    **dict.fromkeys(("opt", "gpt2", "gpt_neo", "gptj", "phi", "gpt_bigcode", "starcoder2", "jais2"), "GPT2Tokenizer"),
    **dict.fromkeys(("gpt_neox", "mpt", "olmo", "olmoe"), "GPTNeoXTokenizer"),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl", "qwen3", "qwen3_moe"), "Qwen2Tokenizer"),
    **dict.fromkeys(("qwen3_next", "qwen3_vl", "qwen3_vl_moe"), "Qwen2Tokenizer"),
}
OTHERWISE = ("qwen3_5", "qwen4_exp")  # say that they are Qwen2Tokenizer, and are not


def is_here(folder: pathlib.Path) -> bool:
    return (folder / VOCAB).is_file() and (folder / MERGES).is_file()


def lacking(folder: pathlib.Path) -> str:
    """What to say of a folder that has one of the two."""
    for one, other in ((VOCAB, MERGES), (MERGES, VOCAB)):
        if (folder / one).is_file():
            return f" (there is {one} and no {other})"
    return ""


def read(folder: pathlib.Path, told: Told) -> str:
    """Its tokenizer.json. Raises ShardlmError for a class that is not known, and for damaged files."""
    how = KINDS.get(_kind(told))
    if how is None:
        raise told.refuse(
            f"{CONFIG} says tokenizer_class={told.kind!r}, and how that cuts texts is not known here; of {VOCAB} and "
            f"{MERGES} are read {', '.join(KINDS)}"
        )
    vocab = _vocab(folder / VOCAB)
    merges = _merges(folder / MERGES, vocab)
    unsaid = [name for kind, name in UNSAID.items() if kind not in told.options and name in vocab]
    there = {token.content for token in told.added}
    more = [Added(name) for name in dict.fromkeys(unsaid) if name not in there]
    told = dataclasses.replace(told, added=(*told.added, *more))
    vocab, entries = placed(told, vocab)
    return json_of(
        bpe(vocab, merges, continuing_subword_prefix="", end_of_word_suffix=""),
        entries,
        normalizer={"type": "NFC"} if how.nfc else None,
        pre_tokenizer=in_bytes(*how.cuts, prefix=bool(told.options.get("add_prefix_space"))),
        post_processor=begun_and_ended(told, entries, False, bos_token=END, eos_token=END),
        decoder=DECODER,
    )


def _kind(told: Told) -> str:
    if told.model_type.startswith(OTHERWISE):
        return "Qwen3_5Tokenizer"
    return told.kind or OF_MODELS.get(told.model_type, "")


def _vocab(file: pathlib.Path) -> dict[str, int]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        sound = isinstance(found, dict) and all(type(id) is int and id >= 0 for id in found.values())
        sound = sound and len(set(found.values())) == len(found) > 0
    except (ValueError, OSError) as error:
        raise ShardlmError(f"{file} is not JSON ({error}); download it again") from None
    if not sound:
        raise ShardlmError(f"{file} is no object with an id of its own for each token; download it again")
    return found


def _merges(file: pathlib.Path, vocab: dict[str, int]) -> list[tuple[str, str]]:
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (ValueError, OSError) as error:
        raise ShardlmError(f"{file} cannot be read ({error}); download it again") from None
    found: dict[tuple[str, str], None] = {}
    for number, line in enumerate(lines):
        line = line.removesuffix("\r")
        if not line.strip() or (number == 0 and line.startswith("#version")):
            continue
        left, _, right = line.partition(" ")
        if not (left in vocab and right in vocab and left + right in vocab):
            raise ShardlmError(
                f"{file}, line {number + 1}, merges {left!r:.80} and {right!r:.80}, and not both of them and what they "
                f"make are in {VOCAB}; download both again"
            )
        found[left, right] = None
    return list(found)
