"""Chat templates: messages to the text that a model was tuned on, as `transformers` renders it, and which characters of
it the assistant wrote. Templates come with checkpoints and are run in a sandbox. No jax."""

import dataclasses
import datetime
import functools
import json
import os
import pathlib
import re
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import numpy as np
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shardlm.errors import ShardlmError
from shardlm.files import write_atomically
from shardlm.tokenizer import Tokenizer

Message = Mapping[str, Any]  # {"role": ..., "content": ..., ...}
Span = tuple[int, int]
DEFAULT, TOOL_USE = "default", "tool_use"
FILE, FOLDER = "chat_template.jinja", "additional_chat_templates"
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Names under which templates and clients know what a model thought before it answered.
REASONING = ("reasoning_content", "thinking", "reasoning")
# Marks around what the assistant wrote while spans are looked for: characters that no text is meant to hold.
BEGIN, END = "\ufdd0", "\ufdd1"
_MARKS = "assistant marks"  # a variable that no template can name
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """source       the template, in Jinja (https://huggingface.co/docs/transformers/chat_templating)
    special      the tokens that it names: "bos_token" and the like
    where        the file it came from, for messages
    tool_source  the template for conversations with tools; "": the same
    """

    source: str
    special: Mapping[str, str] = dataclasses.field(default_factory=dict)
    where: str = "the chat template"
    tool_source: str = ""

    @classmethod
    def find(cls, folder: str | os.PathLike) -> "ChatTemplate | None":
        """As `load`, but None for a folder without one, as of a base model. Raises ShardlmError for one that is not in
        Jinja, too: a server would say so at its first chat."""
        if DEFAULT not in _templates(pathlib.Path(folder)):
            return None
        found = cls.load(folder)
        for source in filter(None, (found.source, found.tool_source)):
            found._template(source)
        return found

    @classmethod
    def load(cls, folder: str | os.PathLike, name: str = DEFAULT) -> "ChatTemplate":
        """The template of a checkpoint's folder: in files of their own, else in tokenizer_config.json. Some checkpoints
        have several, by name; the default one brings that for tools along.

        Raises ShardlmError for a folder without one."""
        folder = pathlib.Path(folder)
        found = _templates(folder)
        if not found:
            raise ShardlmError(
                f"{folder} has no chat template: neither {FILE} nor one in tokenizer_config.json. Chat needs the "
                "checkpoint that was tuned for it; a base model continues plain text"
            )
        if name not in found:
            raise ShardlmError(f"{folder} has chat templates {', '.join(found)}, and none is named {name!r}")
        source, where = found[name]
        tools = found.get(TOOL_USE, ("", ""))[0] if name == DEFAULT else ""
        return cls(source, special_tokens(folder), where, tools)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        **options: Any,
    ) -> str:
        """The text of a conversation; with `add_generation_prompt` up to where the assistant begins, with
        `continue_final_message` up to the end of the last message's content, whose author goes on. `tools` are JSON
        schemas; `options` go to the template (enable_thinking, ...). Raises ShardlmError for what it refuses."""
        if not messages:
            raise ShardlmError("a conversation without messages; give at least one, such as one from the user")
        text = self._run(messages, tools, add_generation_prompt, options)
        return self._unended(text, messages[-1].get("content")) if continue_final_message else text

    def spans(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, **options: Any
    ) -> tuple[str, list[Span]]:
        """(text, [start, end) of each part that the assistant wrote): what the template marks by {% generation %}, or
        for one that does not, what each of its messages adds to the conversation up to there and its generation prompt.

        Raises ShardlmError for a template without marks that rewrites what was said before.
        """
        text = self.render(messages, tools, **options)
        if _GENERATION.search(self._source(tools)):
            return text, self._marked(text, messages, tools, options)
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        return text, [self._added(text, messages, i, tools, options) for i in answers]

    def save(self, folder: str | os.PathLike) -> None:
        """Writes the template where `load` and transformers look for it; special tokens are the tokenizer's."""
        write_atomically(pathlib.Path(folder, FILE), self.source.encode())
        if self.tool_source:
            write_atomically(pathlib.Path(folder, FOLDER, f"{TOOL_USE}.jinja"), self.tool_source.encode())

    def _unended(self, text: str, content: Any) -> str:
        """`text` without what follows the last message's content, of parts the last text, as transformers cuts it."""
        if isinstance(content, list | tuple):
            texts = [part["text"] for part in content if isinstance(part, Mapping) and "text" in part]
            content = texts[-1] if texts else None
        words = content.strip() if isinstance(content, str) else ""
        at = text.rfind(words) if words else -1
        if at < 0:
            raise ShardlmError(
                f"{self.where} does not show the content of the last message, {content!r}, so that it cannot be "
                "continued; give it text, or ask for a message of its own"
            )
        spaced = content.lstrip()  # templates that trim contents leave no space at the end
        return text[: at + len(spaced if text.startswith(spaced, at) else words)]

    def _template(self, source: str) -> jinja2.Template:
        try:
            return _compiled(source)
        except jinja2.TemplateSyntaxError as error:
            raise ShardlmError(f"{self.where}, line {error.lineno}: {error.message}") from error
        except Exception as error:  # of parentheses without end, and whatever else a file may hold
            raise ShardlmError(f"{self.where} is no template: {type(error).__name__}: {error}") from error

    def _source(self, tools) -> str:
        return self.tool_source if tools is not None and self.tool_source else self.source

    def _added(self, text: str, messages, i: int, tools, options) -> Span:
        """What message i adds."""
        before = self._run(messages[:i], tools, True, options)
        after = self._run(messages[: i + 1], tools, False, options)
        if not text.startswith(after):  # Phi 3 ends every text, and no answer, with this token
            after = after.removesuffix(self.special.get("eos_token", ""))
        if not (after.startswith(before) and text.startswith(after)):
            raise ShardlmError(
                f"{self.where} rewrites the conversation around message {i} (assistant), so that what it wrote cannot "
                "be told; mark it with {% generation %} in the template, or train on one answer each"
            )
        return len(before), len(after)

    def _marked(self, text: str, messages, tools, options) -> list[Span]:
        if BEGIN in text or END in text:
            raise ShardlmError(f"the conversation holds U+{ord(BEGIN):X} or U+{ord(END):X}, which are no characters")
        marked = self._run(messages, tools, False, options, marks=(BEGIN, END))
        if marked.replace(BEGIN, "").replace(END, "") != text:
            raise ShardlmError(
                f"{self.where} changes what is inside {{% generation %}} afterwards, so that it cannot be found in the "
                "text; apply filters such as trim inside it"
            )
        return _between_marks(marked)

    def _run(self, messages, tools, add_generation_prompt: bool, options, marks: tuple[str, str] | None = None) -> str:
        known = {"messages": [_message(m) for m in messages], "tools": tools, "documents": None}
        known |= {"add_generation_prompt": add_generation_prompt, **options}
        try:
            plain = json.loads(json.dumps(known))  # a template sees data, and a copy
        except (TypeError, ValueError) as error:
            raise ShardlmError(f"messages, tools and options of a chat are JSON: {error}") from None
        template = self._template(self._source(tools))
        try:
            return template.render({**self.special, **plain, _MARKS: marks})
        except Exception as error:  # a template is a program, and may fail like one
            lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == "<template>"]
            line = f", line {lines[-1]}," if lines else ""
            kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
            raise ShardlmError(f"{self.where}{line} refuses these messages: {kind}{error}") from error


