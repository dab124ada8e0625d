"""The format: what a line asks, why one cannot be asked, and the line that says what came of it.

As OpenAI's: what a handler answers, an error of it too, is `response` with its status; a line that no handler is asked
has none, and an `error` that says why. Beside OpenAI's {code, message} that has the field that is wrong and the line.
"""

import dataclasses
import uuid
from collections.abc import Collection
from typing import Any

import msgspec

from shardlm.serve.api.http import encode

DUPLICATE = "duplicate_custom_id"  # a code
_STREAM = "a batch has no streams: leave out stream, which is false by itself"


class _Given(msgspec.Struct):
    """What stands in a line, whatever it is; the body is its handler's to read."""

    custom_id: Any = None
    method: Any = None
    url: Any = None
    body: msgspec.Raw = msgspec.Raw()


class _Streamed(msgspec.Struct):
    stream: Any = None


@dataclasses.dataclass(frozen=True)
class Line:
    """A request. custom_id: its author's name for it. path: whose handler is asked."""

    custom_id: str
    path: str
    body: bytes


@dataclasses.dataclass(frozen=True)
class Refused:
    """A line that is no request. number: its own, from 1. custom_id: None where it has none."""

    number: int
    custom_id: str | None
    code: str
    message: str
    param: str | None = None

    def record(self) -> bytes:
        about = {"code": self.code, "message": self.message, "param": self.param, "line": self.number}
        return _record(self.custom_id, None, about)


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a handler said; `body` is JSON."""

    status: int
    request_id: str
    body: bytes

    def record(self, custom_id: str) -> bytes:
        body = msgspec.Raw(self.body)
        return _record(custom_id, {"status_code": self.status, "request_id": self.request_id, "body": body}, None)


def _record(custom_id: str | None, response: dict[str, Any] | None, error: dict[str, Any] | None) -> bytes:
    id = f"batch_req_{uuid.uuid4().hex}"
    return encode({"id": id, "custom_id": custom_id, "response": response, "error": error}) + b"\n"


def read(number: int, raw: bytes | None, paths: Collection[str]) -> Line | Refused:
    """The line of this number, from 1. `raw`: None where it is longer than a line may be."""
    if raw is None:
        return Refused(number, None, "line_too_long", f"line {number} is longer than a request may be; split it")
    try:
        given = msgspec.json.decode(raw, type=_Given)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return Refused(number, None, "invalid_json_line", f"line {number} is no JSON object in UTF-8: {error}")
    custom_id = given.custom_id if isinstance(given.custom_id, str) and given.custom_id else None
    if wrong := _wrong(given, custom_id, paths):
        code, message, param = wrong
        return Refused(number, custom_id, code, f"line {number}: {message}", param)
    return Line(custom_id, given.url.rstrip("/"), bytes(given.body))


def _wrong(given: _Given, custom_id: str | None, paths: Collection[str]) -> tuple[str, str, str] | None:
    """(code, message, the field), of the first thing that is wrong."""
    if custom_id is None:
        return (
            "invalid_custom_id",
            f"custom_id={given.custom_id!r:.100} must be a text, by which its answer is found",
            ("custom_id"),
        )
    if given.method != "POST":
        return "invalid_method", f"method={given.method!r:.100} must be POST", "method"
    if not isinstance(given.url, str) or given.url.rstrip("/") not in paths:
        return "invalid_url", f"url={given.url!r:.200} must be one of {', '.join(paths)}", "url"
    if not bytes(given.body):
        return "missing_required_parameter", "body is not there; it is what would be sent to the url", "body"
    try:
        streamed = msgspec.json.decode(given.body, type=_Streamed).stream is True
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None  # the handler says why
    return ("stream_not_supported", _STREAM, "stream") if streamed else None


class Known:
    """Which lines of a file have been answered, in an earlier run too, and which custom_ids were seen in this one."""

    def __init__(self):
        self._answered: set[str] = set()
        self._refused: set[tuple[int, str]] = set()  # lines that were, and why
        self._seen: set[str] = set()

    def had(self, record: bytes) -> bool:
        """Notes a line of an earlier run's answers; False where it is none."""
        try:
            found = msgspec.json.decode(record, type=_Recorded)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return False
        if found.error is not None and found.error.line is not None:
            self._refused.add((found.error.line, found.error.code))
        # The first line of that name may have been under way when another was refused for it.
        if found.custom_id is not None and not (found.error and found.error.code == DUPLICATE):
            self._answered.add(found.custom_id)
        return True

    def sort(self, number: int, line: Line | Refused) -> Line | Refused | None:
        """What is to be done with a line; None: nothing, as the output has it."""
        if line.custom_id is not None:
            if line.custom_id in self._seen:
                message = f"line {number}: the custom_id {line.custom_id!r:.100} is another line's; give each its own"
                line = Refused(number, line.custom_id, DUPLICATE, message, "custom_id")
            elif line.custom_id in self._answered:
                self._seen.add(line.custom_id)
                return None
            self._seen.add(line.custom_id)
        return None if isinstance(line, Refused) and (number, line.code) in self._refused else line


class _RecordedError(msgspec.Struct):
    code: str
    line: int | None = None


class _Recorded(msgspec.Struct):
    id: str
    custom_id: str | None
    response: msgspec.Raw
    error: _RecordedError | None
