"""Prompts out of JSONL, and the order in which they are taken."""

import json

import pytest

from shardlm.chat import ChatTemplate
from shardlm.errors import ShardlmError
from shardlm.reinforce.prompts import Order, read
from shardlm.tokenizer import train_bpe

TOKENIZER = train_bpe(["user: what is it? assistant: a mesh\n"] * 8, 280)
TEMPLATE = ChatTemplate(
    "{% for m in messages %}{% if m.role == 'nobody' %}{{ raise_exception('no role nobody') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def lines(path, *found) -> tuple[str, ...]:
    path.write_text("\n".join(json.dumps(line) if not isinstance(line, str) else line for line in found))
    return (str(path),)


def test_texts_stay_as_they_are_and_messages_are_rendered(tmp_path):
    chat = [{"role": "user", "content": "what is it?"}]
    files = lines(
        tmp_path / "p.jsonl", {"prompt": "a mesh", "answer": 3}, {"prompt": chat, "answer": "x", "level": [1]}
    )
    text, asked = read(files, TOKENIZER, TEMPLATE, 64, "data.train")
    assert text.given == "a mesh" and list(text.tokens) == TOKENIZER.encode_prompt("a mesh")
    assert text.completion("b") == "b" and text.columns == {"answer": 3}
    assert TOKENIZER.decode(asked.tokens) == "user: what is it?\nassistant: "
    assert asked.completion("b") == [{"role": "assistant", "content": "b"}] and asked.columns["level"] == [1]


def test_a_reply_that_the_assistant_has_begun_goes_on(tmp_path):
    chat = [{"role": "user", "content": "what is it?"}, {"role": "assistant", "content": "it is"}]
    [begun] = read(lines(tmp_path / "p.jsonl", {"prompt": chat}), TOKENIZER, TEMPLATE, 64, "data.train")
    assert TOKENIZER.decode(begun.tokens) == "user: what is it?\nassistant: it is"
    assert begun.completion(" a mesh") == [{"role": "assistant", "content": "it is a mesh"}]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"p.jsonl:1 is not JSON"),
        ('{"prompt": "fox \\ude42"}', r"p.jsonl:1 has half a character, '.ude42'"),
        ({"text": "a"}, r'p.jsonl:1 has no prompt; a line is {"prompt": ...}'),
        ({"prompt": [{"content": "a"}]}, r"p.jsonl:1 \(prompt\)"),
        ({"prompt": [{"role": "nobody", "content": "a"}]}, r"p.jsonl:1 \(prompt\): .*no role nobody"),
        ("\n", "data.train=.*p.jsonl has no line with a prompt"),
        ({"prompt": "a mesh " * 9}, "1 of 1 prompts of data.train are longer than the 8 tokens that train.seq_len"),
    ],
)
def test_what_is_no_prompt(tmp_path, line, message):
    with pytest.raises(ShardlmError, match=message):
        read(lines(tmp_path / "p.jsonl", line), TOKENIZER, TEMPLATE, 8, "data.train")


def test_messages_want_a_template(tmp_path):
    files = lines(tmp_path / "p.jsonl", {"prompt": [{"role": "user", "content": "a"}]})
    with pytest.raises(ShardlmError, match=r"set data\.chat_template to the folder or file"):
        read(files, TOKENIZER, None, 64, "data.train")


def test_every_epoch_has_all_prompts_in_an_order_of_its_own(tmp_path):
    prompts = read(lines(tmp_path / "p.jsonl", *({"prompt": f"it {i}"} for i in range(12))), TOKENIZER, None, 64, "x")
    order = Order(prompts, seed=3)
    first, second = order.take(0, 12), order.take(12, 12)
    assert {p.given for p in first} == {p.given for p in second} == {p.given for p in prompts} and first != second
    assert order.take(10, 4) == first[10:] + second[:2]
    assert Order(prompts, seed=3).take(0, 12) == first != Order(prompts, seed=4).take(0, 12)
    assert order.fingerprint != Order(prompts[1:], 3).fingerprint != Order(prompts, 4).fingerprint
