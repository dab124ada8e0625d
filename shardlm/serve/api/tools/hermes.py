"""Calls between <tool_call> and </tool_call>, as Hermes and Qwen write them, with text around them."""

from shardlm.serve.api.tools.reader import CallDelta, CallReader

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesParser:
    """Push the text of a reply; contents (texts) and parts of calls come out in order. What is between the marks and
    has no name is content."""

    def __init__(self):
        self.calls = 0
        self._held = ""  # text that may be the beginning of a mark
        self._reader: CallReader | None = None
        self._inside = ""  # all text since the mark
        self._after_call = False

    def push(self, text: str) -> list[str | CallDelta]:
        found: list[str | CallDelta] = []
        self._held += text
        while self._content(found) if self._reader is None else self._call(found):
            pass
        return found

    def finish(self) -> list[str | CallDelta]:
        """The rest, when no text follows."""
        rest, self._held = self._held, ""
        if self._reader is not None:
            rest = "" if self._reader.begun else BEGIN + self._inside + rest
            self._reader = None
        return [rest] if rest else []

    def _content(self, found: list[str | CallDelta]) -> bool:
        """Up to the next call. Returns whether it begins here."""
        if self._after_call:
            self._held = self._held.lstrip("\n")
        before, mark, self._held = _until(self._held, BEGIN)
        if before:
            found.append(before)
            self._after_call = False
        if mark:
            self._reader, self._inside = CallReader(self.calls), ""
        return bool(mark)

    def _call(self, found: list[str | CallDelta]) -> bool:
        """Up to the end of a call. Returns whether it is here."""
        reader = self._reader
        inside, mark, self._held = _until(self._held, END)
        found.extend(reader.push(inside)[1])
        is_text = bool(mark) and reader.in_text  # of an argument that speaks of calls
        if is_text:
            found.extend(reader.push(mark)[1])
        self._inside += inside + mark
        self.calls = reader.index + reader.begun
        if mark and not is_text:
            if not reader.begun:
                found.append(BEGIN + self._inside)
            self._reader, self._after_call = None, True
        return bool(mark)


def _until(text: str, mark: str) -> tuple[str, str, str]:
    """(what comes before the mark, the mark, what follows); without it (what cannot be its beginning, "", the rest)."""
    before, found, rest = text.partition(mark)
    if found:
        return before, found, rest
    keep = next(n for n in range(min(len(mark) - 1, len(text)), -1, -1) if mark.startswith(text[len(text) - n :]))
    return text[: len(text) - keep], "", text[len(text) - keep :]
