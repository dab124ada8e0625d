"""The tools of a /v1/responses request in the words of a chat, and its calls in those of responses again. Models are
told of functions alone: one of a namespace has both names in one, and a custom tool, whose input is free text, is a
function of that one text. Tools that a server would have to run are left out. They are listed beside the input, or in
items of it, as Codex does from 0.144 on."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardlm.serve.api.errors import ApiError
from shardlm.serve.api.protocol import ResponsesRequest

Tool = Mapping[str, Any]
FUNCTION, CUSTOM, NAMESPACE = "function", "custom", "namespace"
ADDED = "additional_tools"  # the type of an item that brings further ones
_KINDS = (FUNCTION, CUSTOM, NAMESPACE)
_USUAL = "functions"  # the namespace of what is in none
_BETWEEN = "__"  # as clients name what is of a server of tools: mcp__server__tool
_INPUT = "input"
_TEXT = {"type": "object", "properties": {_INPUT: {"type": "string"}}, "required": [_INPUT]}
_ENDS = ('"}', "}", "")  # of arguments that were cut off, where the text may be whole


@dataclasses.dataclass(frozen=True)
class Offered:
    """A tool that the client runs. name, namespace: as the client knows it. function: as a chat has it."""

    name: str
    namespace: str | None
    custom: bool
    function: Mapping[str, Any]


def told_name(name: str, namespace: str | None) -> str:
    """What the model knows a tool by."""
    return name if namespace in (None, "", _USUAL) else namespace + _BETWEEN * (not namespace.endswith(_BETWEEN)) + name


def offered(request: ResponsesRequest) -> dict[str, Offered]:
    """{what the model knows it by: a tool that it is told of}, as it was listed last. Raises ApiError for tools of a
    wrong shape, and for two that the model would know by one name."""
    found: dict[str, Offered] = {}
    described: set[str] = set()
    for tool, param, space in _each(request):
        if tool["type"] not in (FUNCTION, CUSTOM):
            continue
        name, namespace = _name(tool, param), space["name"] if space and space["name"] != _USUAL else None
        about = _custom(tool, param) if tool["type"] == CUSTOM else _function(tool, param)
        # A chat has no place for what is said of a namespace, which is said once.
        if namespace and space.get("description") and namespace not in described:
            described.add(namespace)
            said = f"{told_name('*', namespace)}: {space['description']}\n{about.get('description') or ''}"
            about = about | {"description": said.strip()}
        told = told_name(name, namespace)
        if told in found and (found[told].name, found[told].namespace) != (name, namespace):
            raise ApiError(f"{param}: two tools would be {told!r} to the model; name one otherwise", param=param)
        found[told] = Offered(name, namespace, tool["type"] == CUSTOM, {**about, "name": told})
    return found


def shown(request: ResponsesRequest) -> list[Tool]:
    """The request's own tools of which the model is told, as they came."""
    return [tool for tool in request.tools or () if tool["type"] in _KINDS]


def left_out(request: ResponsesRequest) -> list[str]:
    """Types of the tools that the model is not told of: web_search, file_search, ... are run by OpenAI's servers, and
    clients such as Codex send them with every request."""
    return [tool["type"] for tool, _, _ in _each(request) if tool["type"] not in _KINDS]


def chat_choice(request: ResponsesRequest, tools: Mapping[str, Offered]) -> Any:
    """tool_choice in the words of a chat. Raises ApiError where a tool must be called, and it is none of `tools`."""
    choice, known = request.tool_choice, _by_name(tools)
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        among = choice.get("tools")
        if isinstance(among, list):
            named = [one for each in among if not _is_left_out(each) for one in _chosen(each, known)]
            if among and not named:
                raise _not_run(choice)
            among = named
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": among}}
    if _is_left_out(choice) or (choice == "required" and left_out(request) and not tools):
        raise _not_run(choice)
    if isinstance(choice, Mapping) and choice.get("type") == NAMESPACE:
        message = f"tool_choice={choice!r:.200} is several tools; name one, or ask for allowed_tools"
        raise ApiError(message, param="tool_choice")
    return _chosen(choice, known)[0]


def input_of(arguments: str) -> str:
    """The text that a call of a custom tool has, of arguments that may be cut off or of another shape."""
    for cut in range(12):  # characters of an escape that was begun, which may be the second half of a character
        for end in _ENDS:
            try:
                found = json.loads(arguments[: len(arguments) - cut] + end)
                found[_INPUT].encode()
            except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
                continue
            return found[_INPUT]
    return arguments


