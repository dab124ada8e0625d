"""What the small files beside a vocabulary say: tokenizer_config.json, special_tokens_map.json and added_tokens.json.
Which tokens there are besides, what texts begin and end with, and how both come into a tokenizer.json."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from shardlm.errors import ShardlmError

JSON = "tokenizer.json"
CONFIG, SPECIAL, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
NAMES = (  # all files that a tokenizer may be made of
    *(CONFIG, SPECIAL, ADDED, "config.json", "vocab.json", "merges.txt", "tokenizer.model", "tiktoken.model"),
    *("*.tiktoken", "tekken.json"),
)
_KINDS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_OPTIONS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}


@dataclasses.dataclass(frozen=True)
class Added:
    """A token that is found by name before anything else. `id` is None where its files do not say one: that of the
    vocabulary, or the next."""

    content: str
    id: int | None = None
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    special: bool = True


@dataclasses.dataclass(frozen=True)
class Told:
    """options  of tokenizer_config.json, with those of special_tokens_map.json where it does not list added tokens
    model_type  of config.json, "" without one
    added       tokens in the order in which they are added
    """

    folder: pathlib.Path
    options: Mapping[str, Any]
    model_type: str
    added: tuple[Added, ...]

    @property
    def kind(self) -> str:
        """The class of tokenizers of transformers' that it is, "" where nothing says it."""
        return str(self.options.get("tokenizer_class") or "").removesuffix("Fast")

    def named(self, kind: str, unsaid: str | None = None) -> str | None:
        """The content of bos_token and so on."""
        return _content(self.options[kind]) if kind in self.options else unsaid

    def refuse(self, why: str) -> ShardlmError:
        """An error that says what would help in any case."""
        return ShardlmError(
            f"{self.folder}: {why}. AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) of transformers "
            f"writes {JSON}, which is read as it is"
        )


def told_in(folder: pathlib.Path) -> Told:
    """Of a folder. Raises ShardlmError for files that are not what they should be."""
    options, model = _object(folder / CONFIG), _object(folder / "config.json")
    kinds = {"tokenizer_class": model["tokenizer_class"]} if model.get("tokenizer_class") else {}
    listed, added = options.get("added_tokens_decoder"), _object(folder / ADDED)
    if listed is None:
        options = {**options, **_object(folder / SPECIAL)}
    elif not isinstance(listed, Mapping) or not all(id.isdigit() and _content(listed[id]) for id in listed):
        raise ShardlmError(f"{folder / CONFIG}: added_tokens_decoder is no object of tokens by ids; download it again")
    else:
        added = {}
    if not all(type(id) is int for id in added.values()):
        raise ShardlmError(f"{folder / ADDED}: it is no object of ids by tokens; download it again")
    special = [token for token in _special(options) if _content(token) is not None]
    names = {_content(token) for token in special}
    found = [_added(token, int(id)) for id, token in (listed or {}).items()]
    found = [dataclasses.replace(token, special=token.special or token.content in names) for token in found]
    found += [Added(name, id, normalized=name not in names, special=name in names) for name, id in added.items()]
    there = {token.content for token in found}
    found = sorted(found, key=lambda token: token.id)
    for token in special:
        if _content(token) not in there:
            found.append(dataclasses.replace(_added(token, None), special=True))
            there.add(found[-1].content)
    return Told(folder, {**kinds, **options}, str(model.get("model_type") or ""), tuple(found))


