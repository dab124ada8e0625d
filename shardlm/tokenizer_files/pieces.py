"""tokenizer.model of SentencePiece (its sentencepiece_model.proto): pieces with scores, and what is done to a text
before. The tokenizer.json that is made of it has the ids that SentencePiece gives; where added tokens cut a text, each
part is a text by itself unless tokenizer_config.json says legacy=false, as transformers has it."""

import base64
import dataclasses
import pathlib
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from shardlm.errors import ShardlmError
from shardlm.tokenizer_files import protobuf
from shardlm.tokenizer_files.told import Added, Told, begun_and_ended, bpe, json_of, placed

FILE = "tokenizer.model"
# Kinds of pieces and of models.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
UNIGRAM, BPE = 1, 2
_MODELS = {UNIGRAM: "unigram", BPE: "bpe", 3: "word", 4: "char"}
_SPACE = "▁"  # what a space is written as
_TURNS = ("<start_of_turn>", "<end_of_turn>")  # of Gemma, whose file has them among those of the user
_NEVER = -1e6  # a score that no path through a text takes
# Classes whose texts begin with bos_token unless they say otherwise, and families that name none.
_BEGIN = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "")


class Piece(NamedTuple):
    content: str
    score: float
    kind: int


@dataclasses.dataclass(frozen=True)
class Model:
    """What a file holds, with the names of its schema. Ids are -1 where there is no such token."""

    pieces: tuple[Piece, ...]
    model_type: int
    byte_fallback: bool
    treat_whitespace_as_suffix: bool
    unk_id: int
    bos_id: int
    eos_id: int
    charsmap: bytes
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool
    escape_whitespaces: bool

    @classmethod
    def of(cls, message: bytes) -> "Model":
        """Raises ValueError for what is no such file."""
        whole = protobuf.fields(message)
        pieces = []
        for one in whole.get(1, []):
            piece = protobuf.fields(protobuf.content([one]))
            kind = protobuf.number(piece.get(3), NORMAL)
            pieces.append(Piece(protobuf.content(piece.get(1)).decode(), protobuf.real(piece.get(2)), kind))
        if not pieces:
            raise ValueError("it has no pieces")
        trainer, normalizer = (protobuf.fields(protobuf.content(whole.get(place))) for place in (2, 3))
        made = cls(
            tuple(pieces),
            protobuf.number(trainer.get(3), UNIGRAM),
            bool(protobuf.number(trainer.get(35), 0)),
            bool(protobuf.number(trainer.get(24), 0)),
            *(protobuf.number(trainer.get(40 + place), place) for place in range(3)),
            protobuf.content(normalizer.get(2)),
            *(bool(protobuf.number(normalizer.get(place), 1)) for place in (3, 4, 5)),
        )
        table = made.charsmap
        # The size of a trie, the trie in words of four bytes, and the texts that it leads to; the library panics over
        # another.
        size = int.from_bytes(table[:4], "little")
        if table and (size % 4 or size + 4 > len(table)):
            raise ValueError("its table of normalisations is cut off")
        if made.named(made.unk_id) is None:
            raise ValueError(f"its unknown piece, {made.unk_id}, is none of its {len(pieces)} pieces")
        return made

    def named(self, id: int) -> str | None:
        return self.pieces[id].content if 0 <= id < len(self.pieces) else None

    def contents(self, *kinds: int) -> list[str]:
        return [piece.content for piece in self.pieces if piece.kind in kinds]


def read(folder: pathlib.Path, told: Told) -> str:
    """Its tokenizer.json. Raises ShardlmError for a damaged file, and for models of other kinds."""
    file = folder / FILE
    try:
        message = file.read_bytes()
        if message.startswith(b"version "):
            raise ShardlmError(f"{file} is a Git LFS pointer, not the tokenizer; run `git lfs pull` in its folder")
        model = Model.of(message)
    except (ValueError, OSError) as error:
        message = f"{file} is no model of SentencePiece and no ranks of tiktoken ({error}); download it again"
        raise ShardlmError(message) from None
    if model.model_type not in (UNIGRAM, BPE) or model.treat_whitespace_as_suffix:
        kind = _MODELS.get(model.model_type, str(model.model_type))
        raise told.refuse(
            f"{file} is a model of SentencePiece of the kind {kind!r} with treat_whitespace_as_suffix="
            f"{model.treat_whitespace_as_suffix}; supported are 'bpe' and 'unigram' with spaces before words"
        )
    vocab = {piece.content: id for id, piece in enumerate(model.pieces)}
    if len(vocab) < len(model.pieces):
        raise ShardlmError(f"{file} has {len(model.pieces) - len(vocab)} pieces twice; download it again")
    whole = dataclasses.replace(told, added=(*told.added, *_of_model(model, told)))
    vocab, entries = placed(whole, vocab, rename=True)
    begins = told.kind in _BEGIN
    names = {id: name for name, id in vocab.items()}
    bos, eos = names.get(model.bos_id), names.get(model.eos_id)
    return json_of(
        _model(model, [names[id] for id in range(len(model.pieces))], vocab),
        entries,
        normalizer=_normalizer(model, told),
        pre_tokenizer=_pre_tokenizer(model, told),
        post_processor=begun_and_ended(whole, entries, begins, bos_token=bos, eos_token=eos),
        decoder=_decoder(model),
    )


