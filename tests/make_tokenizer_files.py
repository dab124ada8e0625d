"""Writes tokenizer_files/: small tokenizers in the forms that models are published in, and the ids that sentencepiece,
tiktoken and transformers give with them. Needs these three and torch; the tests do not:
`PYTHONPATH=. python tests/make_tokenizer_files.py`."""

import json
import pathlib
import random
import shutil
import tempfile

import sentencepiece
import tiktoken.load
import tokenizer_cases
import torch
import transformers

from shardlm.tokenizer import train_bpe
from shardlm.tokenizer_files import splits

HERE = pathlib.Path(__file__).parent / "tokenizer_files"
CODE = sorted((pathlib.Path(__file__).parent.parent / "shardlm").glob("*.py"))
OTHERS = [
    "日本語のテキスト 中文文本 naïve café 123456 3.14",
    "the  quick   brown fox  jumps\t\tover",
    "<x> abc the <x>",
] * 20
NASTY = [
    *("", " ", "  ", "   a", "hello world", " hello", "hello ", "a  b   c    d", "\n", "\n\n", "a\n b\r\n\tc"),
    *("123456789 12.5", "日本語のテキスト", "中文 한국어", "🙂👩🏽\u200d🚀 e\u0301 ½ ﬁ İ", "▁a ▁▁b", "<s> x </s>"),
    *("don't I'LL", "\x00\x01\u200b\u3000x", "def f(x):\n    return x+1\n\n\n", "<unk>", "naïve café", "مرحبا"),
    *(" \u00a0 a\u2003b ", "[INST] hi [/INST]", "a<|endoftext|> b", "</s>x </s> y", "<|im_start|>u\nhi<|im_end|>\n"),
    *(" <new> a <new>b", "HTTPServer camelCase 中a文", "abcthe<x>  the", "１２３ ², x²", "aaaaaaaaaaa", "\t\tx"),
    "x" * 40,
]
FACTS = {"input_sentence_size": 0, "hard_vocab_limit": False, "minloglevel": 5, "vocab_size": 420}
IDENTITY = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}


def sentencepiece_models(corpus: pathlib.Path) -> None:
    rules = corpus.with_suffix(".tsv")
    rules.write_text("FB01\t66 69\nBD\t31 2F 32\nFF11\t31\n3000\t20\n9\t20\n")
    bpe = {"model_type": "bpe", "byte_fallback": True}
    gemma = ["<mask>", "▁▁", "▁▁▁", "\n", "\n\n", "<start_of_turn>", "<end_of_turn>", "<table>"]
    ends = {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3, "bos_piece": "<bos>", "eos_piece": "<eos>"}
    for name, options in {
        "bpe": bpe | IDENTITY | {"split_digits": True, "allow_whitespace_only_pieces": True},
        "gemma": bpe | IDENTITY | ends | {"add_dummy_prefix": False, "user_defined_symbols": gemma},
        "mapped": bpe | {"normalization_rule_tsv": str(rules), "control_symbols": ["[INST]"]},
        "unigram": {"model_type": "unigram", **IDENTITY, "user_defined_symbols": ["abc", "<x>"]},
        "unigram_bytes": {"model_type": "unigram", "byte_fallback": True, "normalization_rule_tsv": str(rules)},
        "word": {"model_type": "word", **IDENTITY},
    }.items():
        prefix = HERE / name
        sentencepiece.SentencePieceTrainer.train(input=str(corpus), model_prefix=str(prefix), **FACTS | options)
        prefix.with_suffix(".vocab").unlink()


def by_sentencepiece(folder: pathlib.Path, texts: list[str]) -> dict:
    """Decoded texts but for unknown characters, which it has a sign for, and spaces that it takes at the beginning."""
    own = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    ids = [own.encode(text) for text in texts]
    decoded = [own.decode(one) for one in ids]
    return {
        "spelt": ids,
        "decoded": [
            None if "⁇" in done or text[:1] == "▁" else done for text, done in zip(texts, decoded, strict=True)
        ],
    }


def by_tiktoken(folder: pathlib.Path, texts: list[str]) -> dict:
    pattern = {"tiktoken.model": splits.KIMI, "qwen.tiktoken": splits.QWEN, "tokenizer.model": splits.SPLIT}
    file = next(folder / name for name in pattern if (folder / name).exists())
    ranks = tiktoken.load.load_tiktoken_bpe(str(file))
    own = tiktoken.Encoding("own", pat_str=pattern[file.name], mergeable_ranks=ranks, special_tokens={})
    return {"spelt": [own.encode_ordinary(text) for text in texts], "decoded": texts}


