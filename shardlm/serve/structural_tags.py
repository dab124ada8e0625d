"""Texts whose parts are held to forms while the rest is free, as vLLM's structural tags say it (their formats are
xgrammar's, https://xgrammar.mlc.ai/docs/tutorials/structural_tag), in llguidance's Lark. No jax.

What is free ends where a trigger comes, or the end of the tag that it is in: the first one counts. Nothing can come
after what is free without one."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

FORMATS = (
    *("const_string", "json_schema", "any_text", "regex", "sequence", "or", "tag"),
    *("triggered_tags", "tags_with_separator"),
)
_DEPTH = 32  # of formats in formats
_SLASH, _ESCAPED = re.compile(r"(?<!\\)((?:\\\\)*)/"), r"\1\/"  # one that ends an expression in Lark


def lark_of(wish: str | Mapping[str, Any], special: Mapping[str, int], whitespace: str) -> str:
    """The grammar of a structural tag: {"format": ...}, or the older form, {"structures": [{"begin": ...,
    "schema": ..., "end": ...}], "triggers": [...]}.

    Args:
      special: the tokenizer's special tokens, which no text of other tokens is.
      whitespace: an expression, of what may be between the parts of a JSON text.

    Raises: ValueError, for the client, that says what is wrong.
    """
    try:
        return _lark_of(json.loads(wish) if isinstance(wish, str) else wish, special, whitespace)
    except RecursionError:
        raise ValueError("it is too deep") from None


def _lark_of(found: Any, special: Mapping[str, int], whitespace: str) -> str:
    if not isinstance(found, Mapping):
        raise ValueError(f"it is a JSON {type(found).__name__}; it must be an object")
    form = found.get("format")
    if form is None:
        tags = [
            {**_object(one, "structures"), "content": {"type": "json_schema", "json_schema": one.get("schema")}}
            for one in _list(found, "structures")
        ]
        form = {"type": "triggered_tags", "triggers": found.get("triggers"), "tags": tags}
    writer = _Writer(special, whitespace)
    start = writer.format(form, True, 0)
    return "\n".join(["%llguidance {}", f"start: {start}", r"TEXT: /(.|\n)*/", *writer.rules])


class _Writer:
    """Formats to Lark; `rules` are those that they need."""

    def __init__(self, special: Mapping[str, int], whitespace: str):
        self.rules: list[str] = []
        self._special, self._json = special, {"x-guidance": {"whitespace_pattern": whitespace}}
        self._splitter = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)")

    def format(self, form: Any, last: bool, depth: int) -> str:
        """`last`: nothing comes after it."""
        kind = _object(form, "a format").get("type")
        if kind not in FORMATS:
            raise ValueError(f"a format has the type {kind!r:.50}; there are {', '.join(FORMATS)}")
        if depth > _DEPTH:
            raise ValueError(f"formats are in formats more than {_DEPTH} deep")
        if kind in ("any_text", "triggered_tags") and not last:
            raise ValueError(f"a format of type {kind} is free to the end; nothing can come after it but a tag's end")
        return getattr(self, f"_{kind}")(form, last, depth + 1)

    def _const_string(self, form: Mapping[str, Any], last: bool, depth: int) -> str:
        return self._text(_text(form, "value" if "value" in form else "text"))

    def _json_schema(self, form: Mapping[str, Any], last: bool, depth: int) -> str:
        schema = form.get("json_schema")
        schema = json.loads(schema) if isinstance(schema, str) else schema
        if schema is not True and not isinstance(schema, Mapping):
            raise ValueError(f"a schema is a {type(schema).__name__}; it must be an object, or true")
        return f"%json {json.dumps(self._json | ({} if schema is True else dict(schema)))}"

    def _any_text(self, form: Mapping[str, Any], last: bool, depth: int) -> str:
        return "TEXT"

    def _regex(self, form: Mapping[str, Any], last: bool, depth: int) -> str:
        pattern = _text(form, "pattern").replace("\n", r"\n")
        return f"/{_SLASH.sub(_ESCAPED, pattern)}/"

    def _sequence(self, form: Mapping[str, Any], last: bool, depth: int) -> str:
        parts = _list(form, "elements")
        each = [self.format(part, last and part is parts[-1], depth) for part in parts]
        return f"({' '.join(each)})"

    def _or(self, form: Mapping[str, Any], last: bool, depth: int) -> str:
        return f"({' | '.join(self.format(part, last, depth) for part in _list(form, 'elements'))})"

    def _tag(self, form: Mapping[str, Any], last: bool, depth: int) -> str:
        return f"({self._text(_text(form, 'begin'))} {self._rest(form, last, depth)})"

    def _rest(self, tag: Mapping[str, Any], last: bool, depth: int) -> str:
        """What comes after a tag's beginning."""
        ends = [tag["end"]] if isinstance(tag.get("end"), str) else _list(tag, "end")
        if not all(isinstance(end, str) for end in ends):
            raise ValueError("a tag has an end that is no text")
        content = _object(tag.get("content"), "a tag's content")
        if content.get("type") == "any_text" and all(ends):
            return f"({' | '.join(self._up_to(end) for end in ends)})"
        return f"{self.format(content, last and not any(ends), depth)} ({' | '.join(map(self._text, ends))})"

    def _triggered_tags(self, form: Mapping[str, Any], last: bool, depth: int) -> str:
        triggers, by_head = _list(form, "triggers"), {}
        for tag in (_object(tag, "a tag") for tag in _list(form, "tags")):
            begin = _text(tag, "begin")
            found = (one for one in triggers if isinstance(one, str) and one and begin.startswith(one))
            trigger = next(found, None)
            if trigger is None:
                raise ValueError(f"the tag that begins with {begin!r:.80} has none of the triggers {triggers!r:.200}")
            head = self._split(trigger)[0][0]
            rest = f"{self._text(begin[len(head) :])} {self._rest(tag, last, depth)}"
            by_head.setdefault(head, []).append(rest)
        heads = [f"({self._up_to(head)} ({' | '.join(bodies)}))" for head, bodies in by_head.items()]
        tags = f"({' | '.join(heads)})"
        if form.get("stop_after_first"):
            return tags if form.get("at_least_one") else f"({tags} | TEXT)"
        return f"({tags}{'+' if form.get('at_least_one') else '*'} TEXT)"

    def _tags_with_separator(self, form: Mapping[str, Any], last: bool, depth: int) -> str:
        tags = f"({' | '.join(self._tag(_object(tag, 'a tag'), False, depth) for tag in _list(form, 'tags'))})"
        more = "" if form.get("stop_after_first") else f" ({self._text(_text(form, 'separator'))} {tags})*"
        return f"({tags}{more}){'' if form.get('at_least_one') else '?'}"

    def _up_to(self, end: str) -> str:
        """Free text, and `end` where that comes first: its first part, that is, as far as no special token is in it."""
        (text, token), *_ = parts = self._split(end)
        rest = " ".join(_part(*part) for part in parts[1:])
        if token is not None:
            return f"TEXT <[{token}]> {rest}"
        name = f"up_to_{len(self.rules)}"
        self.rules.append(f"{name}[lazy]: TEXT {json.dumps(text, ensure_ascii=False)}")
        return f"{name} {rest}"

    def _text(self, text: str) -> str:
        return " ".join(_part(*part) for part in self._split(text)) if text else '""'

    def _split(self, text: str) -> list[tuple[str, int | None]]:
        """(a part, which special token it is if it is one) of a text that is not empty."""
        found, at = [], 0
        for match in self._splitter.finditer(text):
            found += [(text[at : match.start()], None)] * (at < match.start())
            found.append((match[0], self._special[match[0]]))
            at = match.end()
        return found + [(text[at:], None)] * (at < len(text))


def _part(text: str, token: int | None) -> str:
    return json.dumps(text, ensure_ascii=False) if token is None else f"<[{token}]>"


def _object(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{what} is a {type(value).__name__}; it must be an object")
    return value


def _list(form: Mapping[str, Any], name: str) -> Sequence[Any]:
    value = form.get(name)
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"{name} is {value!r:.50}; it must be a list that is not empty")
    return value


def _text(form: Mapping[str, Any], name: str) -> str:
    value = form.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r:.50}; it must be a text")
    return value
