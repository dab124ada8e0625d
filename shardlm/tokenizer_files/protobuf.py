"""Messages of Protocol Buffers as they lie in a file (https://protobuf.dev/programming-guides/encoding): fields by
number, each with all its values. Enough for files of a few kinds of fields, without a library and a schema's code."""

import struct

# How a field is written, in the three lowest bits of its tag.
_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5


def fields(message: bytes) -> dict[int, list[int | bytes]]:
    """{number of a field: its values in order}: whole numbers, and bytes of texts, of messages within and of floats.
    Raises ValueError for what is no message."""
    found: dict[int, list[int | bytes]] = {}
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        if not tag >> 3:
            raise ValueError("a field has the number 0")
        if tag & 7 == _VARINT:
            value, at = _varint(message, at)
        else:
            if tag & 7 == _BYTES:
                size, at = _varint(message, at)
            elif tag & 7 in (_EIGHT, _FOUR):
                size = 8 if tag & 7 == _EIGHT else 4
            else:
                raise ValueError(f"a field is written in the way {tag & 7}")
            if at + size > len(message):
                raise ValueError("a field ends behind its message")
            value, at = message[at : at + size], at + size
        found.setdefault(tag >> 3, []).append(value)
    return found


def number(values: list[int | bytes] | None, unsaid: int) -> int:
    """The last value of a field of whole numbers, which may be negative."""
    value = values[-1] if values else unsaid
    if not isinstance(value, int):
        raise ValueError("a number is written as bytes")
    return value - (1 << 64) if value >> 63 else value


def real(values: list[int | bytes] | None) -> float:
    """The last value of a field of floats."""
    written = content(values, bytes(4))
    if len(written) != 4:
        raise ValueError("a float is not written as one")
    return struct.unpack("<f", written)[0]


def content(values: list[int | bytes] | None, unsaid: bytes = b"") -> bytes:
    """The last value of a field of bytes, texts or messages."""
    value = values[-1] if values else unsaid
    if not isinstance(value, bytes):
        raise ValueError("bytes are written as a number")
    return value


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            break
        byte, at = message[at], at + 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError("a whole number does not end")
