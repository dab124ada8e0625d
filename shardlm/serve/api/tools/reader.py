"""A call of a tool as JSON, {"name": ..., "arguments": {...}}, read while it is written."""

import dataclasses
import json
from collections.abc import Collection

ARGUMENTS = ("arguments", "parameters")  # Hermes and Qwen; Llama 3.1
_SPACE = " \t\r\n"


@dataclasses.dataclass
class CallDelta:
    """What is new of the `index`th call. name: with its first part. arguments: further text of a JSON object."""

    index: int
    name: str | None
    arguments: str


class JsonEnd:
    """Finds where a JSON value ends, character by character. A number or a word ends before the character that follows
    it, and of that character `push` says False."""

    def __init__(self):
        self.done = self.in_text = False
        self._depth = 0
        self._escaped = self._bare = False

    def push(self, char: str) -> bool:
        """Whether the character belongs to the value."""
        if self.in_text:
            self._inside_text(char)
        elif self._bare and char in ",]}" + _SPACE:
            self.done = True
            return False
        elif char == '"':
            self.in_text = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.done = self._depth <= 0
        elif self._depth == 0 and char not in _SPACE:
            self._bare = True
        return True

    def take(self, text: str) -> str:
        """As much of the text as belongs to the value."""
        return text[: next((i for i, char in enumerate(text) if self.done or not self.push(char)), len(text))]

    def _inside_text(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self.in_text = False
            self.done = self._depth == 0


class CallReader:
    """One call. Push its text.

    Attributes:
      done: its object is complete.
      begun: parts of it were given, so that it cannot be content any more. That is from its name on.
      text: all that was pushed and belongs to it.
    """

    def __init__(self, index: int, names: Collection[str] | None = None):
        """`names`: functions that there are; an object with another name is no call. None: any."""
        self.index = index
        self.text = ""
        self.done = self.begun = False
        self._names = names
        self._name: str | None = None
        self._whole = JsonEnd()
        self._value: JsonEnd | None = None  # of the member that is being read
        self._key = ""
        self._member: list[str] = []  # its characters, unless they are the arguments'
        self._is_arguments = self._has_arguments = False
        self._arguments: list[str] = []  # known and not given yet

    @property
    def in_text(self) -> bool:
        """Inside of a JSON text, where a mark is no mark."""
        return self._whole.in_text

    def push(self, text: str) -> tuple[str, list[CallDelta]]:
        """(what follows the object, what is new of the call)."""
        taken = 0
        while taken < len(text) and not self.done:
            self._one(text[taken])
            taken += 1
        self.text += text[:taken]
        return text[taken:], self._new()

    def _one(self, char: str) -> None:
        if self._value is None:
            self._between(char)
        elif self._value.push(char):
            self._take(char)
        else:
            self._member_ends()
        self._whole.push(char)
        self.done = self._whole.done
        if self._value is not None and self._value.done:
            self._member_ends()

    def _between(self, char: str) -> None:
        """Outside of a member's value: its key, or what stands around it."""
        self._member.append(char)
        if char != ":":
            return
        try:
            self._key = json.loads("".join(self._member).strip(_SPACE + "{,:"))
        except ValueError:  # a colon inside the key
            return
        self._value, self._member = JsonEnd(), []

    def _take(self, char: str) -> None:
        if self._key in ARGUMENTS and not self._member and char == "{":
            self._is_arguments = self._has_arguments = True
        if self._is_arguments:
            self._arguments.append(char)
        elif self._member or char not in _SPACE:
            self._member.append(char)

    def _member_ends(self) -> None:
        value, self._value, self._member = "".join(self._member), None, []
        if self._is_arguments:
            self._is_arguments = False
            return
        try:
            parsed = json.loads(value)
        except ValueError:
            return
        if self._key == "name" and isinstance(parsed, str):
            self._name = parsed
        elif self._key in ARGUMENTS and isinstance(parsed, str):  # JSON in a text
            self._arguments, self._has_arguments = [parsed], True

    def _new(self) -> list[CallDelta]:
        if not self._name or (self._names is not None and self._name not in self._names):
            return []
        if self.done and not self._has_arguments:
            self._arguments, self._has_arguments = ["{}"], True
        arguments, self._arguments = "".join(self._arguments), []
        if self.begun and not arguments:
            return []
        name, self.begun = (None if self.begun else self._name), True
        return [CallDelta(self.index, name, arguments)]
