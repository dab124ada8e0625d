"""Writes preferences out of the conversations of docstring_chats.py, as JSONL of pairs: what a function of the Python
standard library does, rather than what a class does, and what a class does, rather than a function.

    python examples/docstring_pairs.py data/pairs

makes data/pairs/train.jsonl and data/pairs/validation.jsonl.
"""

import json
import pathlib
import sys
import sysconfig

from docstring_chats import conversations

LONGEST = 200  # characters of an answer, so that two with their questions fit a short row


def pairs(told: list):
    """One for each question: its own answer is chosen, that of the next question about the other kind rejected."""
    for i, (question, chosen) in enumerate(told):
        others = ([*told[i:], *told[:i]][n] for n in range(1, len(told)))
        rejected = next(answer for other, answer in others if kind(other) != kind(question))
        yield {"prompt": [question], "chosen": [chosen], "rejected": [rejected]}


def kind(question: dict) -> str:
    """What a question is about: function or class."""
    return question["content"].split()[3]


def main(output: pathlib.Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    told = [chat["messages"] for chat in conversations(pathlib.Path(sysconfig.get_path("stdlib")))]
    short = [(question, answer) for question, answer in told if len(answer["content"]) <= LONGEST]
    parts = {"train": [t for i, t in enumerate(short) if i % 10], "validation": short[::10]}  # no answer is in both
    for name, part in parts.items():
        lines = [json.dumps(pair) for pair in pairs(part)]
        (output / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        print(f"{len(lines)} pairs in {output / name}.jsonl")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/docstring_pairs.py FOLDER")
    main(pathlib.Path(sys.argv[1]))
