"""Writes questions about the Python standard library out of docstring_chats.py's conversations, as JSONL of prompts,
and has two functions that judge answers to them, in the form of TRL.

    python examples/docstring_prompts.py data/questions

makes data/questions/train.jsonl and data/questions/validation.jsonl.
"""

import json
import pathlib
import sys
import sysconfig

from docstring_chats import conversations

WANTED = 60  # characters of an answer


def sentence(prompts, completions, **columns) -> list[float]:
    """Whether an answer is one sentence with its period."""
    texts = [messages[-1]["content"].strip() for messages in completions]
    return [float(text.endswith(".") and text.count(".") == 1) for text in texts]


def length(prompts, completions, **columns) -> list[float]:
    """1 of an answer of WANTED characters, less of a shorter or longer one, 0 of one that is twice as long."""
    lengths = [len(messages[-1]["content"]) for messages in completions]
    return [max(0.0, 1 - abs(length - WANTED) / WANTED) for length in lengths]


def main(output: pathlib.Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    asked = [chat["messages"][:1] for chat in conversations(pathlib.Path(sysconfig.get_path("stdlib")))]
    for name, part in {"train": [q for i, q in enumerate(asked) if i % 20], "validation": asked[::20]}.items():
        (output / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": question}) + "\n" for question in part))
        print(f"{len(part)} prompts in {output / name}.jsonl")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/docstring_prompts.py FOLDER")
    main(pathlib.Path(sys.argv[1]))
