"""Tokenizers of GGUF files. Pieces were recorded from llama.cpp, as in llama-cpp-python 0.3.36."""

import json
import logging
import unicodedata

import pytest
from tokenizers import pre_tokenizers

from shardlm.chat import ChatTemplate, special_tokens
from shardlm.errors import ShardlmError
from shardlm.gguf_files.splits import _FAMILIES
from shardlm.gguf_files.texts import texts
from shardlm.gguf_files.tokenizer import tokenizer_json
from shardlm.serve.defaults import recommended
from shardlm.tokenizer import Tokenizer

TEXT = "It's DON'T  x1234567 fooBar..\n\n \r\n!?\n/a 日本é ١٢ »q« $+5 \t"
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def in_bytes(text: str) -> str:
    """As tokens spell it."""
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]


def of_bytes(*more: tuple[str, int], pre: str | None = "llama-bpe", **said) -> dict:
    """A tokenizer that knows all that is up to six bytes long in TEXT, the shorter the earlier, and `more`: (token,
    kind)."""
    text = in_bytes(TEXT)
    windows = dict.fromkeys(text[at : at + size] for size in range(2, 7) for at in range(len(text) - size + 1))
    tokens = [(token, 1) for token in (*BYTES, *windows)] + list(more)
    found = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [token for token, _ in tokens],
        "tokenizer.ggml.token_type": [kind for _, kind in tokens],
        "tokenizer.ggml.merges": [f"{window[:-1]} {window[-1]}" for window in windows],
        "tokenizer.ggml.add_bos_token": False,
    }
    found |= {f"tokenizer.ggml.{name}": value for name, value in said.items()}
    return {key: value for key, value in found.items() if value is not None}


PIECES = ("▁a", "ab", "▁ab", "▁▁", "▁▁▁▁", "abc", "aa", "aaaa", "--", "----", "-----", "▁b")


def of_pieces(*more: tuple[str, int], **said) -> dict:
    """A tokenizer of SentencePiece."""
    tokens = [("<unk>", 2, 0.0), ("<s>", 3, 0.0), ("</s>", 3, 0.0), *((f"<0x{n:02X}>", 6, 0.0) for n in range(256))]
    tokens += [(token, 1, -float(n)) for n, token in enumerate((*PIECES, *"▁abc-é"))]
    tokens += [(token, kind, -1000.0) for token, kind in more]
    found = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [token for token, _, _ in tokens],
        "tokenizer.ggml.token_type": [kind for _, kind, _ in tokens],
        "tokenizer.ggml.scores": [score for _, _, score in tokens],
    }
    found |= {f"tokenizer.ggml.{name}": value for name, value in said.items()}
    return {key: value for key, value in found.items() if value is not None}


def load(metadata: dict, folder) -> Tokenizer:
    (folder / "tokenizer.json").write_text(tokenizer_json(metadata), encoding="utf-8")
    return Tokenizer.load(folder)


def pieces(tokenizer: Tokenizer, ids: list[int]) -> str:
    names = {id: name for name, id in tokenizer.vocabulary.items()}
    return " ".join(names[id] for id in ids)


