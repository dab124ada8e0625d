"""Calls as Llama 3.1 writes them: the whole reply is {"name": ..., "parameters": {...}}, several with ; between."""

import json
from collections.abc import Collection

from shardlm.serve.api.tools.reader import CallDelta, CallReader

MARK = "<|python_tag|>"


def begins(names: Collection[str]) -> tuple[str, ...]:
    """How calls of these functions do; an answer in JSON may begin with any other name."""
    each = [json.dumps(name, ensure_ascii=False) for name in sorted(names)]
    return (MARK, *(f'{{"name":{space}{name}' for name in each for space in ("", " ")))


class LlamaParser:
    """Push the text of a reply; a text that does not begin with a call is content as a whole."""

    def __init__(self, names: Collection[str]):
        """`names`: functions that there are. An object with another name is content."""
        self.calls = 0
        self._names = names
        self._held = ""  # before the next call, or not yet known to be none
        self._content = False
        self._reader: CallReader | None = None

    def push(self, text: str) -> list[str | CallDelta]:
        if self._content:
            return [text] if text else []
        found: list[str | CallDelta] = []
        rest = text
        while rest and not self._content:
            rest = self._read(rest, found) if self._reader else self._begin(rest, found)
        return found + ([rest] if rest else [])

    def finish(self) -> list[str | CallDelta]:
        """The rest, when no text follows."""
        rest = self._held if self._reader is None or self._reader.begun else self._held + self._reader.text
        self._held, self._reader = "", None
        return [rest] if rest and not (self.calls and not rest.strip(" ;\n")) else []

    def _begin(self, text: str, found: list[str | CallDelta]) -> str:
        """Before a call: space, the mark, or ; after another one."""
        self._held += text
        head = self._held.lstrip()
        if self.calls:
            head = head.removeprefix(";").lstrip()
        if not head or (MARK.startswith(head) and head != MARK):
            return ""
        head = head.removeprefix(MARK).lstrip()
        if not head:
            return ""
        if head.startswith("{"):
            self._held = self._held[: len(self._held) - len(head)]
            self._reader = CallReader(self.calls, self._names)
            return head
        self._content = True
        found.append(self._held)
        self._held = ""
        return ""

    def _read(self, text: str, found: list[str | CallDelta]) -> str:
        rest, deltas = self._reader.push(text)
        found.extend(deltas)
        self.calls = self._reader.index + self._reader.begun
        if self._reader.done:
            if not self._reader.begun:
                self._content = True
                found.append(self._held + self._reader.text)
            self._held, self._reader = "", None
        return rest
