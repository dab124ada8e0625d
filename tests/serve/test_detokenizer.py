"""Text sent as tokens come is the whole text, cut where the first stop string appears."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlm.errors import ShardlmError
from shardlm.serve.detokenizer import Detokenizer
from shardlm.tokenizer import train_bpe

TOKENIZER = train_bpe(["abab aba abb ababab é日🙂 ab\n" * 4] * 4, 275)
END = TOKENIZER.end_of_document_id
# Words of a and b, halves of characters, bytes that are never valid, special tokens.
TOKENS = sorted({*TOKENIZER.encode("ab aba\nabb abababb"), *TOKENIZER.encode("éèü日本🙂🙃 a"), END})
STOPS = st.lists(st.text("ab é日🙂\n\ufffd", min_size=1, max_size=5) | st.just("<|end"), max_size=3)


def naive(ids, stops, include_stop, min_tokens, skip_special):
    """(text, stop, tokens kept): decode everything, then cut."""
    whole = TOKENIZER.decode(ids, skip_special=skip_special)
    stream = TOKENIZER.stream(skip_special=skip_special)
    lengths = [0]  # characters complete after so many tokens
    for token in ids:
        lengths.append(lengths[-1] + len(stream.step(token)))
    lengths[-1] = len(whole)
    too_early = lengths[min(min_tokens, len(ids) - 1)] if min_tokens < len(ids) else len(whole)
    ends = [
        (at + len(stop), at, stop)
        for stop in stops
        for at in range(len(whole))
        if whole.startswith(stop, at) and at + len(stop) > too_early
    ]
    if not ends:
        return whole, None, len(ids)
    end, at, stop = min(ends)
    return whole[: end if include_stop else at], stop, next(n for n, length in enumerate(lengths) if length >= end)


@settings(deadline=None, max_examples=600)
@given(
    ids=st.lists(st.sampled_from(TOKENS), min_size=1, max_size=30),
    stops=STOPS,
    include_stop=st.booleans(),
    min_tokens=st.sampled_from([0, 0, 1, 4]),
    skip_special=st.booleans(),
    chunk=st.integers(1, 9),
    data=st.data(),
)
def test_what_is_sent_is_the_text_cut_at_the_first_stop(
    ids, stops, include_stop, min_tokens, skip_special, chunk, data
):
    whole = TOKENIZER.decode(ids, skip_special=skip_special)
    if whole and data.draw(st.booleans()):  # a stop string that is there
        at = data.draw(st.integers(0, len(whole) - 1))
        stops = [*stops, whole[at : at + data.draw(st.integers(1, 6))]]
    text, stop, kept = naive(ids, stops, include_stop, min_tokens, skip_special)
    detokenizer = Detokenizer(
        TOKENIZER, stop=stops, include_stop=include_stop, min_tokens=min_tokens, skip_special=skip_special
    )
    sent = ""
    for start in range(0, len(ids), chunk):
        sent += detokenizer.push(ids[start : start + chunk])
        assert text.startswith(sent)  # nothing is ever sent that would have to be taken back
        # Nothing is held back needlessly: what is missing of complete text is the beginning of a stop string.
        missing = "".join(detokenizer.pieces).removeprefix(sent)
        begins = not include_stop and any(s.startswith(missing) and s != missing for s in stops)
        assert detokenizer.stopped or not missing or begins
    sent += detokenizer.finish()
    assert (sent, detokenizer.stopped, detokenizer.num_tokens) == (text, stop, kept)
    assert len(detokenizer.pieces) == kept and "".join(detokenizer.pieces).startswith(text)
    assert detokenizer.finish() == "" and (stop is None or detokenizer.push(ids) == "")


def tokens_of(text: str) -> list[int]:
    """One token a byte."""
    return [token for char in text.encode() for token in TOKENIZER.encode(chr(char))]


@pytest.mark.parametrize(
    "stop,options,text,stopped,kept",
    [
        ([], {}, "aabaac b", None, 8),
        (["aac"], {}, "aab", "aac", 6),
        (["aac", "baac", "aacx"], {}, "aa", "baac", 6),  # two end together: the longest
        (["c b", "ac"], {}, "aaba", "ac", 6),  # the first that is complete
        (["aac"], {"include_stop": True}, "aabaac", "aac", 6),
        (["aa"], {"min_tokens": 1}, "", "aa", 2),
        (["aa"], {"min_tokens": 2}, "aab", "aa", 5),  # the first was complete with the second token
        (["aac"], {"min_tokens": 5}, "aab", "aac", 6),
        (["aac"], {"min_tokens": 6}, "aabaac b", None, 8),
        (["b", "x"], {"min_tokens": 7}, "aabaac ", "b", 8),
    ],
)
def test_stop_strings(stop, options, text, stopped, kept):
    detokenizer = Detokenizer(TOKENIZER, stop=stop, **options)
    sent = detokenizer.push(tokens_of("aabaac b")) + detokenizer.finish()
    assert (sent, detokenizer.stopped, detokenizer.num_tokens) == (text, stopped, kept)


def test_text_that_may_become_a_stop_string_waits():
    detokenizer = Detokenizer(TOKENIZER, stop=["aab", "ba"])
    assert [detokenizer.push([token]) for token in tokens_of("aaa a")] == ["", "", "a", "aa ", ""]
    assert detokenizer.finish() == "a"


def test_a_stop_string_may_begin_inside_one_that_was_too_early():
    detokenizer = Detokenizer(TOKENIZER, stop=["aa"], min_tokens=2)
    assert (detokenizer.push(tokens_of("aaab")), detokenizer.stopped, detokenizer.num_tokens) == ("a", "aa", 3)


def test_special_tokens_and_incomplete_characters():
    ids = [*tokens_of("a"), END, *TOKENIZER.encode("🙃", parse_special=False)[:-1]]
    shown = Detokenizer(TOKENIZER, skip_special=False)
    assert [shown.push([token]) for token in ids[:2]] == ["a", "<|endoftext|>"]
    hidden = Detokenizer(TOKENIZER)
    assert hidden.push(ids) == "a" and hidden.finish() == "\ufffd"
    assert hidden.pieces == ["a", *[""] * (len(ids) - 2), "\ufffd"]


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ShardlmError, match=r"stop=\['x', ''\] has an empty string.*leave it out"):
        Detokenizer(TOKENIZER, stop=["x", ""])