def placed(told: Told, vocab: Mapping[str, int], rename: bool = False) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """(the vocabulary, added_tokens) for a tokenizer.json. Added tokens that the vocabulary lacks come after it; where
    they leave gaps they are in the vocabulary too, as the library counts on otherwise. `rename`: a token of the
    vocabulary may have another name in the files beside it.

    Raises:
      ShardlmError: the files do not agree which id a token has.
    """
    vocab, by_id, entries = dict(vocab), {id: name for name, id in vocab.items()}, []
    after = max(by_id, default=-1) + 1
    for token in told.added:
        id = vocab.get(token.content, after) if token.id is None else token.id
        if rename and token.content not in vocab and id in by_id:
            vocab = {token.content if own == id else name: own for name, own in vocab.items()}
            by_id[id] = token.content
        if vocab.get(token.content, id) != id or by_id.get(id, token.content) != token.content:
            raise told.refuse(
                f"{token.content!r} is token {id} by the files that name added tokens, and by the vocabulary it is "
                f"{vocab.get(token.content, 'none')} and {id} is {by_id.get(id, 'none')!r}; download them again"
            )
        by_id[id] = token.content
        after = max(after, id + 1)
        entries.append({"id": id, **{name: getattr(token, name) for name in ("content", *_OPTIONS)}})
    entries.sort(key=lambda entry: entry["id"])
    behind = [entry for entry in entries if entry["content"] not in vocab]
    if [entry["id"] for entry in behind] != list(range(len(vocab), len(vocab) + len(behind))):
        vocab |= {entry["content"]: entry["id"] for entry in behind}
    return vocab, entries


def ends(ids: Mapping[str, int], first: Sequence[str], last: Sequence[str]) -> dict[str, Any] | None:
    """What texts begin and end with, and each of two texts."""
    if not (first or last):
        return None

    def around(text: str, part: int) -> list[dict[str, Any]]:
        inside = [{"Sequence": {"id": text, "type_id": part}}]
        put = [[{"SpecialToken": {"id": name, "type_id": part}} for name in names] for names in (first, last)]
        return [*put[0], *inside, *put[1]]

    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": around("A", 0) + around("B", 1),
        "special_tokens": {name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in (*first, *last)},
    }


def begun_and_ended(told: Told, entries: Sequence[Mapping[str, Any]], begins: bool, **unsaid: str | None):
    """`ends` of what the options say; `begins`: whether texts begin with bos_token where they do not say it.

    Raises:
      ShardlmError: they ask for a token that is not there.
    """
    ids = {entry["content"]: entry["id"] for entry in entries}
    asked = {"bos_token": told.options.get("add_bos_token", begins), "eos_token": told.options.get("add_eos_token")}
    names = {kind: told.named(kind, unsaid.get(kind)) for kind, wanted in asked.items() if wanted}
    names = {kind: name for kind, name in names.items() if name is not None}
    for kind, name in names.items():
        if name not in ids:
            raise told.refuse(f"texts begin or end with {kind}={name!r}, which is not a token")
    return ends(ids, *([names[kind]] if kind in names else [] for kind in ("bos_token", "eos_token")))


def json_of(model: Mapping[str, Any], entries: Sequence[Mapping[str, Any]], **parts: Any) -> str:
    """The text of a tokenizer.json; parts: normalizer, pre_tokenizer, post_processor, decoder."""
    made = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": list(entries), **parts}
    return json.dumps({**made, "model": model}, ensure_ascii=False)


def bpe(vocab: Mapping[str, int], merges: Sequence[tuple[str, str]], **options: Any) -> dict[str, Any]:
    """A model of pairs that are merged."""
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **options,
        "vocab": vocab,
        "merges": merges,
    }


def _special(options: Mapping[str, Any]) -> list[Any]:
    found = [options[kind] for kind in _KINDS if kind in options]
    for name in _LISTS:
        value = options.get(name) or []
        found += list(value.values()) if isinstance(value, Mapping) else list(value)
    return found


def _content(token: Any) -> str | None:
    """Of a token by its name or as an object, None where it is none."""
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) and content else None


def _added(token: Any, id: int | None) -> Added:
    options = {**_OPTIONS, "special": True} if isinstance(token, str) else {**_OPTIONS, "normalized": True}
    if isinstance(token, Mapping):
        options |= {name: bool(token[name]) for name in _OPTIONS if name in token}
    return Added(_content(token) or "", id, **options)


def _object(file: pathlib.Path) -> dict[str, Any]:
    """What a file of JSON holds; empty where there is none."""
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (ValueError, OSError) as error:
        raise ShardlmError(f"{file} is not JSON ({error}); download it again") from None
    if not isinstance(found, dict):
        raise ShardlmError(f"{file} holds a JSON {type(found).__name__} and not an object; download it again")
    return found
