import json
import threading

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from shardlm.errors import ShardlmError
from shardlm.tokenizer import Tokenizer, train_bpe

TEXTS = [f"def f_{i}(x):\n    return x + {i}  # naïve 日本語 🙂\n" for i in range(50)]
TOKENIZER = train_bpe(TEXTS, 400)
PLAIN_ADDED_TOKEN = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False)


def save_with(path, change) -> str:
    """A tokenizer.json whose content `change` has edited in place."""
    TOKENIZER.save(path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return str(path)


def rename_special(content, name):
    content["model"]["vocab"][name] = content["model"]["vocab"].pop("<|endoftext|>")
    content["added_tokens"][0]["content"] = name


def test_training_is_deterministic_and_honours_the_size():
    again = train_bpe(iter(TEXTS), 400)
    assert again.vocab_size == TOKENIZER.vocab_size <= 400
    assert again.fingerprint == TOKENIZER.fingerprint
    assert again.encode(TEXTS[0]) == TOKENIZER.encode(TEXTS[0])
    assert train_bpe(TEXTS, 300).fingerprint != TOKENIZER.fingerprint
    assert len(TOKENIZER.encode(TEXTS[7])) < len(TEXTS[7].encode()) / 3


@settings(deadline=None)
@given(st.text())
def test_every_text_decodes_to_itself(text):
    ids = TOKENIZER.encode(text, parse_special=False)
    assert TOKENIZER.decode(ids) == text
    assert TOKENIZER.encode_batch([text, "x"], parse_special=False)[0] == ids


@settings(deadline=None)
@given(st.text(alphabet="aé日🙂\n \u200d👩🏽"))
def test_streamed_pieces_concatenate_to_the_whole(text):
    ids = TOKENIZER.encode(text)
    stream = TOKENIZER.stream()
    pieces = [stream.step(token) for token in ids]
    assert "".join(pieces) + stream.finish() == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_stream_cut_inside_a_character_shows_what_decode_shows():
    ids = TOKENIZER.encode("a🙃", parse_special=False)[:-1]
    stream = TOKENIZER.stream()
    assert "".join(stream.step(token) for token in ids) + stream.finish() == TOKENIZER.decode(ids) == "a\ufffd"
    assert stream.finish() == ""


def byte_fallback_tokenizer() -> Tokenizer:
    """As Llama 2 and Gemma: words, and tokens of one byte for what is in no word."""
    vocab = {token: i for i, token in enumerate(["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁the", "日"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return Tokenizer(backend)


def test_a_stream_goes_on_when_invalid_bytes_spoil_valid_ones():
    tokenizer = byte_fallback_tokenizer()
    ids = [1 + ord("A"), 1 + 0xE6, 258, 1 + ord("\n"), 259]
    assert tokenizer.decode(ids) == "\ufffd\ufffd the\n日"  # "A" is gone
    stream = tokenizer.stream()
    assert [stream.step(token) for token in ids] == ["A", "", "\ufffd the", "\n", "日"]


@settings(deadline=None)
@given(st.lists(st.integers(1, 259) | st.sampled_from([1 + b for b in "é日🙂".encode()] + [257, 258, 259])))
def test_streams_of_arbitrary_bytes_lose_no_word(ids):
    tokenizer = byte_fallback_tokenizer()
    stream = tokenizer.stream()
    text = "".join(stream.step(token) for token in ids) + stream.finish()
    assert text.count("日") >= ids.count(259) and text.count("the") >= ids.count(258)
    if "\ufffd" not in tokenizer.decode(ids):
        assert text == tokenizer.decode(ids)


def test_special_tokens_are_read_in_prompts_and_spelt_out_in_documents():
    end = TOKENIZER.end_of_document_id
    assert TOKENIZER.encode("a<|endoftext|>").count(end) == 1
    assert TOKENIZER.encode("a<|endoftext|>", parse_special=False).count(end) == 0
    assert TOKENIZER.decode([end]) == "" and TOKENIZER.decode([end], skip_special=False) == "<|endoftext|>"


@pytest.mark.parametrize("read", ["encode", "encode_prompt"])
def test_half_a_character_is_refused(read):
    with pytest.raises(ShardlmError, match=r"holds '\\ud83d', half of a surrogate pair"):
        getattr(TOKENIZER, read)("a\ud83d b")


def test_saving_and_loading_keeps_the_ids(tmp_path):
    TOKENIZER.save(tmp_path / "deep" / "tokenizer.json")
    for path in (tmp_path / "deep" / "tokenizer.json", tmp_path / "deep"):
        loaded = Tokenizer.load(path)
        assert loaded.fingerprint == TOKENIZER.fingerprint
        assert loaded.end_of_document_id == TOKENIZER.end_of_document_id
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["tokenizer.json"]


def test_truncation_in_the_file_does_not_shorten_documents(tmp_path):
    truncation = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    path = save_with(tmp_path / "t.json", lambda content: content.update(truncation=truncation))
    assert Tokenizer.load(path).encode(TEXTS[0]) == TOKENIZER.encode(TEXTS[0])


@pytest.mark.parametrize("name", ["</s>", "<|end_of_text|>", "<eos>"])
def test_end_of_document_is_found_by_its_usual_names(tmp_path, name):
    path = save_with(tmp_path / "t.json", lambda content: rename_special(content, name))
    assert Tokenizer.load(path).end_of_document_id == TOKENIZER.end_of_document_id


def test_vocab_size_covers_the_highest_id(tmp_path):
    extra = {"id": 1000, "content": "<far>", "special": True, **PLAIN_ADDED_TOKEN}
    path = save_with(tmp_path / "t.json", lambda content: content["added_tokens"].append(extra))
    loaded = Tokenizer.load(path)
    assert loaded.vocab_size > max(loaded.encode("<far> a"))


def test_a_tokenizer_without_end_of_document_is_refused(tmp_path):
    path = save_with(tmp_path / "t.json", lambda content: rename_special(content, "<odd>"))
    with pytest.raises(ShardlmError, match=r"no end-of-document token.*</s>.*special tokens: <odd>.*Add one"):
        _ = Tokenizer.load(path).end_of_document_id


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ShardlmError, match=r"no tokenizer at .*nope.json.*bpe:4096"):
        Tokenizer.load(tmp_path / "nope.json")
    with pytest.raises(ShardlmError, match=r"no tokenizer in .*: it needs tokenizer.json, .*Put the model's own"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", ["", "{}", '{"model": {"type": "Unknown"}}', "hello"])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path, content):
    (tmp_path / "t.json").write_text(content)
    with pytest.raises(ShardlmError, match=r"t.json is not a tokenizer"):
        Tokenizer.load(tmp_path / "t.json")


def test_a_vocabulary_without_room_for_the_bytes_is_refused():
    with pytest.raises(ShardlmError, match=r"vocabulary 100 is too small: it needs at least 257.*bpe:257"):
        train_bpe(TEXTS, 100)


def test_others_go_on_while_a_long_prompt_is_read():
    """A server's event loop shares Python's lock with the thread that reads it."""
    tokenizer, ticks, over = train_bpe(["a b c " * 50], 300), [0], threading.Event()

    def tick():
        while not over.wait(0.001):
            ticks[0] += 1

    other = threading.Thread(target=tick, daemon=True)
    other.start()
    tokenizer.encode_prompt("a b c " * 100_000)
    ticked = ticks[0]
    over.set()
    other.join()
    assert ticked > 5  # of up to 1,000 a second; with the lock held one, before it was taken