def by_tekken(folder: pathlib.Path, texts: list[str]) -> dict:
    own = transformers.integrations.mistral.tokenizer.MistralConverter(str(folder / "tekken.json")).converted()
    ids = [own.encode(text, add_special_tokens=False).ids for text in texts]
    kept = [own.decode(one, skip_special_tokens=False) for one in ids]
    return {"read": ids, "prompts": [[1, *one] for one in ids], "decoded_whole": kept}


def by_transformers(folder: pathlib.Path, texts: list[str]) -> dict:
    if folder.name == "qwen3_5":  # which transformers 5.24 opens without its vocabulary
        lines = (folder / "merges.txt").read_text().splitlines()[1:]
        vocab, merges = json.loads((folder / "vocab.json").read_text()), [tuple(line.split(" ")) for line in lines]
        own = transformers.models.qwen3_5.Qwen3_5Tokenizer(vocab=vocab, merges=merges)
    else:
        own = transformers.AutoTokenizer.from_pretrained(folder)
    ids = [own.encode(text, add_special_tokens=False) for text in texts]
    kept = [own.decode(one, skip_special_tokens=False) for one in ids]
    return {"read": ids, "prompts": [own.encode(text) for text in texts], "decoded_whole": kept}


def models() -> None:
    """Tiny models as torch.save writes them, and what transformers makes of a prompt."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 128}
    opt = transformers.OPTConfig(
        vocab_size=424, ffn_dim=32, word_embed_proj_dim=16, pad_token_id=1, eos_token_id=2, **sizes
    )
    llama = transformers.LlamaConfig(vocab_size=424, intermediate_size=32, **sizes)
    for name, config in {"opt": opt, "llama": llama}.items():
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for weight in model.parameters():
                weight.normal_(0, 0.25)
            model.get_output_embeddings().weight[:260] = 0  # no single bytes, of which half characters are made
        folder = HERE / f"{name}_model"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        torch.save(model.half().state_dict(), folder / "pytorch_model.bin")
        (folder / "config.json").write_text(
            json.dumps(model.config.to_diff_dict() | {"dtype": "float16"}, indent=1) + "\n"
        )
        with tempfile.TemporaryDirectory() as home:
            whole = tokenizer_cases.folder_of(name, pathlib.Path(home) / name)
            shutil.copytree(folder, whole, dirs_exist_ok=True)
            tokenizer = transformers.AutoTokenizer.from_pretrained(whole)
            loaded = transformers.AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32)
            prompt = tokenizer(tokenizer_cases.PROMPT, return_tensors="pt").input_ids
            made = loaded.generate(prompt, max_new_tokens=24, do_sample=False)[0, prompt.shape[1] :].tolist()
            text = tokenizer.decode(made, skip_special_tokens=True)
        (folder / "expected.json").write_text(
            json.dumps({"prompt": prompt[0].tolist(), "ids": made, "text": text}) + "\n"
        )


def main() -> None:
    HERE.mkdir(exist_ok=True)
    lines = [line for file in CODE for line in file.read_text().splitlines() if line.strip()] + OTHERS
    trained = json.loads(train_bpe(lines, 420, ()).to_json())["model"]
    (HERE / "vocab.json").write_text(json.dumps(trained["vocab"], ensure_ascii=False) + "\n")
    (HERE / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in trained["merges"]))
    with tempfile.TemporaryDirectory() as home:
        corpus = pathlib.Path(home) / "corpus.txt"
        corpus.write_text("\n".join(lines))
        sentencepiece_models(corpus)
        alphabet = [*"aeiou bcd \n\t▁1239.,'é日🙂<>/", "the ", "return ", "  "]
        draw = random.Random(0)
        texts = NASTY + ["".join(draw.choices(alphabet, k=draw.randint(1, 30))) for _ in range(20)]
        (HERE / "texts.json").write_text(json.dumps(texts, ensure_ascii=False, indent=0) + "\n")
        makers = {
            "sentencepiece": by_sentencepiece,
            "tiktoken": by_tiktoken,
            "tekken": by_tekken,
            "transformers": by_transformers,
        }
        found = {}
        for name, case in tokenizer_cases.CASES.items():
            folder = tokenizer_cases.folder_of(name, pathlib.Path(home) / name)
            found[name] = makers[case.by](folder, texts)
        (HERE / "expected.json").write_text(json.dumps(found, ensure_ascii=False, separators=(",", ":")) + "\n")
    models()


if __name__ == "__main__":
    main()
