"""Bodies with so many values that reading them would hold up everything else."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlm.serve.api import values
from shardlm.serve.api.errors import ApiError
from shardlm.serve.api.protocol import ChatRequest, parse
from shardlm.serve.api.values import MOST_VALUES, too_many
from shardlm.serve.router.prompt import Hints, hints

TEXTS = st.text(st.sampled_from('a"\\[]{}:,é\n'))
JSON = st.recursive(st.none() | st.integers() | TEXTS, lambda of: st.lists(of) | st.dictionaries(TEXTS, of))


def counted(value):
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(counted, value.values()))
    return 1 + sum(map(counted, value)) if isinstance(value, list) else 0


@given(JSON, st.booleans())
def test_marks_within_texts_are_none(value, ascii):
    body = json.dumps(value, ensure_ascii=ascii).encode()
    with pytest.MonkeyPatch.context() as patch:
        for most in (counted(value) - 1, counted(value)):
            patch.setattr(values, "MOST_VALUES", most)
            assert too_many(body) == (most < counted(value))


@pytest.mark.parametrize("one", [b"{}", b"[]", b'{"role":"user","content":""}'])
def test_ten_million_values_are_refused_at_once(one):
    """By the server, of whatever field they are, and a router gives them to some server without a look."""
    for name in (b"messages", b"unknown"):
        body = b'{"model":"m","%b":[%b]}' % (name, b",".join([one] * (30_000_000 // len(one))))
        begun = time.process_time()
        with pytest.raises(ApiError, match=f"more than {MOST_VALUES} objects, lists and fields") as info:
            parse(body, ChatRequest)
        assert (info.value.status, info.value.code) == (413, "request_too_large")
        assert hints(body) == Hints()
        assert time.process_time() - begun < 3  # 0.2 s, and 50 to 80 where they were read


def test_a_text_of_as_many_marks_is_one_value():
    text = 'if (a[0]) { b = {"c": [1, 2]} }\\\n' * 2**17
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
    assert parse(body, ChatRequest)[0].messages[0]["content"] == text and hints(body).blocks