def _of_model(model: Model, told: Told) -> list[Added]:
    """Its own tokens that are found by name, but for those that the files beside it name: unknown and control ones.
    Pieces of the user are cut out by `_pre_tokenizer`, as SentencePiece does it after the spaces are changed."""
    there = {token.content for token in told.added}
    there |= {model.named(token.id) for token in told.added if token.id is not None}
    return [
        Added(piece.content, id)
        for id, piece in enumerate(model.pieces)
        if (piece.kind in (UNKNOWN, CONTROL) or piece.content in _TURNS) and piece.content not in there
    ]


def _model(model: Model, names: Sequence[str], vocab: dict[str, int]) -> dict[str, Any]:
    """`names`: of its pieces, by id."""
    if model.model_type == UNIGRAM:
        # Pieces that no text is made of lie in the table too; the library would find them by their names.
        scores = [piece.score if piece.kind in (NORMAL, USER_DEFINED) else _NEVER for piece in model.pieces]
        table = list(zip(names, scores, strict=True))
        return {"type": "Unigram", "unk_id": model.unk_id, "vocab": table, "byte_fallback": model.byte_fallback}
    ranks = {names[id]: (-piece.score, id) for id, piece in enumerate(model.pieces) if piece.kind == NORMAL}
    return bpe(
        vocab,
        merges(ranks),
        unk_token=names[model.unk_id],
        fuse_unk=True,
        byte_fallback=model.byte_fallback,
        ignore_merges=bool(model.contents(USER_DEFINED)),
    )


def merges(ranks: dict[str, Any]) -> list[tuple[str, str]]:
    """All pairs that make a token of two others, by its rank; of those that make the same, the shortest left part comes
    first."""
    found = []
    for name in sorted(ranks, key=ranks.__getitem__):
        for cut in range(1, len(name)):
            if name[:cut] in ranks and name[cut:] in ranks:
                found.append((name[:cut], name[cut:]))
    return found


def _normalizer(model: Model, told: Told) -> dict[str, Any]:
    steps: list[dict[str, Any]] = []
    if model.charsmap:
        steps.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(model.charsmap).decode()})
    if model.remove_extra_whitespaces:
        steps += [_replace(rf"\A +|[ {_SPACE}]+\z", ""), _replace(" {2,}", " ")]
    if model.escape_whitespaces:
        steps.append({"type": "Replace", "pattern": {"String": " "}, "content": _SPACE})
    if model.add_dummy_prefix and _legacy(told):
        steps.append({"type": "Prepend", "prepend": _SPACE})
    return {"type": "Sequence", "normalizers": steps}


def _replace(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


def _legacy(told: Told) -> bool:
    """Whether what follows an added token begins as a text does, with a space."""
    return told.options.get("legacy") is not False


def _pre_tokenizer(model: Model, told: Told) -> dict[str, Any] | None:
    steps: list[dict[str, Any]] = []
    if model.add_dummy_prefix and not _legacy(told):
        steps.append({"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": "first", "split": False})
    if own := model.contents(USER_DEFINED):
        pattern = "|".join(re.escape(name) for name in sorted(own, key=len, reverse=True))
        steps.append({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False})
    return {"type": "Sequence", "pretokenizers": steps} if steps else None


def _decoder(model: Model) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}]
    steps += [{"type": "ByteFallback"}] if model.byte_fallback else []
    steps.append({"type": "Fuse"})
    steps += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if model.add_dummy_prefix else []
    return {"type": "Sequence", "decoders": steps}
