"""Tokenizers of folders without a tokenizer.json: ids as sentencepiece, tiktoken and transformers give them, and what
is said where files lack, are damaged or disagree."""

import json
import pathlib
import shutil
import struct
import tempfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_cases import CASES, FILES, folder_of, token

from shardlm import tokenizer_files
from shardlm.chat import special_tokens
from shardlm.errors import ShardlmError
from shardlm.tokenizer import Tokenizer, file_of
from shardlm.tokenizer_files import protobuf

TEXTS = json.loads((FILES / "texts.json").read_text())
EXPECTED = json.loads((FILES / "expected.json").read_text())
PIECES = (FILES / "bpe.model").read_bytes()
# A text that is one token's name alone is that token, of a file with pieces of the user's (gemma.model).
NAMES_ALONE = {"gemma": ("<unk>",)}


@pytest.mark.parametrize("name", CASES)
def test_ids_are_those_of_the_library_that_the_files_are_of(name, tmp_path):
    tokenizer, expected = Tokenizer.load(folder_of(name, tmp_path)), EXPECTED[name]
    calls = {
        "spelt": lambda text: tokenizer.encode(text, parse_special=False),
        "read": tokenizer.encode,
        "prompts": tokenizer.encode_prompt,
    }
    for kind, call in calls.items():
        for text, ids in zip(TEXTS, expected.get(kind, [[]] * len(TEXTS)), strict=True):
            if kind in expected and text not in NAMES_ALONE.get(name, ()):
                assert call(text) == ids, (kind, text)
    for kind, whole in (("decoded", "spelt"), ("decoded_whole", "read")):
        for ids, text in zip(expected.get(whole, []), expected.get(kind, []), strict=True):
            assert text is None or tokenizer.decode(ids, skip_special=False) == text, (kind, text)


def test_special_tokens_are_those_that_the_files_name(tmp_path):
    chat = Tokenizer.load(folder_of("llama_chat", tmp_path / "chat"))
    assert chat.special_ids == {"<unk>": 0, "<s>": 1, "</s>": 2, "<|im_start|>": 420, "<|im_end|>": 421}
    assert chat.decode(chat.encode("<|im_start|>a<new>b"), skip_special=True) == "a<new>b"
    assert special_tokens(tmp_path / "chat") == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    listed = folder_of("gpt2", tmp_path / "listed")
    change(listed, added_tokens_decoder={"420": token("<end>", special=False)}, eos_token="<end>")
    assert Tokenizer.load(listed).special_ids["<end>"] == 420  # named, whatever the list says
    opt = Tokenizer.load(folder_of("opt", tmp_path / "opt"))
    assert opt.special_ids == {"</s>": 420, "<pad>": 421} and opt.end_of_document_id == 420
    gemma = Tokenizer.load(folder_of("gemma", tmp_path / "gemma"))
    turns = [gemma.vocabulary[name] for name in ("<start_of_turn>", "<end_of_turn>")]
    assert set(gemma.special_ids.values()) == {0, 1, 2, 3, *turns}
    assert gemma.encode_prompt("a")[0] == gemma.vocabulary["<bos>"] == 2
    kimi = Tokenizer.load(folder_of("kimi", tmp_path / "kimi"))
    assert kimi.encode("a[BOS]<|im_end|><|reserved_token_675|>")[1:] == [420, 426, 675] and kimi.vocab_size == 676
    qwen = Tokenizer.load(folder_of("qwen", tmp_path / "qwen"))
    assert qwen.encode("<|endoftext|><|extra_204|>") == [420, 627] and qwen.vocab_size == 628
    tekken = Tokenizer.load(folder_of("tekken", tmp_path / "tekken"))
    assert tekken.encode_prompt("[INST]<SPECIAL_19>") == [1, 3, 19] and tekken.vocab_size == 438
    assert "<s>" in tekken.special_ids and tekken.end_of_document_id == 2
    llama3 = Tokenizer.load(folder_of("llama3", tmp_path / "llama3"))
    assert llama3.encode_prompt("a") == [420, *llama3.encode("a")]


def change(folder, name="tokenizer_config.json", **changes):
    file = folder / name
    file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | changes))


def test_added_tokens_have_the_ids_that_the_files_say(tmp_path):
    """Also with gaps, as the model's embedding has rows for them; and names of their own for pieces."""
    folder = folder_of("gpt2", tmp_path / "gap")
    change(folder, added_tokens_decoder={"430": token("<far>"), "425": token("<near>", rstrip=True)})
    found = Tokenizer.load(folder)
    assert found.encode("<far><near>  a") == [430, 425, found.encode("a")[0]]
    assert found.vocab_size == 432  # with <|endoftext|>, which none of the files gives an id
    folder = folder_of("llama", tmp_path / "renamed")
    old = Tokenizer.load(folder).texts([300])[0]
    change(folder, added_tokens_decoder={"300": token("<|im_start|>")})
    found = Tokenizer.load(folder)
    assert found.encode("a<|im_start|>")[-1] == 300 and 300 not in found.encode(old) and found.vocab_size == 420