def arguments_of(text: str) -> str:
    """The same back: what the model wrote for such a call."""
    return json.dumps({_INPUT: text}, ensure_ascii=False)


def _each(request: ResponsesRequest) -> Iterator[tuple[Tool, str, Tool | None]]:
    """(a tool, where it stands in the request, the namespace that it is in). Raises ApiError."""
    lists = {"tools": request.tools or []}
    for i, item in enumerate(request.input if isinstance(request.input, list) else ()):
        if item.get("type") == ADDED:
            lists[f"input[{i}].tools"] = _list_of(item.get("tools"), f"input[{i}].tools")
    for tool, param in ((tool, f"{where}[{i}]") for where, tools in lists.items() for i, tool in enumerate(tools)):
        if _type(tool, param) != NAMESPACE:
            yield tool, param, None
            continue
        _name(tool, param)
        for j, one in enumerate(_list_of(tool.get("tools"), f"{param}.tools")):
            if _type(one, own := f"{param}.tools[{j}]") == NAMESPACE:
                raise ApiError(f"{own}.type='namespace' is inside of another; give it beside", param=f"{own}.type")
            yield one, own, tool


def _list_of(tools: Any, param: str) -> list[Tool]:
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ApiError(f"{param} must be a list of tools", param=param)
    return tools


def _type(tool: Tool, param: str) -> str:
    if not isinstance(tool.get("type"), str):
        raise ApiError(f"{param}.type={tool.get('type')!r} must be function", param=f"{param}.type")
    return tool["type"]


def _name(tool: Tool, param: str) -> str:
    if not isinstance(tool.get("name"), str) or not tool["name"]:
        raise ApiError(f"{param} has no name", param=f"{param}.name")
    return tool["name"]


def _function(tool: Tool, param: str) -> dict[str, Any]:
    if not isinstance(tool.get("parameters") or {}, Mapping):
        message = f"{param}.parameters is no JSON schema, which is an object"
        raise ApiError(message, param=f"{param}.parameters")
    return {key: tool[key] for key in ("description", "parameters") if tool.get(key) is not None}


def _custom(tool: Tool, param: str) -> dict[str, Any]:
    """A grammar of the input is told in words: a call stands in JSON, where it holds for no text of the reply."""
    form, said = tool.get("format") or {}, [tool.get("description") or ""]
    if not isinstance(form, Mapping) or form.get("type", "text") not in ("text", "grammar"):
        raise ApiError(f"{param}.format={form!r:.100} must be of type text or grammar", param=f"{param}.format")
    if form.get("type") == "grammar":
        said.append(f"{_INPUT} is a text of this grammar ({form.get('syntax')}):\n{form.get('definition')}")
    said = "\n".join(filter(None, said))
    return {"description": said, "parameters": _TEXT} if said else {"parameters": _TEXT}


def _by_name(tools: Mapping[str, Offered]) -> dict[tuple[str, str | None], list[str]]:
    """{(a tool's name or what the model knows it by, its namespace or None for any): what the model knows it by}, and
    {("", a namespace): all that are in it}."""
    found: dict[tuple[str, str | None], list[str]] = {}
    for told, tool in tools.items():
        for key in {(tool.name, None), (tool.name, tool.namespace or _USUAL), ("", tool.namespace or _USUAL)}:
            found.setdefault(key, []).append(told)
    return found | {(told, None): [told] for told in tools}


def _chosen(choice: Any, known: Mapping[tuple[str, str | None], list[str]]) -> Sequence[Any]:
    """One choice in the words of a chat; of a namespace all that are in it. What is named otherwise goes through."""
    if not isinstance(choice, Mapping) or not isinstance(choice.get("name"), str):
        return [choice]
    name, namespace = choice["name"], choice.get("namespace")
    whole = choice.get("type") == NAMESPACE
    found = known.get(("", name) if whole else (name, namespace if isinstance(namespace, str) else None), [name])
    if len(found) > 1 and not whole:
        message = f"tool_choice names {name!r}, which is {' and '.join(found)}; give its namespace too"
        raise ApiError(message, param="tool_choice")
    return [{"type": "function", "function": {"name": told}} for told in found]


def _is_left_out(choice: Any) -> bool:
    """Whether one tool is chosen that a server would run."""
    kind = choice.get("type", FUNCTION) if isinstance(choice, Mapping) else FUNCTION
    return isinstance(kind, str) and kind not in _KINDS


def _not_run(choice: Any) -> ApiError:
    message = f"tool_choice={choice!r:.200} asks for tools that this server does not run; it has functions alone"
    return ApiError(message, param="tool_choice")
