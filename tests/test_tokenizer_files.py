"""Tokenizers of folders without a tokenizer.json: ids as sentencepiece, tiktoken and transformers give them, and what is
said where files lack, are damaged or disagree."""

import json
import pathlib
import shutil

import pytest
import tokenizer_cases
from tokenizer_cases import CASES, FILES, folder_of, token

from shardlm import tokenizer_files
from shardlm.errors import ShardlmError
from shardlm.tokenizer import Tokenizer, file_of
from shardlm.tokenizer_files import protobuf

TEXTS = json.loads((FILES / "texts.json").read_text())
EXPECTED = json.loads((FILES / "expected.json").read_text())
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
