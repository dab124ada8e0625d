"""Writes conversations about the Python standard library's functions, out of their docstrings, as chat JSONL:

    python examples/docstring_chats.py data/chats

makes data/chats/train.jsonl and data/chats/validation.jsonl, and beside them chatml.jinja, a chat template. An answer
ends in the token that ends documents of runs/tiny's tokenizer: to that, <|im_end|> is a text as any other, which a
model learns to write but which stops nothing.
"""

import ast
import json
import pathlib
import sys
import sysconfig

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content }}"
    "{{ '<|endoftext|>' if message.role == 'assistant' else '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def conversations(folder: pathlib.Path):
    """One for each public function or class with a docstring, in a fixed order."""
    for path in sorted(folder.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                lines = (ast.get_docstring(node) or "").split("\n\n")[0].split()
                if len(lines) > 3:
                    kind = "class" if isinstance(node, ast.ClassDef) else "function"
                    question = f"What does the {kind} {path.stem}.{node.name} do?"
                    answer = {"role": "assistant", "content": " ".join(lines)}
                    yield {"messages": [{"role": "user", "content": question}, answer]}


def main(output: pathlib.Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    found = list(conversations(pathlib.Path(sysconfig.get_path("stdlib"))))
    parts = {"train": [c for i, c in enumerate(found) if i % 20], "validation": found[::20]}
    for name, chats in parts.items():
        (output / f"{name}.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    (output / "chatml.jinja").write_text(TEMPLATE)
    print(f"{len(parts['train'])} conversations to train on and {len(parts['validation'])} to validate in {output}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/docstring_chats.py FOLDER")
    main(pathlib.Path(sys.argv[1]))
