"""Tokenizers as they are published without a tokenizer.json: which files a folder has, and by which library the ids of
tokenizer_files/expected.json are (make_tokenizer_files.py)."""

import base64
import json
import pathlib
import shutil
from typing import Any, NamedTuple

from shardlm.tokenizer_files.ranks import byte_characters

FILES = pathlib.Path(__file__).parent / "tokenizer_files"
PROMPT = "def main(argv"
PAIRS = {"vocab.json": "vocab.json", "merges.txt": "merges.txt"}
SIZE = 420  # of vocab.json, whose tokens of bytes come first


class Case(NamedTuple):
    """files   by their names in the folder, from which of FILES; "ranks", "tekken": the tokens of vocab.json so
    config  tokenizer_config.json, None: there is none
    model   model_type of config.json
    beside  other files of JSON
    by      the library whose ids are expected
    """

    files: dict[str, str]
    config: dict[str, Any] | None
    model: str
    by: str
    beside: dict[str, Any] = {}  # noqa: RUF012  never changed


def token(content: str, **options: bool) -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"content": content, **plain, "special": True, **options}


def ends(bos: str | None, eos: str, unk: str | None = None, **more: Any) -> dict[str, Any]:
    return {"bos_token": bos, "eos_token": eos, "unk_token": unk or eos, **more}


TEXT, S, CHAT = "<|endoftext|>", ("<s>", "</s>", "<unk>"), {"<|im_start|>": SIZE, "<|im_end|>": SIZE + 1}
# As facebook/opt-125m has it: </s> is no token of bytes, so that it comes behind them here.
OPT = {kind: {**token("</s>", normalized=True), "__type": "AddedToken"} for kind in ends("", "")}
OPT |= {"pad_token": {**token("<pad>"), "__type": "AddedToken"}, "add_bos_token": True, "errors": "replace"}
LLAMA = ends(*S, add_bos_token=True, add_eos_token=False, tokenizer_class="LlamaTokenizer", legacy=False)
OWN = {str(id): token(name) for id, name in enumerate(("<unk>", "<s>", "</s>"))}
KIMI = {"added_tokens_decoder": {str(SIZE): token("[BOS]"), str(SIZE + 6): token("<|im_end|>")}}
LLAMA3 = {"added_tokens_decoder": {str(SIZE): token("<|begin_of_text|>"), str(SIZE + 1): token("<|eot_id|>")}}
NEW = {"420": token("<|im_start|>"), "421": token("<|im_end|>"), "422": token("<new>", special=False)}
QWEN = ends(None, "<|im_end|>", TEXT, pad_token=TEXT, tokenizer_class="Qwen2Tokenizer")
QWEN |= {"added_tokens_decoder": {str(SIZE + i): token(name) for i, name in enumerate((TEXT, *CHAT))}}
QWEN |= {"additional_special_tokens": [*CHAT]}


def pairs(kind: str, model: str, beside: dict[str, Any] | None = None, **options: Any) -> Case:
    """vocab.json and merges.txt of this class."""
    return Case(PAIRS, ends(TEXT, TEXT, tokenizer_class=kind) | options, model, "transformers", beside or {})


def pieces(file: str, model: str, config: dict[str, Any] | None = None) -> Case:
    """tokenizer.model of SentencePiece's."""
    return Case({"tokenizer.model": file}, config, model, "transformers" if config else "sentencepiece")


CASES = {
    "opt": Case(PAIRS, OPT | {"tokenizer_class": "GPT2Tokenizer"}, "opt", "transformers"),
    "special_map": Case(
        PAIRS,
        {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True},
        "opt",
        "transformers",
        {"special_tokens_map.json": ends("</s>", "</s>")},
    ),
    "gpt2": pairs("GPT2TokenizerFast", "gpt2"),
    "prefixed": pairs("GPT2Tokenizer", "gpt2", add_prefix_space=True),
    "ended": pairs("GPT2Tokenizer", "gpt2", add_eos_token=True),
    "gpt_neox": pairs("GPTNeoXTokenizer", "gpt_neox", pad_token=TEXT),
    "codegen": pairs(
        "CodeGenTokenizer", "phi", {"added_tokens.json": {TEXT: SIZE, "<new>": SIZE + 1, "<x>": SIZE + 2}}
    ),
    "qwen2": Case(PAIRS, QWEN, "qwen3", "transformers"),
    "qwen3_5": pairs("Qwen3_5Tokenizer", "qwen3_5_text", bos_token=None, pad_token=TEXT),
    "llama": pieces("bpe.model", "llama", LLAMA),
    "llama_chat": pieces("bpe.model", "llama", LLAMA | {"added_tokens_decoder": OWN | NEW}),
    "mistral": pieces("bpe.model", "mistral", LLAMA | {"legacy": True}),
    "mistral_mapped": pieces("mapped.model", "mistral", LLAMA | {"legacy": True}),
    "bpe": pieces("bpe.model", "llama"),
    "gemma": pieces("gemma.model", "gemma"),
    "mapped": pieces("mapped.model", ""),
    "unigram": pieces("unigram.model", ""),
    "unigram_bytes": pieces("unigram_bytes.model", ""),
    "llama3": Case({"tokenizer.model": "ranks"}, LLAMA3 | {"bos_token": "<|begin_of_text|>"}, "llama", "tiktoken"),
    "kimi": Case({"tiktoken.model": "ranks"}, KIMI, "kimi_k2", "tiktoken"),
    "tekken": Case({"tekken.json": "tekken"}, None, "mistral3", "tekken"),
    "qwen": Case({"qwen.tiktoken": "ranks"}, None, "qwen", "tiktoken"),
}


def folder_of(name: str, folder: pathlib.Path) -> pathlib.Path:
    """Makes the folder of a case."""
    case = CASES[name]
    folder.mkdir(parents=True, exist_ok=True)
    for own, source in case.files.items():
        if source == "ranks":
            (folder / own).write_bytes(ranks())
        elif source == "tekken":
            (folder / own).write_text(json.dumps(tekken()))
        else:
            shutil.copy(FILES / source, folder / own)
    config = {} if case.config is None else {"tokenizer_config.json": case.config}
    for own, content in {**config, **case.beside, "config.json": {"model_type": case.model}}.items():
        (folder / own).write_text(json.dumps(content))
    return folder


def tekken() -> dict[str, Any]:
    """The same tokens but for the last two, in Mistral's form."""
    lines = [line.split() for line in ranks().decode().splitlines()]
    names = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    cut = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lo}]*[\p{Ll}\p{Lo}]+|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"
    return {
        "config": {"pattern": cut, "default_vocab_size": SIZE + 18, "default_num_special_tokens": 20},
        "special_tokens": [{"rank": i, "token_str": name, "is_control": True} for i, name in enumerate(names)],
        "vocab": [{"rank": int(rank), "token_bytes": token, "token_str": None} for token, rank in lines],
    }


def ranks() -> bytes:
    """vocab.json as tiktoken writes ranks."""
    bytes_of = {character: byte for byte, character in enumerate(byte_characters())}
    vocab = json.loads((FILES / "vocab.json").read_text())
    lines = [
        base64.b64encode(bytes(bytes_of[c] for c in name)) + b" %d\n" % id
        for name, id in sorted(vocab.items(), key=lambda item: item[1])
    ]
    return b"".join(lines)
