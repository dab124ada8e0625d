"""Parses the text of an optimised HLO module into computations and instructions, with where in the source each comes
from. Owns the syntax; what instructions mean is for the other files of this folder."""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from types import MappingProxyType

from shardlm.errors import ShardlmError

# Bits of one element; fp8 types are matched by prefix, as there are many.
_BITS = {"pred": 8, "s4": 4, "u4": 4, "s2": 2, "u2": 2, "bf16": 16, "c64": 64, "c128": 128, "f4e2m1fn": 4}
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\](\{[^{}]*S\(5\)[^{}]*\})?")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_NAME = re.compile(r"%([\w.\-]+)")
_QUOTED = r'"((?:[^"\\]|\\.)*)"'


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of an instruction's result, as one device holds it: in its own memory or the host's, memory space 5 of
    a layout."""

    dtype: str
    dims: tuple[int, ...]
    on_host: bool = False

    @property
    def nbytes(self) -> int:
        bits = _BITS.get(self.dtype) or (8 if self.dtype.startswith("f8") else int(re.search(r"\d+", self.dtype)[0]))
        return math.ceil(math.prod(self.dims) * bits / 8)


@dataclasses.dataclass(frozen=True)
class Frame:
    """A place in the source."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{'/'.join(self.file.split('/')[-2:])}:{self.line}"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line: `name = arrays opcode(operands), attributes`. `inside` is the text between the parentheses."""

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    inside: str
    attributes: str
    is_root: bool

    @property
    def is_fusion(self) -> bool:
        """Whether its computation is one kernel: one that runs beside others too (jax 0.11 copies slices so)."""
        return self.opcode in ("fusion", "fusion-start")

    def called(self, key: str) -> tuple[str, ...]:
        """Names of the computations in attribute `key`: one, or a list in braces."""
        match = re.search(rf"\b{key}=(?:%([\w.\-]+)|\{{([^}}]*)\}})", self.attributes)
        if not match:
            return ()
        return (match[1],) if match[1] else tuple(_NAME.findall(match[2]))

    def number(self, key: str) -> int | None:
        match = re.search(rf"\b{key}=(\d+)", self.attributes)
        return int(match[1]) if match else None

    @property
    def op_name(self) -> str:
        """The operation in jax that it stems from: transformations and scopes, outermost first; "" if not noted."""
        match = re.search(rf"\bop_name={_QUOTED}", self.attributes)
        return match[1].replace("\\", "") if match else ""


@dataclasses.dataclass(frozen=True)
class Computation:
    """A function of the module; its instructions are in the order they are issued."""

    name: str
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def named(self) -> Mapping[str, Instruction]:
        return {instruction.name: instruction for instruction in self.instructions}

    @functools.cached_property
    def users(self) -> Mapping[str, tuple[Instruction, ...]]:
        """Of each value, the instructions that take it, in order."""
        found: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            for name in dict.fromkeys(instruction.operands):
                found.setdefault(name, []).append(instruction)
        return {name: tuple(users) for name, users in found.items()}

    @functools.cached_property
    def root(self) -> Instruction:
        return next(instruction for instruction in self.instructions if instruction.is_root)


@dataclasses.dataclass(frozen=True)
class Module:
    """A parsed module. `stacks` is frame id -> (frame, the id of its caller's frame, 0 for none)."""

    computations: Mapping[str, Computation]
    entry: str
    stacks: Mapping[int, tuple[Frame, int]]

    def frames(self, instruction: Instruction) -> tuple[Frame, ...]:
        """Where the instruction comes from in the source, innermost first; empty if not noted."""
        found, number = [], instruction.number("stack_frame_id")
        while number in self.stacks:
            frame, number = self.stacks[number]
            found.append(frame)
        if not found and (file := re.search(rf"\bsource_file={_QUOTED}", instruction.attributes)):
            found.append(Frame(file[1], instruction.number("source_line") or 0, ""))
        return tuple(found)


def parse(text: str) -> Module:
    """Raises ShardlmError for text without an entry computation."""
    computations: dict[str, Computation] = {}
    entry, name, lines = "", "", []
    for line in text.splitlines():
        if line.startswith("}") and name:
            computations[name] = Computation(name, tuple(lines))
            name = ""
        elif name:
            lines += _instruction(line)
        elif header := _HEADER.match(line):
            name, lines = header[2], []
            entry = name if header[1] else entry
    if entry not in computations:
        raise ShardlmError("this is not the text of a compiled program: it has no ENTRY computation")
    return Module(MappingProxyType(computations), entry, MappingProxyType(_stacks(text)))


def _instruction(line: str) -> list[Instruction]:
    match = _INSTRUCTION.match(line)
    if not match:
        return []
    rest = match[3]
    end = _closing(rest, 0) if rest.startswith("(") else rest.index(" ")
    opcode = _OPCODE.match(rest, end)
    close = _closing(rest, opcode.end() - 1)
    arrays = tuple(
        Array(t, tuple(map(int, filter(None, d.split(",")))), bool(host)) for t, d, host in _ARRAY.findall(rest[:end])
    )
    inside = rest[opcode.end() : close - 1]
    operands = tuple(_NAME.findall(inside))
    return [Instruction(match[2], opcode[1], arrays, operands, inside, rest[close:], bool(match[1]))]


def _closing(text: str, start: int) -> int:
    """The place after the parenthesis that closes the one at `start`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.end()
    return len(text)


def _stacks(text: str) -> dict[int, tuple[Frame, int]]:
    """The tables at the head of the module. XLA prints a parent's id plus one, so that 1 means none."""

    def rows(table: str) -> list[tuple[int, str]]:
        match = re.search(rf"^{table}\n((?:\d+ .*\n)*)", text, re.MULTILINE)
        return [(int(n), row) for n, row in re.findall(r"^(\d+) (.*)$", match[1], re.MULTILINE)] if match else []

    def fields(row: str) -> dict[str, int]:
        return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", row)}

    names = {table: {n: row.strip('"') for n, row in rows(table)} for table in ("FileNames", "FunctionNames")}
    places = {}
    for number, row in rows("FileLocations"):
        place = fields(row)
        function = names["FunctionNames"].get(place["function_name_id"], "")
        places[number] = Frame(names["FileNames"].get(place["file_name_id"], ""), place["line"], function)
    stacks = {number: fields(row) for number, row in rows("StackFrames")}
    return {n: (places[s["file_location_id"]], s.get("parent_frame_id", 1) - 1) for n, s in stacks.items()}