RECORDED = {
    "llama-bpe minicpm5": "It 's ĠDON 'T Ġ Ġx 123 456 7 Ġf oo Bar ..ĊĊ ĠčĊ !?Ċ /a Ġæ Ĺ¥ æľ ¬Ã© "
    "Ġ Ù¡Ù¢ ĠÂ» q Â« Ġ$+ 5 Ġĉ",
    "dbrx": "It 's ĠD ON 'T Ġ Ġx 123 456 7 Ġf oo Bar .. ĊĊ ĠčĊ !?Ċ /a Ġæ Ĺ¥ æľ ¬Ã© Ġ Ù¡ Ù¢ ĠÂ» q Â« Ġ$+ 5 Ġĉ",
    "qwen2 deepseek-r1-qwen qwen35 bailingmoe": "It 's ĠD ON 'T Ġ Ġx 1 2 3 4 5 6 7 Ġf oo Bar .. ĊĊ ĠčĊ !?Ċ /a "
    "Ġæ Ĺ¥ æľ ¬Ã© Ġ Ù¡ Ù¢ ĠÂ» q Â« Ġ$+ 5 Ġĉ",
    "gpt-2 olmo": "It 's ĠD ON ' T Ġ Ġx 12 34 567 Ġf oo Bar .. ĊĊ Ġč Ċ !? Ċ / a Ġæ Ĺ¥ æľ ¬Ã© ĠÙ ¡Ù¢ ĠÂ» q Â« Ġ$+ 5 Ġĉ",
    "command-r starcoder": "It 's ĠD ON ' T Ġ Ġx 1 2 3 4 5 6 7 Ġf oo Bar .. ĊĊ Ġč Ċ !? Ċ / a Ġæ Ĺ¥ æľ ¬Ã© Ġ Ù¡ Ù¢ "
    "ĠÂ» q Â« Ġ$+ 5 Ġĉ",
    "falcon": "It ' s ĠD ON ' T Ġ Ġx 123 456 7 Ġf oo Bar .. ĊĊ ĠčĊ !? Ċ / a Ġæ Ĺ¥ æľ ¬Ã© ĠÙ ¡Ù¢ Ġ Â» q Â« Ġ $+ 5 Ġĉ",
    "deepseek-llm": "It ' s ĠD ON ' T Ġ Ġx 12 34 567 Ġf oo Bar .. Ċ Ċ Ġ č Ċ !? Ċ / a Ġ æĹ ¥æ ľ¬ Ã© Ġ Ù¡ Ù¢ "
    "ĠÂ» q Â« Ġ$+ 5 Ġĉ",
    "deepseek-coder": "It ' s ĠD ON ' T Ġ Ġx 1 2 3 4 5 6 7 Ġf oo Bar .. Ċ Ċ Ġ č Ċ !? Ċ / a Ġ æĹ ¥æ ľ¬ Ã© Ġ Ù¡ Ù¢ "
    "ĠÂ» q Â« Ġ$+ 5 Ġĉ",
    "deepseek-v3": "It 's ĠD ON 'T Ġ Ġx 123 456 7 Ġf oo Bar .. ĊĊ ĠčĊ !?Ċ /a Ġ æĹ ¥æ ľ¬ Ã© Ġ Ù¡ Ù¢ ĠÂ» q Â« Ġ$+ 5 Ġĉ",
    "gpt-4o": "It 's ĠD ON 'T Ġ Ġx 123 456 7 Ġf oo Bar .. ĊĊ ĠčĊ !? Ċ/ a Ġæ Ĺ¥ æľ ¬Ã© Ġ Ù¡ Ù¢ ĠÂ» q Â« Ġ$+ 5 Ġĉ",
    "tekken": "It 's ĠDON 'T Ġ Ġx 1 2 3 4 5 6 7 Ġfoo Bar ..ĊĊ ĠčĊ !?Ċ/ a Ġæ Ĺ¥ æľ ¬Ã© Ġ Ù¡ Ù¢ ĠÂ» q Â« Ġ$+ 5 Ġĉ",
    "seed-coder": "It 's ĠD ON 'T Ġ Ġx 1 2 3 4 5 6 7 Ġf oo Bar .. ĊĊ ĠčĊ !? Ċ /a Ġæ Ĺ¥ æľ ¬Ã© Ġ Ù¡ Ù¢ "
    "ĠÂ» q Â« Ġ$+ 5 Ġĉ",
    "default": "It ' s ĠD ON ' T Ġ Ġx 123 456 7 Ġf oo Bar .. ĊĊ ĠčĊ !? Ċ / a Ġæ Ĺ¥ æľ ¬Ã© Ġ Ù¡ Ù¢ Ġ Â» q Â« Ġ $+ 5 Ġĉ",
}
SPLITS = [(name, recorded) for names, recorded in RECORDED.items() for name in names.split()]


@pytest.mark.parametrize(("pre", "recorded"), SPLITS, ids=[name for name, _ in SPLITS])
def test_words_are_cut_as_llama_cpp_cuts_them(pre, recorded, tmp_path):
    tokenizer = load(of_bytes(pre=pre), tmp_path)
    ids = tokenizer.encode(TEXT)
    assert pieces(tokenizer, ids) == recorded
    assert tokenizer.decode(ids) == TEXT


def test_every_way_to_cut_words_was_recorded():
    assert {name for name, _ in SPLITS} == {names.split()[0] for names in _FAMILIES}


@pytest.mark.parametrize("pre", ["qwen2", "command-r", "llama-bpe"])
def test_characters_are_composed_where_the_models_own_tokenizer_does(pre, tmp_path):
    tokenizer = load(of_bytes(pre=pre), tmp_path)
    apart = unicodedata.normalize("NFD", "é")
    assert (tokenizer.encode(apart) == tokenizer.encode("é")) is (pre != "llama-bpe")