def special_tokens(folder: pathlib.Path) -> dict[str, str]:
    """The tokens that a template may name, "bos_token" and the like, as transformers collects them: those of
    tokenizer_config.json, and unless it lists the added tokens, those of special_tokens_map.json over them."""
    config = _json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= _json(folder / "special_tokens_map.json")
    named = {key: token for key, token in config.items() if key in SPECIAL or key.endswith("_token")}
    extra = config.get("extra_special_tokens")
    named |= extra if isinstance(extra, dict) else {}
    return {key: text for key, token in named.items() if (text := _text(token)) is not None}


def assistant_tokens(tokenizer: Tokenizer, text: str, spans: Sequence[Span]) -> tuple[list[int], list[bool]]:
    """(token ids, whether the assistant wrote it): a token counts where any of its characters does."""
    ids, offsets = tokenizer.encode_with_offsets(text)
    wrote = np.zeros(len(text) + 1, np.int64)  # of the characters before each place, how many it wrote
    for start, end in spans:
        wrote[start + 1 : end + 1] = 1
    begin, stop = np.array(offsets, np.int64).reshape(-1, 2).T
    wrote = np.cumsum(wrote)
    return ids, (wrote[stop] > wrote[begin]).tolist()


def _templates(folder: pathlib.Path) -> dict[str, tuple[str, str]]:
    """{name: (template, the file it is in)}. Files of their own take the place of those in tokenizer_config.json."""
    files = {DEFAULT: folder / FILE} | {file.stem: file for file in sorted((folder / FOLDER).glob("*.jinja"))}
    if found := {name: (read(file), str(file)) for name, file in files.items() if file.is_file()}:
        return found
    for file in (folder / "tokenizer_config.json", folder / "chat_template.json"):
        if not (value := _json(file).get("chat_template")):
            continue
        try:
            named = {DEFAULT: value} if isinstance(value, str) else {one["name"]: one["template"] for one in value}
        except (TypeError, KeyError):
            raise ShardlmError(
                f"{file}: chat_template is neither a template nor a list of objects with name and template"
            ) from None
        return {name: (source, str(file)) for name, source in named.items()}
    return {}


