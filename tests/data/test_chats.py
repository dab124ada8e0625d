"""Chats as training data: what is learned of a conversation, in rows of both packings, and what is refused."""

import json

import numpy as np
import pytest

from shardlm.chat import ChatTemplate
from shardlm.data.chats import conversation, template_of, write_lines
from shardlm.data.config import DataConfig
from shardlm.data.corpus import find_sources
from shardlm.data.packing import make_rows
from shardlm.data.prepare import prepare
from shardlm.data.rendering import Chats
from shardlm.errors import ShardlmError
from shardlm.tokenizer import train_bpe

SOURCE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TEMPLATE = ChatTemplate(SOURCE, where="the template")
TOKENIZER = train_bpe(["what is this </s> it is that <user><assistant><system>"] * 9, 290, ("</s>",))
CHATS = [
    {"messages": [{"role": "user", "content": "what"}, {"role": "assistant", "content": "it is"}]},
    {"prompt": "what is", "completion": "that"},
    {"conversations": [{"from": "human", "value": "this"}, {"from": "gpt", "value": "is"},
                       {"from": "human", "value": "what"}, {"from": "gpt", "value": "it is that"}]},
]  # fmt: skip
ANSWERS = ["it is</s>", "that</s>", "is</s>", "it is that</s>"]


@pytest.fixture
def chats(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(map(json.dumps, CHATS)) + "\n\n")
    return path


def shards(path, directory):
    return write_lines(find_sources([str(path)]), Chats(TEMPLATE, TOKENIZER), directory, conversation)


@pytest.mark.parametrize("packing,seq_len", [("cut", 16), ("whole", 64), ("whole", 9)])
def test_only_answers_are_learned(chats, tmp_path, packing, seq_len):
    made = shards(chats, tmp_path / "shards")
    made.verify()
    assert made.num_documents == 3
    rows = make_rows(made, seq_len, packing)
    batch = rows.read(range(len(rows)))
    learned = batch["targets"][batch["loss_mask"] > 0]
    expected = [token for answer in ANSWERS for token in TOKENIZER.encode(answer)]
    assert sorted(learned.tolist()) == sorted(expected)
    if packing == "cut":
        assert TOKENIZER.decode(learned.tolist(), skip_special=False) == "".join(ANSWERS)


def test_prepared_once_and_again_for_another_template(chats, tmp_path):
    TOKENIZER.save(tmp_path / "tokenizer.json")
    file = tmp_path / "template.jinja"
    file.write_text(SOURCE)
    config = DataConfig((str(chats),), (str(chats),), str(tmp_path), str(file), cache_dir=str(tmp_path / "cache"))
    first = prepare(config).train
    assert prepare(config).train.fingerprint == first.fingerprint
    file.write_text(SOURCE.replace("<assistant>", "<system>").replace("<{{ m.role }}>", "<{{ m.role }}> "))
    with pytest.raises(ShardlmError, match=r"chats\.jsonl:1: .*rewrites the conversation"):
        prepare(config)
    file.write_text(SOURCE.replace("</s>", "!</s>"))
    second = prepare(config).train
    assert second.partly_scored
    assert second.fingerprint != first.fingerprint and np.any(~second.scored(0, 10**6))


def test_texts_beside_chats_by_weight(chats, tmp_path):
    TOKENIZER.save(tmp_path / "tokenizer.json")
    for name, text in (("template.jinja", SOURCE), ("a.txt", "what is this it is that " * 9)):
        (tmp_path / name).write_text(text)
    both, template = (str(chats), str(tmp_path / "a.txt")), str(tmp_path / "template.jinja")
    own = {"packing": "whole", "cache_dir": str(tmp_path / "cache"), "weights": (1.0, 1.0)}
    made = prepare(DataConfig(both, both, str(tmp_path), template, **own)).train_sources
    assert made["a.txt"].scored(0, 999).all() and not made["chats.jsonl"].scored(0, 999).all()
    with pytest.raises(ShardlmError, match=r"a\.txt: chats are read from \.jsonl"):
        prepare(DataConfig(both, both, str(tmp_path), template, **own | {"weights": ()}))


def test_text_is_learned_whole(tmp_path):
    (tmp_path / "a.txt").write_text("what is this")
    TOKENIZER.save(tmp_path / "tokenizer.json")
    text = (str(tmp_path / "a.txt"),)
    made = prepare(DataConfig(text, text, str(tmp_path), cache_dir=str(tmp_path / "cache"))).train
    assert made.scored(0, 99).all() and len(made.scored(2, 99)) == made.num_tokens - 2


@pytest.mark.parametrize(
    "line,message",
    [
        ("{", r"chats\.jsonl:2 is not JSON"),
        ('{"messages": [{"role": "user", "content": "\\ud83d"}]}', r"2 has half a character, '.ud83d'; write both"),
        ("[]", r'chats\.jsonl:2 is not an object; a line is \{"messages"'),
        ('{"text": "a"}', r"chats\.jsonl:2 has the keys text; a line is"),
        ('{"messages": [{"content": "a"}]}', r"chats\.jsonl:2: message 0 is .* needs a role and content"),
        ('{"messages": [{"role": "user", "content": "a"}]}', r"chats\.jsonl:2 has nothing that the assistant says"),
        ('{"messages": "hi"}', r"chats\.jsonl:2: 'hi' is no list of messages, \{"),
        ('{"prompt": 5, "completion": "a"}', r"chats\.jsonl:2 \(prompt\): 5 is no list of messages"),
        ('{"conversations": "hi"}', r"chats\.jsonl:2: conversations is 'hi'; it is a list of \{\"from\""),
        ('{"conversations": [{"from": "gpt"}]}', r"chats\.jsonl:2: conversations is \[.*; it is a list of"),
        ('{"conversations": [{"from": ["gpt"], "value": 1}]}', r"chats\.jsonl:2: a turn is from \['gpt'\]; known"),
        ('{"conversations": [{"from": "bot", "value": "a"}]}', r"chats\.jsonl:2: a turn is from 'bot'; known: human"),
    ],
)
def test_a_line_that_is_no_conversation_is_named(tmp_path, line, message):
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(CHATS[0]) + "\n" + line + "\n")
    with pytest.raises(ShardlmError, match=message):
        shards(path, tmp_path / "shards")
    assert not list((tmp_path / "shards").glob("*"))


def test_other_files_and_missing_templates_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("what")
    with pytest.raises(ShardlmError, match=r"a\.txt: chats are read from \.jsonl"):
        shards(tmp_path / "a.txt", tmp_path / "shards")
    with pytest.raises(ShardlmError, match="neither a folder with a chat template nor a file"):
        template_of(str(tmp_path / "nothing"))