def test_names_of_tokens_are_found_first_and_ids_are_those_of_the_file(tmp_path):
    more = [("<|im_end|>", 1), ("<think>", 4), ("<think> x", 4), ("<|a|>", 3), ("<|a|>b", 3), ("", 5), ("[PAD1]", 5)]
    metadata = of_bytes(*more, ("ĠfooBar", 1))
    tokenizer = load(metadata, tmp_path)
    text = "a<|im_end|>b<think> x<|a|>b <|a|>c [PAD1]<think>x fooBar"
    # A name of which llama.cpp knows that turns end with it is special whatever the file says.
    assert pieces(tokenizer, tokenizer.encode(text)) == (
        "a <|im_end|> b <think> x <|a|>b Ġ <|a|> c Ġ [ P A D 1 ] <think> x ĠfooBar"
    )
    assert pieces(tokenizer, tokenizer.encode(text, parse_special=False)) == (
        "a < | i m _ e n d | > b <think> x < | a | > b Ġ < | a | > c Ġ [ P A D 1 ] <think> x ĠfooBar"
    )
    assert tokenizer.decode(tokenizer.encode(text)) == "ab<think> x c [PAD1]<think>x fooBar"
    tokens = metadata["tokenizer.ggml.tokens"]
    empty = tokens.index("")
    assert tokenizer.vocabulary == {token or f"[EMPTY_{empty}]": id for id, token in enumerate(tokens)}


def test_a_word_that_is_a_token_is_not_merged_where_the_family_says_so(tmp_path):
    for pre, recorded in (("llama-bpe", "ĠfooBar"), ("qwen2", "Ġf oo Bar")):
        tokenizer = load(of_bytes(("ĠfooBar", 1), pre=pre), tmp_path)
        assert pieces(tokenizer, tokenizer.encode(" fooBar")) == recorded


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"add_bos_token": None, "pre": "llama-bpe"}, "It a"),  # the family's way
        ({"add_bos_token": None, "pre": "qwen2"}, "a"),
        ({"add_bos_token": False}, "a"),
        ({"add_bos_token": True, "add_eos_token": True}, "It a t'"),
    ],
)
def test_prompts_begin_and_end_as_the_file_says(said, expected, tmp_path):
    tokenizer = load(of_bytes(bos_token_id=256, eos_token_id=257, **said), tmp_path)
    assert pieces(tokenizer, tokenizer.encode_prompt("a")) == expected
    assert pieces(tokenizer, tokenizer.encode("a")) == "a"


def test_pieces_are_merged_by_their_scores(tmp_path):
    tokenizer = load(of_pieces(("<tool>", 4), ("  ", 4), ("<|p|>", 3)), tmp_path)

    def encoded(text, **how):
        return pieces(tokenizer, tokenizer.encode(text, **how))

    text = "abc ab aaaaa-------- é日\nab"
    assert encoded(text) == "▁ab c ▁ab ▁a aaaa ---- ---- ▁ é <0xE6> <0x97> <0xA5> <0x0A> ab"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert encoded("  a    b") == "   ▁a       ▁b"
    assert encoded("</s>ab <tool> abc<s>") == "</s> ▁ab ▁ <tool> ▁ ▁ab c <s>"
    assert encoded("</s>ab <tool> abc<s>", parse_special=False) == (
        "▁ <0x3C> <0x2F> <0x73> <0x3E> ab ▁ <tool> ▁ ▁ab c <0x3C> <0x73> <0x3E>"
    )
    assert pieces(tokenizer, tokenizer.encode_prompt("ab")) == "<s> ▁ab"


def test_spaces_that_users_defined_are_merged_where_the_file_spells_them_as_pieces(tmp_path):
    tokenizer = load(of_pieces(("▁▁-", 4), add_space_prefix=False), tmp_path)
    assert pieces(tokenizer, tokenizer.encode("a  -b")) == "a ▁▁- b"


def test_pieces_without_a_space_before(tmp_path):
    tokenizer = load(of_pieces(("<tool>", 4), add_space_prefix=False), tmp_path)
    assert pieces(tokenizer, tokenizer.encode("abc ab aabaabcaaa<tool> abc")) == (
        "abc ▁ab ▁a ab a abc aa a <tool> ▁ab c"
    )
    for text in ("a b", " a", "  "):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tokens_of_phi_3_take_the_spaces_after_them(tmp_path):
    metadata = of_pieces(("<|p|>", 3), ("<|endoftext|>", 3))
    for name, recorded in (
        ("Phi-3 mini", "<|p|> ▁a <|p|> ▁b <s> ▁ ▁a"),
        ("", "<|p|> ▁▁ <0x0A> ▁a <|p|> ▁▁ ▁b <s> ▁ ▁a"),
    ):
        tokenizer = load(metadata | {"general.name": name}, tmp_path)
        assert pieces(tokenizer, tokenizer.encode("<|p|> \n a<|p|>  b<s> a")) == recorded


