"""What a request's tools and tool_choice mean: what the model is told, what it must write, and who reads it."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from shardlm.errors import ShardlmError
from shardlm.serve.api.errors import ApiError
from shardlm.serve.api.settings import ToolStyle
from shardlm.serve.api.tools import hermes, llama, marked, mistral, pythonic, sections
from shardlm.serve.api.tools.forced import ArgumentsParser, ListParser, any_schema, one_schema
from shardlm.serve.api.tools.hermes import HermesParser
from shardlm.serve.api.tools.llama import LlamaParser
from shardlm.serve.api.tools.marked import MarkedParser
from shardlm.serve.api.tools.mistral import MistralParser
from shardlm.serve.api.tools.pythonic import PythonParser
from shardlm.serve.api.tools.reader import CallDelta
from shardlm.serve.api.tools.sections import SectionParser
from shardlm.serve.sampling_params import StructuredOutputs

Tool = Mapping[str, Any]
# What a chat template that shows how calls are written has in it, and no template of another style.
TOLD: tuple[tuple[str, ToolStyle], ...] = (
    ("<minimax:tool_call>", "minimax_m2"),
    ("<arg_key>", "glm45"),
    ("<function=", "qwen3_coder"),
    (sections.DEEPSEEK.call, "deepseek_v3"),
    (sections.KIMI.call, "kimi_k2"),
    (mistral.BEGIN, "mistral"),
    (pythonic.BEGIN, "lfm2"),
    ("<|tool_list_start|>", "lfm2"),
)


class Parser(Protocol):
    """Reads one reply. calls: how many it found."""

    calls: int

    def push(self, text: str) -> list[str | CallDelta]: ...

    def finish(self) -> list[str | CallDelta]: ...


class PlainParser:
    """All is content."""

    calls = 0

    def push(self, text: str) -> list[str | CallDelta]:
        return [text] if text else []

    def finish(self) -> list[str | CallDelta]:
        return []


@dataclasses.dataclass(frozen=True)
class Tools:
    """shown: the tools that the template is given. structured: what the reply is held to. parser: makes one for each
    reply. named: the reply is the arguments of a function that the client chose. most: calls in one reply. begins: how
    a reply does that calls and does not answer. marks: what the parser must see of a reply, special tokens too."""

    shown: Sequence[Tool] = ()
    structured: StructuredOutputs | None = None
    parser: Callable[[], Parser] = PlainParser
    named: bool = False
    most: int | None = None
    begins: Sequence[str] = ()
    marks: Sequence[str] = ()


def choose(
    tools: Sequence[Tool] | None, choice: str | Mapping[str, Any] | None, style: ToolStyle, parallel: bool | None
) -> Tools:
    """Raises ApiError for tools and choices of a wrong shape, and for a function that is not among them."""
    functions = [_function(tool, f"tools[{i}]") for i, tool in enumerate(tools or ())]
    choice = choice or ("auto" if functions else "none")
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        names, choice = _allowed(choice, [function["name"] for function in functions])
        tools = [tool for tool in tools or () if tool["function"]["name"] in names]
        functions = [function for function in functions if function["name"] in names]
    if choice == "none" or (choice == "auto" and not functions):  # which agents send without tools too
        return Tools()
    if not functions:
        raise ApiError(f"tool_choice={choice!r} needs tools", param="tool_choice")
    most = 1 if parallel is False else None
    if choice == "auto":
        return dataclasses.replace(_free(functions, style), shown=tools, most=most)
    if choice == "required":
        return Tools(tools, _schema(any_schema(functions, most)), ListParser, most=most)
    name = _chosen(choice)
    for function in functions:
        if function["name"] == name:
            return Tools(tools, _schema(one_schema(function)), lambda: ArgumentsParser(name), named=True)
    known = ", ".join(function["name"] for function in functions)
    raise ApiError(f"tool_choice names {name!r}, which is not among the tools {known}", param="tool_choice")


def style_of(template_source: str, asked: ToolStyle) -> ToolStyle:
    """How a model writes its calls: what was asked for, else what its chat template tells."""
    if asked != "auto":
        return asked
    for mark, style in TOLD:
        if mark in template_source:
            return style
    llama = "<tool_call>" not in template_source and (
        "python_tag" in template_source or '"parameters"' in template_source
    )
    return "llama" if llama else "hermes"


def _free(functions: Sequence[Mapping[str, Any]], style: ToolStyle) -> Tools:
    """Of replies that may call: who reads them, and how calls begin."""
    names = {function["name"] for function in functions}
    if style == "llama":
        return Tools(parser=lambda: LlamaParser(names), begins=llama.begins(names))
    schemas = {one["name"]: one.get("parameters") or {} for one in functions}
    if style == "lfm2":
        return _marked(lambda: PythonParser(schemas), pythonic.BEGIN, pythonic.END)
    if style in marked.STYLES:
        marks = marked.STYLES[style]
        return _marked(lambda: MarkedParser(marks, schemas), marks.begin, marks.end, marks.key, marks.valued)
    if style in sections.STYLES:
        section = sections.STYLES[style]
        return _marked(lambda: SectionParser(section), section.begin, section.call, section.to, section.over)
    if style == "mistral":
        return _marked(MistralParser, mistral.BEGIN, mistral.TO)
    return _marked(HermesParser, hermes.BEGIN, hermes.END)


def _marked(parser: Callable[[], Parser], *marks: str) -> Tools:
    """`marks`: the first one begins calls."""
    return Tools(parser=parser, begins=marks[:1], marks=marks)


def _schema(schema: Mapping[str, Any]) -> StructuredOutputs:
    try:
        return StructuredOutputs(json=schema)
    except ShardlmError as error:
        raise ApiError(str(error), param="tools") from None


def _allowed(choice: Mapping[str, Any], known: Sequence[str]) -> tuple[set[str], str]:
    """(names of the tools that may be called, auto or required). Raises ApiError."""
    inside = choice.get("allowed_tools")
    mode, tools = (inside.get("mode"), inside.get("tools")) if isinstance(inside, Mapping) else (None, None)
    if mode not in ("auto", "required") or not isinstance(tools, list):
        raise ApiError(
            'tool_choice of type allowed_tools has allowed_tools {"mode": "auto" or "required", "tools": [...]}',
            param="tool_choice",
        )
    names = {_chosen(tool) for tool in tools}
    if missing := sorted(names - set(known)):
        message = f"tool_choice names {missing[0]!r}, which is not among the tools {', '.join(known)}"
        raise ApiError(message, param="tool_choice")
    return names, mode


def _chosen(choice: Any) -> str:
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise ApiError(
            f"tool_choice={choice!r} must be none, auto, required or "
            '{"type": "function", "function": {"name": ...}}',
            param="tool_choice",
        )
    return name


def _function(tool: Tool, param: str) -> Mapping[str, Any]:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, Mapping):
        raise ApiError(f'{param} must be {{"type": "function", "function": {{"name": ...}}}}', param=param)
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise ApiError(f"{param}.function has no name", param=f"{param}.function.name")
    if not isinstance(function.get("parameters") or {}, Mapping):
        raise ApiError(
            f"{param}.function.parameters is no JSON schema, which is an object", param=f"{param}.function.parameters"
        )
    return function