def read(file: pathlib.Path) -> str:
    """Text of a file in UTF-8. Raises ShardlmError for another encoding."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ShardlmError(f"{file} is not UTF-8 ({error}); download it again or convert it") from None


def _json(file: pathlib.Path) -> dict[str, Any]:
    try:
        found = json.loads(read(file)) if file.is_file() else {}
    except ValueError as error:
        raise ShardlmError(f"{file} is not JSON ({error}); download it again") from None
    if not isinstance(found, dict):
        raise ShardlmError(f"{file} holds a {type(found).__name__} and not an object; download it again")
    return found


def _text(token: Any) -> str | None:
    """A special token's text: a string, or an object with it."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _message(message: Message) -> dict[str, Any]:
    """A message as transformers hands it to a template: without what is null, and its thoughts under all names."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ShardlmError(f"a message is {message!r}; it is an object with a role and content")
    kept = {key: value for key, value in message.items() if value is not None}
    thoughts = next((kept[name] for name in REASONING if name in kept), None)
    return kept if thoughts is None else {"thinking": thoughts, **kept, "reasoning_content": thoughts}


def _between_marks(text: str) -> list[Span]:
    """Where the marks are in the text without them."""
    found, at = [], 0
    for part in text.split(BEGIN):
        inside, end, rest = part.partition(END)
        if end:
            found.append((at, at + len(inside)))
        at += len(inside) + len(rest)
    return found


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %}: puts marks around what is inside, where they are asked for."""

    tags = frozenset({"generation"})

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark", [nodes.ContextReference()]), [], [], body).set_lineno(line)

    def _mark(self, context, caller) -> str:
        begin, end = context.get(_MARKS) or ("", "")
        return begin + caller() + end


class _Dict:
    """`dict` without the class, from whose attributes a template could break out."""

    def __call__(self, *args, **kwargs):
        return dict(*args, **kwargs)

    def fromkeys(self, *args):
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's, refusing the names that Python keeps for itself."""

    def __init__(*args, **kwargs):  # no named parameter, so that a template may use any name
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name, value):
        _check_name(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace has no attribute {name!r}: rename it")


@functools.lru_cache
def _compiled(source: str) -> jinja2.Template:
    """The environment is that of transformers (utils/chat_template_utils.py)."""
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise
    env.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    env.globals["dict"] = _Dict()
    env.globals["namespace"] = _Namespace
    return env.from_string(source)


def _tojson(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Jinja's own escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str):
    raise jinja2.TemplateError(message)
