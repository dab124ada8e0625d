"""The bound on a text's tokens holds for every text, and is worth something."""

import json
import sys
import unicodedata

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from shardlm.token_bound import MOST_COMPOSED, TokenBound
from shardlm.tokenizer import Tokenizer, train_bpe

OWN = train_bpe(["the quick brown fox é日      \n" * 8] * 8, 400).to_json()


def changed(**parts) -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps({**json.loads(OWN), **parts})))


def falling_back(**parts) -> Tokenizer:
    """As Llama 2 and Gemma: characters, and bytes for those that are not known."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {token: 256 + i for i, token in enumerate(["▁", "t", "h", "e", "th", "the", "▁the", "é"])}
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    made = tokenizers.Tokenizer(models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.ByteFallback()
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps({**json.loads(made.to_str()), **parts})))


def with_token(**options) -> Tokenizer:
    made = tokenizers.Tokenizer.from_str(OWN)
    made.add_special_tokens([tokenizers.AddedToken("<|e|>", **options)])
    return Tokenizer(made)


def form(normalizer) -> dict:
    made = tokenizers.Tokenizer(models.BPE())
    made.normalizer = normalizer
    return json.loads(made.to_str())["normalizer"]


def cut(pre_tokenizer) -> dict:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizer, pre_tokenizers.ByteLevel(use_regex=False)])
    return json.loads(made.to_str())["pre_tokenizer"]


BOUND = {
    "bytes": changed(),
    "composed": changed(normalizer=form(normalizers.NFC())),
    "composed further": changed(normalizer=form(normalizers.NFKC())),
    "replaced": changed(normalizer=form(normalizers.Replace("日", " "))),
    "characters": falling_back(),
    "takes spaces": with_token(rstrip=True, lstrip=True),
}
UNBOUND = {
    "strips": changed(normalizer=form(normalizers.Strip())),
    "shortens": changed(normalizer=form(normalizers.Replace("aaaa", ""))),
    "by a pattern": changed(normalizer=form(normalizers.Replace(Regex("a+"), "b"))),
    "removes": changed(pre_tokenizer=cut(pre_tokenizers.Split(" ", "removed"))),
    "drops space": changed(pre_tokenizer=cut(pre_tokenizers.WhitespaceSplit())),
    "unknown": changed(pre_tokenizer=None),
    "no bytes": falling_back(model={**json.loads(falling_back().to_json())["model"], "byte_fallback": False}),
}
TEXT = st.text(st.sampled_from("the quick\n \u2003aé日ᄀ\uac00\u1161\u11a8\u0301\u0313\u0300\u0345αω🙂ﬁ"), max_size=60)


@pytest.mark.parametrize("name", BOUND)
@settings(deadline=None, max_examples=60)
@given(text=TEXT, times=st.sampled_from([1, 1, 40]), around=st.booleans())
def test_no_text_has_fewer_tokens(name, text, times, around):
    tokenizer = BOUND[name]
    text = text * times + "<|e|>" + " " * 100 * around
    assert tokenizer.least_tokens(text, -1) <= len(tokenizer.encode(text))


def test_it_is_worth_something():
    for name in BOUND:
        text = "the quick brown fox " * 500
        assert len(BOUND[name].encode(text)) / 20 < BOUND[name].least_tokens(text, 10), name
    assert BOUND["bytes"].least_tokens("a" * 100, 1000) == 0  # not looked at
    assert BOUND["bytes"].least_tokens("日" * 1000, 10) >= 3000 / TokenBound.of(OWN).longest


def test_where_text_may_vanish_nothing_is_said():
    for name, tokenizer in UNBOUND.items():
        assert tokenizer.least_tokens("the quick " * 1000, 1) == 0, name


def test_no_more_characters_become_one():
    assert max(len(unicodedata.normalize("NFD", chr(c))) for c in range(sys.maxunicode + 1)) == MOST_COMPOSED