def test_a_file_that_does_not_say_how_words_are_cut_is_read_as_llama_cpp_reads_it(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        tokenizer = load(of_bytes(pre=None), tmp_path)
    assert pieces(tokenizer, tokenizer.encode(TEXT)) == RECORDED["default"]
    assert "tokenizer.ggml.pre" in caplog.text and "newer conversion" in caplog.text


def refuse(metadata: dict, *words: str) -> None:
    with pytest.raises(ShardlmError) as error:
        texts(metadata)
    assert all(word in str(error.value) for word in words), error.value


def test_what_cannot_be_read_is_refused_by_name():
    for kind in ("t5", "bert", "rwkv", "gemma4", None):
        refuse(of_bytes() | {"tokenizer.ggml.model": kind}, f"tokenizer.ggml.model = {kind!r}", "'gpt2'", "'llama'")
    refuse(of_bytes(pre="kimi-k2"), "'kimi-k2'", "llama-bpe", "qwen2", "tokenizer.json")
    refuse(of_bytes(("ab", 1), ("ab", 1)), "'ab' twice")
    refuse(of_bytes(tokens=[]), "is empty")
    refuse(of_bytes(merges=None), "no tokenizer.ggml.merges")
    refuse(of_bytes(merges=["a zz"]), "'a' and 'zz'")
    refuse(of_bytes(merges=["ab"]), "'ab' and ''")
    refuse(of_bytes(token_type=[1, 1]), "tokens and tokenizer.ggml.token_type for 2")
    refuse(of_bytes(add_bos_token=True), "tokenizer.ggml.bos_token_id", "beyond")
    refuse(of_bytes(add_eos_token=True, eos_token_id=4294967295), "tokenizer.ggml.eos_token_id", "beyond")
    refuse(of_pieces(scores=None), "no tokenizer.ggml.scores")
    refuse(of_pieces(scores=[-1000.0] * len(of_pieces()["tokenizer.ggml.tokens"])), "score -1000", "newer conversion")
    refuse(of_bytes() | {"tokenizer.chat_template.../../x": "{{ 1 }}"}, "'../../x'")


def folder_of(metadata: dict, folder) -> dict[str, dict]:
    for name, text in texts(metadata).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return {file.name: json.loads(file.read_text()) for file in folder.glob("*_config.json")}


def test_the_files_of_a_model_for_chats(tmp_path):
    first = len(of_bytes()["tokenizer.ggml.tokens"])
    names = ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|pad|>")
    metadata = of_bytes(
        *((name, 3) for name in names),
        add_bos_token=None,
        bos_token_id=first,
        eos_token_id=first + 2,
        padding_token_id=first + 4,
    )
    metadata |= {
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}",
        "tokenizer.chat_template.tool_use": "{{ tools[0].name }}",
        "general.sampling.temp": 0.6000000238418579,
        "general.sampling.top_k": 20,
        "general.sampling.mirostat": 0,
    }
    configs = folder_of(metadata, tmp_path)
    assert special_tokens(tmp_path) == {"bos_token": names[0], "eos_token": names[2], "pad_token": names[4]}
    generation = configs["generation_config.json"]
    assert (generation["bos_token_id"], generation["pad_token_id"]) == (first, first + 4)
    assert generation["eos_token_id"] == [first + 2, first + 3, first + 1]
    assert recommended(generation) == {"temperature": 0.6, "top_k": 20}
    template = ChatTemplate.find(tmp_path)
    assert template.render([{"role": "user", "content": "hi"}]) == "<|begin_of_text|>hi"
    assert template.render([{"role": "user", "content": "hi"}], [{"name": "look"}]) == "look"
    assert pieces(Tokenizer.load(tmp_path), Tokenizer.load(tmp_path).encode_prompt("a")) == "<|begin_of_text|> a"


def test_tokens_that_end_a_reply(tmp_path):
    def ends(metadata):
        return json.loads(texts(metadata)["generation_config.json"]).get("eos_token_id")

    first = len(of_bytes()["tokenizer.ggml.tokens"])
    assert ends(of_bytes()) is None
    assert ends(of_bytes(eos_token_id=3)) == 3
    assert ends(of_bytes(("<|user|>", 3), eos_token_id=3, eot_token_id=first)) == [3, first]
    assert ends(of_bytes(eos_token_id=3, eos_token_ids=[3, 7, 1 << 30])) == [3, 7]
    assert ends(of_pieces()) == 2  # what llama.cpp takes where nothing is said
    # With these a message ends by <|end|>, and the model goes on.
    harmony = of_bytes(("<|end|>", 3), ("<|return|>", 3), ("<|call|>", 3), eos_token_id=first + 1)
    assert ends(harmony) == [first + 1, first + 2]
    assert ends(of_bytes(("<|end|>", 3), eos_token_id=3)) == [3, first]


def test_a_model_without_templates_has_no_files_of_them():
    assert sorted(texts(of_pieces())) == ["generation_config.json", "tokenizer.json", "tokenizer_config.json"]