def test_what_follows_an_added_token_begins_with_a_space_unless_said_otherwise(tmp_path):
    for legacy, first in ((None, "▁a"), (True, "▁a"), (False, "a")):
        folder = folder_of("llama", tmp_path / str(legacy))
        change(folder, legacy=legacy)
        found = Tokenizer.load(folder)
        assert found.encode("</s>a") == [2, found.vocabulary[first]]


def test_tokenizer_json_goes_first_and_changes_are_seen(tmp_path):
    folder = folder_of("gpt2", tmp_path)
    before = Tokenizer.load(folder)
    change(folder, add_bos_token=True)
    assert Tokenizer.load(folder).encode_prompt("a") != before.encode_prompt("a")
    other = Tokenizer.load(folder_of("llama", tmp_path / "other"))
    other.save(folder / "tokenizer.json")
    assert Tokenizer.load(folder).fingerprint == other.fingerprint


def test_the_file_of_a_folder(tmp_path, monkeypatch):
    """Where it has none, one in the user's cache, made once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = folder_of("llama", tmp_path / "f")
    files = [file_of(folder), file_of(folder)]
    assert files[0] == files[1] and files[0].parent == tmp_path / "cache" / "shardlm" / "tokenizers"
    assert Tokenizer.load(files[0]).fingerprint == Tokenizer.load(folder).fingerprint
    Tokenizer.load(folder).save(folder / "tokenizer.json")
    assert file_of(folder) == file_of(folder / "tokenizer.json") == folder / "tokenizer.json"
    monkeypatch.setenv("XDG_CACHE_HOME", str(files[0]))
    with pytest.raises(ShardlmError, match=r"Cannot write .*tokenizers.*A file is where a folder belongs"):
        file_of(folder_of("gpt2", tmp_path / "g"))


def without(*names):
    return lambda folder: [(folder / name).unlink() for name in names]


def written(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def told(**changes):
    return lambda folder: change(folder, **changes)


def told_in(name, **changes):
    return lambda folder: change(folder, name, **changes)


def replaced(name, old, new):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes().replace(old, new, 1))


SAVE = r"\. AutoTokenizer.from_pretrained\(FOLDER\).save_pretrained\(FOLDER\) of transformers writes tokenizer.json"


@pytest.mark.parametrize(
    "case,spoil,message",
    [
        ("gpt2", without("vocab.json", "merges.txt"), "no tokenizer in .*: it needs tokenizer.json, vocab.json with"),
        ("gpt2", without("vocab.json"), r"no tokenizer in .*tiktoken \(there is merges.txt and no vocab.json\). Put"),
        ("gpt2", without("merges.txt"), r"\(there is vocab.json and no merges.txt\). Put the model's own there"),
        ("gpt2", told(tokenizer_class="CLIPTokenizer"), f"tokenizer_class='CLIPTokenizer', and how .*GPT2.*{SAVE}"),
        ("gpt2", told(tokenizer_class=None, model="x"), None),  # model_type says it
        ("gpt2", written("vocab.json", b"{"), "vocab.json is not JSON .*; download it again"),
        ("gpt2", written("vocab.json", b'{"a": 0, "b": 0}'), "vocab.json is no object with an id of its own for each"),
        ("gpt2", written("vocab.json", b"[]"), "vocab.json is no object with an id"),
        ("gpt2", written("merges.txt", b"#version\nh e\nq zz\n"), "merges.txt, line 3, merges 'q' and 'zz', and not"),
        ("gpt2", written("merges.txt", b"\xff"), r"merges.txt cannot be read \(.*utf-8"),
        ("gpt2", written("tokenizer_config.json", b"{"), "tokenizer_config.json is not JSON"),
        ("gpt2", written("tokenizer_config.json", b"[]"), "tokenizer_config.json holds a JSON list and not an object"),
        ("gpt2", written("added_tokens.json", b'{"a": "b"}'), "added_tokens.json: it is no object of ids by tokens"),
        ("gpt2", told(added_tokens_decoder={"x": {}}), "added_tokens_decoder is no object of tokens by ids; download"),
        ("gpt2", told(added_tokens_decoder={"430": {"id": 3}}), "added_tokens_decoder is no object of tokens by ids"),
        ("gpt2", told(added_tokens_decoder={"7": token("<x>")}), f"'<x>' is token 7 by .*and 7 is '.'.*{SAVE}"),
        ("gpt2", told(added_tokens_decoder={"500": token("in")}), "'in' is token 500 by the files that name added"),
        ("gpt2", told(add_bos_token=True, bos_token=None), None),  # as transformers: none is added
        ("llama", written("tokenizer.model", b""), "tokenizer.model is no model of SentencePiece .*it has no pieces"),
        (
            "llama",
            written("tokenizer.model", b"\x0a\x05abc"),
            r"\(a field ends behind its message\); download it again",
        ),
        ("llama", written("tokenizer.model", b"version https://git-lfs"), "is a Git LFS pointer.*git lfs pull"),
        ("llama", lambda folder: shutil.copy(FILES / "word.model", folder / "tokenizer.model"), f"kind 'word'.*{SAVE}"),
        # In place of the file's own: a normalisation that is none, and an unknown piece that is not there.
        ("bpe", written("tokenizer.model", PIECES + b"\x1a\x05\x12\x03abc"), r"\(its table of normalisations is cut"),
        ("bpe", written("tokenizer.model", PIECES + b"\x12\x05\xc0\x02\xff\xff\x03"), "unknown piece, 65535, is none"),
        ("tekken", told_in("tekken.json", config={"pattern": "("}), "what the files of .* say is no tokenizer to the"),
        ("llama3", replaced("tokenizer.model", b" 7\n", b" x\n"), "line 8, is no token in base64 and its rank"),
        (
            "llama3",
            replaced("tokenizer.model", b" 419\n", b" 500\n"),
            "its 420 ranks leave gaps, or some byte has none",
        ),
        ("tekken", written("tekken.json", b"{"), r"tekken.json is no tokenizer of Mistral's \(Expecting.*download it"),
        ("tekken", told_in("tekken.json", config={}), r"is no tokenizer of Mistral's \('pattern'\); download it again"),
        # Hunyuan's, whose tokens behind the ranks are others than Qwen's.
        (
            "qwen",
            written("tokenizer_config.json", b'{"tokenizer_class": "HYTokenizer"}'),
            rf"qwen.tiktoken is of tokenizer_class='HYTokenizer', and how that cuts .* read of QWenTokenizer{SAVE}",
        ),
        ("qwen", written("tokenizer_config.json", b'{"tokenizer_class": "QWenTokenizer"}'), None),
        ("kimi", told(tokenizer_class="HYTokenizer"), r"tiktoken.model is of tokenizer_class='HYTokenizer', and how"),
        ("kimi", told(tokenizer_class="TikTokenTokenizer"), None),
        ("llama3", without("tokenizer_config.json"), f"names no special tokens, and tokenizer_config.json has.*{SAVE}"),
    ],
)
def test_what_is_wrong_is_named_with_its_remedy(tmp_path, case, spoil, message):
    folder = folder_of(case, tmp_path)
    spoil(folder)
    if message is None:
        assert Tokenizer.load(folder).encode("a")
        return
    with pytest.raises(ShardlmError, match=message):
        Tokenizer.load(folder)


def test_whether_a_folder_has_a_tokenizer(tmp_path):
    assert not tokenizer_files.is_here(tmp_path)
    for name in CASES:
        assert tokenizer_files.is_here(folder_of(name, tmp_path / name))


@settings(deadline=None, max_examples=40)
@given(st.integers(0, len(PIECES) - 1) | st.integers(len(PIECES) - 200, len(PIECES) - 1), st.binary(max_size=2))
def test_damaged_pieces_are_refused_or_read(at, change):
    with tempfile.TemporaryDirectory() as home:
        folder = pathlib.Path(home)
        (folder / "tokenizer.model").write_bytes(PIECES[:at] + change + PIECES[at + 1 :])
        try:
            Tokenizer.load(folder).encode("def f(x):")
        except ShardlmError as error:
            assert home in str(error)


def test_messages_of_protocol_buffers():
    message = b"\x08\x96\x01" + b"\x12\x03abc" + b"\x1d" + struct.pack("<f", 1.5) + b"\x08\x01" + b"\x21" + bytes(8)
    found = protobuf.fields(message)
    assert found == {1: [150, 1], 2: [b"abc"], 3: [struct.pack("<f", 1.5)], 4: [bytes(8)]}
    assert protobuf.number(found[1], 7) == 1 and protobuf.number(None, 7) == 7
    assert protobuf.number(protobuf.fields(b"\x08" + b"\xff" * 9 + b"\x01")[1], 0) == -1
    assert protobuf.real(found[3]) == 1.5 and protobuf.content(found[2]) == b"abc"
    for damaged in (b"\x08", b"\x08" + b"\xff" * 11, b"\x12\x05abc", b"\x03", b"\x00\x01", b"\x1d\x00"):
        with pytest.raises(ValueError):
            protobuf.fields(damaged)
