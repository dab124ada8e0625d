"""Answers that are wanted or not as training data: beside whose answer each stands, its label, and what is refused."""

import json

import pytest
from test_chats import TEMPLATE, TOKENIZER

from shardlm.data.chats import write_lines
from shardlm.data.corpus import find_sources
from shardlm.data.labelled import labelled, with_others
from shardlm.data.packing import DESIRABLE, make_rows
from shardlm.data.rendering import Chats
from shardlm.errors import ShardlmError

LINES = [
    {"prompt": "what is", "completion": "that", "label": True},
    {"prompt": "what is", "completion": "it is", "label": False},
    {"prompt": [{"role": "user", "content": "this"}], "completion": "what", "label": True},
    {"prompt": "it", "completion": [{"role": "assistant", "content": "this"}], "label": False},
]


def written(directory, lines):
    path = directory / "answers.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    chats = Chats(TEMPLATE, TOKENIZER)
    return write_lines(find_sources([str(path)]), chats, directory / "shards", labelled, among=with_others)


@pytest.mark.parametrize("seq_len", [24, 64])
def test_answers_stand_beside_those_of_other_prompts(tmp_path, seq_len):
    rows = make_rows(written(tmp_path, LINES), seq_len, "labelled")
    batch, found = rows.read(range(len(rows))), []
    for row in range(len(rows)):
        for segment in range(1, batch["segment_ids"][row].max() + 1):
            at = batch["segment_ids"][row] == segment
            learned = batch["targets"][row][at & (batch["loss_mask"][row] > 0)]
            [label] = set(batch[DESIRABLE][row][at].tolist())
            found.append((TOKENIZER.decode(learned.tolist(), skip_special=False), bool(label)))
    both = [(own, other) for own, other in zip(found[::2], found[1::2], strict=True)]
    expected = [("that", True, "what"), ("it is", False, "what"), ("what", True, "it is"), ("this", False, "what")]
    assert sorted(both) == sorted(((f"{own}</s>", label), (f"{other}</s>", False)) for own, label, other in expected)


def test_other_images_ask_something_else():
    """As where every prompt is "what is this" of an image of the line."""
    lines = [LINES[0] | {"images": [f"{i}.png"], "completion": f"{i}"} for i in (1, 1, 2)]
    found = [json.loads(line[0]) for line in with_others(iter([(json.dumps(line).encode(), "here") for line in lines]))]
    assert [one["other"] for one in found] == ["2", "2", "1"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"prompt": "a", "completion": "b"}], "has the keys prompt, completion; a line is"),
        ([LINES[0] | {"label": 1}], "label is 1; it is true or false"),
        (LINES[:2], "all lines have the same prompt"),
        ([LINES[0], LINES[2] | {"prompt": []}], "behind a prompt comes"),
    ],
)
def test_lines_that_are_no_answers(tmp_path, lines, message):
    with pytest.raises(ShardlmError, match=message):
        written(tmp_path, lines)
