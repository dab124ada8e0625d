"""Writes tests/chats.json: conversations, and what transformers' apply_chat_template makes of them, text and tokens,
with the templates in tests/chat_templates (of the published kinds). Needs transformers and PYTHONPATH=.:

    python tests/make_chats.py tests/chats.json
"""

import json
import pathlib
import sys
import tempfile

from transformers import PreTrainedTokenizerFast

from shardlm.tokenizer import train_bpe

FOLDER = pathlib.Path(__file__).parent / "chat_templates"
TEMPLATES = {file.stem: file.read_text() for file in sorted(FOLDER.glob("*.jinja"))}
ALTERNATING = ("mistral", "mistral_tools", "gemma3")  # refuse a system's message, or roles out of turn
CHAT = [
    {"role": "user", "content": "What is 2 < 3 & 'é'?"},
    {"role": "assistant", "content": "  True, 日本 🙂. "},
    {"role": "user", "content": "And\nthen?"},
    {"role": "assistant", "content": "Nothing."},
]
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {
    "id": "abcdefg12",
    "type": "function",
    "function": {"name": "add", "arguments": {"a": 1, "b": "<é>", "c": [None, 2.5, True]}},
}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": 'Adds & "quotes" <é>',
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
WITH_TOOLS = [
    CHAT[0],
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "name": "add", "content": "3", "tool_call_id": "abcdefg12"},
    CHAT[3],
]
THOUGHTFUL = [
    CHAT[0],
    {"role": "assistant", "content": "Yes.", "reasoning_content": "Two is less.\n"},
    CHAT[2],
    {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nNo.", "reasoning": None},
]
PARTS = [
    {"role": "user", "content": [{"type": "text", "text": " Look: "}, {"type": "text", "text": "a"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "b"}]},
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def cases():
    for name in TEMPLATES:
        for messages, prompt in ((CHAT[:1], True), ([SYSTEM, *CHAT], False), (THOUGHTFUL, False), (THOUGHTFUL, True)):
            if name == "mistral" and messages[0]["role"] == "system":
                messages = CHAT
            options = {"date_string": "01 Jan 2026"} if name == "llama31" else {}
            options |= {"year": 2026} if name == "gpt_oss" else {}
            yield {"template": name, "messages": messages, "add_generation_prompt": prompt, **options}
    for name in ("hermes", "qwen25", "qwen3", "mistral_tools", "llama31", "deepseek"):
        options = {"date_string": "01 Jan 2026", "tools_in_user_message": True} if name == "llama31" else {}
        for prompt in (False, True):
            yield {
                "template": name,
                "messages": WITH_TOOLS,
                "tools": [TOOL],
                "add_generation_prompt": prompt,
                **options,
            }
    for name in ("hermes", "qwen3"):
        yield {"template": name, "messages": CHAT[:1], "add_generation_prompt": True, "enable_thinking": False}
    yield {"template": "gemma3", "messages": PARTS, "add_generation_prompt": False}
    yield {"template": "gpt_oss", "messages": WITH_TOOLS, "add_generation_prompt": False, "year": 1}


def expected(case, tokenizer):
    given = {key: value for key, value in case.items() if key not in ("template", "messages")}
    given["chat_template"] = TEMPLATES[case["template"]]
    found = {"text": tokenizer.apply_chat_template(case["messages"], tokenize=False, **given)}
    # Inside a macro transformers counts from the beginning of the macro: its marks are wrong there, and left out.
    if "{% generation" in given["chat_template"] and "{%- macro" not in given["chat_template"]:
        marked = {**given, "return_assistant_tokens_mask": True, "return_dict": True}
        tokens = tokenizer.apply_chat_template(case["messages"], **marked)
        found["wrote"] = "".join(map(str, tokens["assistant_masks"]))
    return case | found


def main(output):
    with tempfile.TemporaryDirectory() as folder:
        train_bpe([], 257).save(pathlib.Path(folder, "tokenizer.json"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=f"{folder}/tokenizer.json", **SPECIAL)
    lines = [json.dumps(expected(case, tokenizer), ensure_ascii=False) for case in cases()]
    with open(output, "w") as file:
        file.write(f'{{"special": {json.dumps(SPECIAL)},\n"cases": [\n' + ",\n".join(lines) + "\n]}\n")


if __name__ == "__main__":
    main(sys.argv[1])
