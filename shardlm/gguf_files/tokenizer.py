"""The tokenizer of a file of llama.cpp as a tokenizer.json of the `tokenizers` library, with the same ids. No jax."""

import json
import logging
from collections.abc import Mapping
from typing import Any

from shardlm.errors import ShardlmError
from shardlm.gguf_files.merges import listed, scored
from shardlm.gguf_files.splits import KEY, UNNAMED, pre
from shardlm.gguf_files.vocabulary import BYTE, CONTROL, UNKNOWN, USER_DEFINED, Vocabulary, of_tokens
from shardlm.tokenizer_files.told import bpe

log = logging.getLogger(__name__)
_SPACE = "▁"  # what SentencePiece writes for one


def tokenizer_json(metadata: Mapping[str, Any]) -> str:
    """A tokenizer.json with the ids of the file, and on texts those that llama.cpp gives, but where the model's own
    tokenizer.json is known to differ from llama.cpp: see `splits`.

    Raises:
      ShardlmError: the tokenizer is of a kind that is not supported, or parts of it are missing.
    """
    vocabulary = Vocabulary.of(metadata)
    parts = _of_bytes(vocabulary) if vocabulary.in_bytes else _of_pieces(vocabulary)
    made = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(vocabulary),
        "post_processor": _ends(vocabulary),
        **parts,
    }
    return json.dumps(made, ensure_ascii=False)


def _of_bytes(vocabulary: Vocabulary) -> dict[str, Any]:
    if KEY not in vocabulary.metadata:
        log.warning(
            "the file does not say how its tokenizer cuts words (%s): read as %r, as llama.cpp does, with which newer "
            "models write worse. Use a newer conversion of the model",
            KEY,
            UNNAMED,
        )
    how = pre(vocabulary.pre)
    lines = vocabulary.metadata.get("tokenizer.ggml.merges")
    if lines is None:
        raise ShardlmError(
            "the file has a tokenizer of pairs of bytes and no tokenizer.ggml.merges, which says what pairs; download "
            "it again, or open the model's Hugging Face folder"
        )
    cuts = [{"type": "Split", "pattern": {"Regex": one}, "behavior": "Isolated", "invert": False} for one in how.cuts]
    in_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "normalizer": {"type": "NFC"} if how.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*cuts, in_bytes]},
        "decoder": in_bytes,
        "model": bpe(vocabulary.ids, listed(lines, vocabulary.ids)) | {"ignore_merges": how.whole_words},
    }


def _of_pieces(vocabulary: Vocabulary) -> dict[str, Any]:
    """SentencePiece's: spaces are characters like others, and characters that are no tokens are bytes."""
    scores = of_tokens(vocabulary.metadata, "scores", len(vocabulary.tokens))
    if not scores:
        raise ShardlmError(
            "the file has a tokenizer of SentencePiece and no tokenizer.ggml.scores, by which it merges; download it "
            "again, or open the model's Hugging Face folder"
        )
    apart = (CONTROL, UNKNOWN, BYTE)  # nothing is merged to one of them
    of_text = {
        name: score
        for name, score, kind in zip(vocabulary.tokens, scores, vocabulary.kinds, strict=True)
        if kind not in apart
    }
    prefix = vocabulary.metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    before = [{"type": "Prepend", "prepend": _SPACE}, spaces] if prefix else [spaces]
    after = [{"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}, {"type": "ByteFallback"}]
    after += [{"type": "Fuse"}, *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else [])]
    unknown = None if vocabulary.unknown is None else vocabulary.tokens[vocabulary.unknown]
    return {
        "normalizer": {"type": "Sequence", "normalizers": before},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": after},
        "model": bpe(vocabulary.ids, scored(of_text)) | {"unk_token": unknown, "fuse_unk": True, "byte_fallback": True},
    }


def _added(vocabulary: Vocabulary) -> list[dict[str, Any]]:
    """Tokens that are found by name before anything else."""
    # Of Phi 3, whose files do not say so: these take the spaces after them. llama.cpp knows it by the name, too.
    takes_spaces = any(name in str(vocabulary.metadata.get("general.name", "")).lower() for name in ("phi-3", "phi3"))
    return [
        {
            "id": id,
            "content": name,
            "single_word": False,
            "lstrip": False,
            "rstrip": takes_spaces and name not in ("<unk>", "<s>", "<|endoftext|>"),
            "normalized": False,
            "special": kind != USER_DEFINED,
        }
        for id, (name, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
        if kind in (CONTROL, UNKNOWN, USER_DEFINED)
    ]


def _ends(vocabulary: Vocabulary) -> dict[str, Any] | None:
    """What a text begins and ends with."""
    first = [vocabulary.bos] if vocabulary.begins else []
    last = [vocabulary.eos] if vocabulary.closes else []
    if not (first or last):
        return None

    def put(id: int, part: int) -> dict[str, Any]:
        return {"SpecialToken": {"id": vocabulary.tokens[id], "type_id": part}}

    def around(text: str, part: int) -> list[dict[str, Any]]:
        inside = [{"Sequence": {"id": text, "type_id": part}}]
        return [*(put(id, part) for id in first), *inside, *(put(id, part) for id in last)]

    names = {id: vocabulary.tokens[id] for id in first + last}
    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": around("A", 0) + around("B", 1),
        "special_tokens": {name: {"id": name, "ids": [id], "tokens": [name]} for id, name in names.items()},
    }
