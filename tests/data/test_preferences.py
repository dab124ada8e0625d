"""Preferences as training data: what is learned of a pair, how pairs stand in rows, and what is refused."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_chats import SOURCE, TEMPLATE, TOKENIZER

from shardlm.chat import ChatTemplate
from shardlm.data.chats import write_lines
from shardlm.data.config import DataConfig
from shardlm.data.corpus import find_sources
from shardlm.data.loader import Loader
from shardlm.data.packing import PADDING_ROW, make_rows
from shardlm.data.preferences import pair
from shardlm.data.prepare import prepare
from shardlm.data.rendering import Chats
from shardlm.data.shards import TokenShards
from shardlm.errors import ShardlmError


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


BEFORE = [user("what"), assistant("it is"), user("this")]
PAIRS = [
    {"prompt": "what is", "chosen": "that", "rejected": "it is that"},
    {"prompt": [{"role": "system", "content": "is"}, *BEFORE], "chosen": [assistant("this")], "rejected": "what"},
    {"prompt": "what", "chosen": [user("what"), assistant("it")], "rejected": [user("what"), assistant("is")]},
    {"chosen": [*BEFORE, assistant("it is")], "rejected": [*BEFORE, assistant("is"), user("it"), assistant("that")]},
]
ANSWERS = [
    ("that</s>", "it is that</s>"),
    ("this</s>", "what</s>"),
    ("it</s>", "is</s>"),
    ("it is</s>", "is</s>that</s>"),
]
PROMPTS = ["<user>what is</s><assistant>", "<system>is</s><user>what</s><assistant>it is</s><user>this</s><assistant>"]


def written(path, lines, directory):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return write_lines(find_sources([str(path)]), Chats(TEMPLATE, TOKENIZER), directory, pair)


def text(tokens) -> str:
    return TOKENIZER.decode(np.asarray(tokens).tolist(), skip_special=False)


def pairs_of(batch):
    """(row, prompt and learned answer of the chosen one, of the rejected one) of each pair."""
    for row in range(len(batch["tokens"])):
        found = []
        for segment in range(1, batch["segment_ids"][row].max(initial=0) + 1):
            at = batch["segment_ids"][row] == segment
            learned = batch["loss_mask"][row][at] > 0
            targets, first = batch["targets"][row][at], batch["tokens"][row][at][:1]
            np.testing.assert_array_equal(batch["positions"][row][at], np.arange(at.sum()))
            before = int(np.flatnonzero(learned)[0])
            found.append((text(np.concatenate([first, targets[:before]])), text(targets[learned])))
        assert len(found) % 2 == 0
        yield from ((row, *pair) for pair in zip(found[::2], found[1::2], strict=True))


@pytest.mark.parametrize("seq_len", [64, 256])
def test_a_pair_stands_in_one_row_and_only_answers_are_learned(tmp_path, seq_len):
    shards = written(tmp_path / "pairs.jsonl", PAIRS, tmp_path / "shards")
    shards.verify()
    rows = make_rows(shards, seq_len, "pairs")
    batch = rows.read([*range(len(rows)), PADDING_ROW])
    found = list(pairs_of(batch))
    assert sorted((chosen[1], rejected[1]) for _, chosen, rejected in found) == sorted(ANSWERS)
    prompts = {chosen[0] for _, chosen, rejected in found if chosen[0] == rejected[0]}
    assert len(prompts) == 4 and prompts >= set(PROMPTS)
    assert (len(rows) == 1) == (seq_len == 256) and 0 < rows.padding_fraction < 1
    assert not any(a[-1].any() for a in batch.values())


def test_pairs_of_sources_with_weights_stay_whole(tmp_path):
    lines = {"one": PAIRS[:1], "other": PAIRS[1:]}
    sources = {name: written(tmp_path / f"{name}.jsonl", own, tmp_path / name) for name, own in lines.items()}
    whole = TokenShards.join([*sources.values()])
    how = {"seq_len": 64, "global_batch": 2, "seed": 0, "packing": "pairs", "sources": sources, "weights": (1.0, 1.0)}
    batches = itertools.islice(Loader(whole, **how), 8)
    found = [(chosen[1], rejected[1]) for batch in batches for _, chosen, rejected in pairs_of(batch)]
    assert set(found) == set(ANSWERS) and found.count(ANSWERS[0]) > len(found) / 4


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12),
    more=st.integers(0, 9),
    most=st.integers(1, 3),
)
def test_every_pair_once_and_whole(lengths, more, most):
    class Shards:  # document d is the token d, but for its last token
        directories, partly_scored, image_token = (), True, None
        num_documents = 2 * len(lengths)
        stream = np.concatenate([np.full(n + 1, d) for d, n in enumerate(np.array(lengths).reshape(-1))])

        def document_offsets(self):
            return np.cumsum([0, *(np.array(lengths).reshape(-1) + 1)])

        def window(self, start, length):
            return self.stream[start : start + length]

        def scored(self, start, length):
            return np.ones(len(self.window(start, length)), bool)

    longest = max(map(sum, lengths))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardlm.data.packing.MAX_PAIRS", most)
        rows = make_rows(Shards(), longest + more, "pairs")
    batch = rows.read(range(len(rows)))
    assert batch["segment_ids"].max() <= 2 * most
    seen = []
    for tokens, segments in zip(batch["tokens"], batch["segment_ids"], strict=True):
        for segment in range(1, segments.max() + 1):
            document = set(tokens[segments == segment].tolist())
            assert len(document) == 1 and (segments == segment).sum() == np.array(lengths).reshape(-1)[min(document)]
            assert min(document) % 2 == (segment - 1) % 2 and (segment % 2 or seen[-1] == min(document) - 1)
            seen += document
    assert sorted(seen) == list(range(2 * len(lengths)))
    if longest > 2:
        with pytest.raises(
            ShardlmError,
            match=rf"of {len(lengths)} pairs are longer than a row of {longest - 1} .* longest is {longest}",
        ):
            make_rows(Shards(), longest - 1, "pairs")


@pytest.mark.parametrize(
    "line,message",
    [
        ([], r"is not an object; a line is"),
        ({"prompt": "a", "chosen": "b"}, r"has the keys prompt, chosen; a line is"),
        ({"chosen": "a", "rejected": "b"}, "chosen is a text and there is no prompt"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "are the same"),
        ({"prompt": "a", "chosen": [], "rejected": "b"}, "chosen has no messages"),
        ({"prompt": "a", "chosen": [{"role": 3}], "rejected": "b"}, r"\(chosen\): message 0 is .* needs a role"),
        ({"prompt": [{}], "chosen": "a", "rejected": "b"}, r"\(prompt\): message 0 is"),
        ({"chosen": [user("a"), assistant("b")], "rejected": [user("b"), assistant("b")]}, "begin with different"),
        ({"chosen": [user("a")], "rejected": [user("a"), assistant("b")]}, "message 1 of chosen is missing"),
        (
            {"chosen": [*BEFORE[:2], user("a"), assistant("b")], "rejected": [*BEFORE, assistant("b")]},
            "message 2 of chosen is from 'user'; behind the prompt",
        ),
    ],
)
def test_a_line_that_is_no_preference_is_named(tmp_path, line, message):
    with pytest.raises(ShardlmError, match=rf"pairs\.jsonl:2.*{message}"):
        written(tmp_path / "pairs.jsonl", [PAIRS[0], line], tmp_path / "shards")
    assert not list((tmp_path / "shards").glob("*"))


def test_a_template_that_rewrites_the_prompt_is_refused():
    marked = (
        "{{ messages | length }}{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    with pytest.raises(ShardlmError, match=r"a:1 \(chosen\): T rewrites the prompt once an answer follows it"):
        pair(PAIRS[0], "a:1", Chats(ChatTemplate(marked, where="T"), TOKENIZER))


def test_prepared_apart_from_chats_and_never_without_a_template(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(PAIRS[0] | {"messages": [user("what"), assistant("it")]}) + "\n")
    TOKENIZER.save(tmp_path / "tokenizer.json")
    (tmp_path / "template.jinja").write_text(SOURCE)
    names = (str(path),), (str(path),), str(tmp_path)
    options = {"cache_dir": str(tmp_path / "cache")}
    chats = prepare(DataConfig(*names, str(tmp_path / "template.jinja"), **options)).train
    pairs = prepare(DataConfig(*names, str(tmp_path / "template.jinja"), packing="pairs", **options)).train
    assert (chats.num_documents, pairs.num_documents) == (1, 2)
    with pytest.raises(ShardlmError, match="holds 1 documents that are no pairs"):
        make_rows(chats, 64, "pairs")
    with pytest.raises(ShardlmError, match=r"data\.packing=pairs without data\.chat_template"):
        prepare(DataConfig(*names, packing="pairs", **options))
