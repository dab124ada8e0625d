"""Chat templates: messages to the text that a model was tuned on, as `transformers` renders it, and which characters of
it the assistant wrote. Templates come with checkpoints and are run in a sandbox. No jax."""

import dataclasses
import datetime
import functools
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shardlm.errors import ShardlmError
from shardlm.tokenizer import Tokenizer

Message = Mapping[str, Any]  # {"role": ..., "content": ..., ...}
Span = tuple[int, int]
# Marks around what the assistant wrote while spans are looked for: characters that no text holds.
BEGIN, END = "\ufdd0", "\ufdd1"
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """source   the template, in Jinja (https://huggingface.co/docs/transformers/chat_templating)
    special  the tokens that it names: "bos_token" and the like
    where    the file it came from, for messages
    """

    source: str
    special: Mapping[str, str] = dataclasses.field(default_factory=dict)
    where: str = "the chat template"

    @classmethod
    def load(cls, folder: str | os.PathLike, name: str = "default") -> "ChatTemplate":
        """The template of a checkpoint's folder: chat_template.jinja, or in tokenizer_config.json. Some checkpoints
        have several, by name. Raises ShardlmError for a folder without one."""
        folder = pathlib.Path(folder)
        config = _json(folder / "tokenizer_config.json")
        special = {key: text for key in SPECIAL if (text := _text(config.get(key)))}
        special |= {key: text for key in SPECIAL if (text := _text(_json(folder / "special_tokens_map.json").get(key)))}
        named = folder / "additional_chat_templates" / f"{name}.jinja"
        for file in (named, *([folder / "chat_template.jinja"] if name == "default" else [])):
            if file.is_file():
                return cls(file.read_text(), special, str(file))
        source = config.get("chat_template") or _json(folder / "chat_template.json").get("chat_template")
        if isinstance(source, list):
            known = {one["name"]: one["template"] for one in source}
            if name not in known:
                raise ShardlmError(f"{folder} has chat templates {', '.join(known)}, and none is named {name!r}")
            source = known[name]
        if not source:
            raise ShardlmError(
                f"{folder} has no chat template: neither chat_template.jinja nor one in tokenizer_config.json. Chat "
                "needs the checkpoint that was tuned for it; a base model continues plain text"
            )
        return cls(source, special, str(folder / "tokenizer_config.json"))

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
        **options: Any,
    ) -> str:
        """The text of a conversation; with `add_generation_prompt` up to where the assistant begins. `tools` are JSON
        schemas; `options` go to the template (enable_thinking, ...). Raises ShardlmError for what it refuses."""
        return _unmarked(self._marked(messages, tools, add_generation_prompt, options))

    def spans(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, **options: Any
    ) -> tuple[str, list[Span]]:
        """(text, [start, end) of each part that the assistant wrote): what the template marks by {% generation %}, or
        for one that does not, what each of its messages adds to the conversation up to there and its generation prompt.

        Raises ShardlmError for a template without marks that rewrites what was said before.
        """
        marked = self._marked(messages, tools, False, options)
        if BEGIN in marked:
            return _unmarked(marked), _marks(marked)
        found = []
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self.render(messages[:i], tools, add_generation_prompt=True, **options)
                after = self.render(messages[: i + 1], tools, **options)
                if not (after.startswith(before) and marked.startswith(after)):
                    raise ShardlmError(
                        f"{self.where} rewrites the conversation around message {i} (assistant), so that what it wrote "
                        "cannot be told; mark it with {% generation %} in the template, or train on one answer each"
                    )
                found.append((len(before), len(after)))
        return marked, found

    def _marked(self, messages, tools, add_generation_prompt: bool, options: Mapping[str, Any]) -> str:
        known = {"messages": messages, "tools": tools, "documents": None}
        known |= {"add_generation_prompt": add_generation_prompt, **options}
        plain = json.loads(json.dumps(known))  # a template sees data, and a copy
        try:
            return _compiled(self.source).render(**self.special, **plain)
        except jinja2.TemplateSyntaxError as error:
            raise ShardlmError(f"{self.where}, line {error.lineno}: {error.message}") from error
        except (jinja2.TemplateError, TypeError, ValueError, AttributeError, KeyError) as error:
            raise ShardlmError(f"{self.where} refuses these messages: {error}") from error


def assistant_tokens(tokenizer: Tokenizer, text: str, spans: Sequence[Span]) -> tuple[list[int], list[bool]]:
    """(token ids, whether the assistant wrote it): a token counts where any of its characters does."""
    ids, offsets = tokenizer.encode_with_offsets(text)
    return ids, [any(a < end and start < b for start, end in spans) for a, b in offsets]


def _json(file: pathlib.Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise ShardlmError(f"{file} is not JSON ({error}); download it again") from None


def _text(token: Any) -> str:
    """A special token's text: a string, or an object with it."""
    return (token or {}).get("content", "") if not isinstance(token, str) else token


def _unmarked(text: str) -> str:
    return text.replace(BEGIN, "").replace(END, "")


def _marks(text: str) -> list[Span]:
    """Where the marks are in the text without them."""
    found, at = [], 0
    for part in text.split(BEGIN):
        inside, end, rest = part.partition(END)
        if end:
            found.append((at, at + len(inside)))
        at += len(inside) + len(rest)
    return found


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %}: puts marks around what is inside."""

    tags = frozenset({"generation"})

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller) -> str:
        return BEGIN + caller() + END


@functools.lru_cache
def _compiled(source: str) -> jinja2.Template:
    """The environment is that of transformers (utils/chat_template_utils.py)."""
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise
    env.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return env.from_string(source)


def _tojson(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Jinja's own escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str):
    raise jinja2.TemplateError(message)
