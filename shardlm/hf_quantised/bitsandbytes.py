"""bitsandbytes (https://arxiv.org/abs/2208.07339, https://arxiv.org/abs/2305.14314): 8 bits with a scale for each row,
and 4 bits, two a byte, with one for each block of the numbers in a row."""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from shardlm.errors import ShardlmError
from shardlm.hf_files import Stored
from shardlm.hf_quantised.codes import float32, floats, full
from shardlm.hf_quantised.grid import CHUNK, Factors, Grid
from shardlm.hf_quantised.parts import misfit, missing

# Of 4 bits, behind the weight's own name (QuantState.as_dict in
# https://github.com/bitsandbytes-foundation/bitsandbytes/blob/main/bitsandbytes/functional.py).
STATE = "quant_state.bitsandbytes__"
BESIDE = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", f"{STATE}nf4", f"{STATE}fp4")


@dataclasses.dataclass(frozen=True)
class Blocks:
    """4-bit codes of a matrix [O, I] row after row, the higher four bits of a byte first, with a scale for each block.

    packed   uint8, two a byte
    values   float32 [16]: what the codes stand for
    scales   of blocks, float32; or codes of 8 bits, of which each block of `nested` has a scale in turn
    """

    packed: Stored
    values: Stored
    scales: "Stored | Nested"
    shape: tuple[int, int]
    block: int

    dtype = np.dtype("float32")

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.values.nbytes + self.scales.nbytes

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        rows, columns = full(index)
        start, stop, step = rows.indices(self.shape[0])
        width = self.shape[1]
        begin, end = start * width, stop * width
        values = float32(self.values)[np.arange(256)[:, None] >> np.array([4, 0]) & 15]  # [256, 2]: of each byte
        packed = self.packed.read((slice(begin // 2, -(-end // 2)),))
        scales = self.scales.read((slice(begin // self.block, -(-end // self.block)),))
        out = np.empty((len(packed), 2), np.float32)
        for first in range(0, len(packed), CHUNK // 2):
            some = slice(first, first + CHUNK // 2)
            np.take(values, packed[some], axis=0, out=out[some], mode="clip")
        out = out.reshape(-1)[begin % 2 :][: end - begin]
        for first in range(0, len(out), CHUNK):
            of = np.arange(begin + first, begin + min(first + CHUNK, len(out))) // self.block - begin // self.block
            out[first : first + CHUNK] *= scales[of]
        return out.reshape(-1, width)[::step, columns]


@dataclasses.dataclass(frozen=True)
class Nested:
    """Scales that are 8-bit codes with a scale for each block of theirs, and a number added to all."""

    codes: Stored
    values: Stored
    scales: Stored
    block: int
    offset: float

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.values.nbytes + self.scales.nbytes

    def read(self, index: tuple[slice]) -> np.ndarray:
        start, stop, _ = index[0].indices(self.codes.shape[0])
        codes = self.codes.read((slice(start, stop),))
        found = float32(self.values)[codes] * float32(self.scales)[np.arange(start, stop) // self.block]
        return found + np.float32(self.offset)


def check(options: Mapping[str, Any]) -> None:
    """What a weight is held in is beside it."""


def read(tensors: Mapping[str, Stored], options: Mapping[str, Any]) -> dict[str, Any]:
    """The weights by the names that they have in 16 bits; what has nothing beside it is as it is."""
    four: dict[str, dict[str, Stored]] = {}
    found = {}
    for name, stored in tensors.items():
        plain, own = next(((name[: -len(b) - 1], b) for b in BESIDE if name.endswith(f".{b}")), (name, ""))
        if own:
            four.setdefault(plain, {})[own] = stored
        elif not name.endswith((".SCB", ".weight_format")):
            found[name] = stored
    for name, parts in four.items():
        if name not in found:
            raise missing(next(iter(parts.values())), f"{name}.{next(iter(parts))}", name)
        found[name] = _blocks(name, found[name], parts)
    for name, stored in tensors.items():
        if name.endswith(".SCB"):
            plain = f"{name.removesuffix('.SCB')}.weight"
            if plain not in found:
                raise missing(stored, name, plain)
            form = tensors.get(f"{plain}_format")
            found[plain] = _rows(plain, found[plain], name, stored, form)
    for name, stored in found.items():
        if isinstance(stored, Stored) and stored.dtype.itemsize == 1:
            beside = f"{name.removesuffix('.weight')}.SCB" if stored.dtype == np.int8 else f"{name}.absmax"
            raise missing(stored, name, beside)
    return found


def _rows(name: str, weight: Stored, other: str, scales: Stored, form: Stored | None) -> Grid:
    """Integers of 8 bits; a row's scale is its largest number's size, which 127 stands for."""
    right = len(weight.shape) == 2 and weight.dtype == np.int8 and math.prod(scales.shape) == weight.shape[0]
    if not right or scales.dtype != np.float32:
        raise misfit(name, weight, other, scales, "int8 [O, I] and float32 [O]")
    if form is not None and form.read(...).any():
        raise ShardlmError(
            f"{form.file}: {name}_format is {form.read(...)!r}; supported is 0, rows as they are. Save the checkpoint "
            "with a newer bitsandbytes, or open one in 16 bits"
        )
    O, I = weight.shape
    # As int8_vectorwise_dequant in bitsandbytes/functional.py multiplies, in its order.
    return Grid(floats(weight), Factors(scales, (O, 1)), (1, I), times=1 / 127)


def _blocks(name: str, weight: Stored, parts: Mapping[str, Stored]) -> Blocks:
    state = next((parts[part] for part in (f"{STATE}nf4", f"{STATE}fp4") if part in parts), None)
    for part in ("absmax", "quant_map", *(("nested_quant_map",) if "nested_absmax" in parts else ())):
        if part not in parts:
            raise missing(weight, name, f"{name}.{part}")
    if state is None:
        raise missing(weight, name, f"{name}.{STATE}nf4")
    told = _state(name, state, "nested_absmax" in parts)
    shape, block, absmax = tuple(told["shape"]), told["blocksize"], parts["absmax"]
    count, values = math.prod(shape), parts["quant_map"]
    packed = weight.laid((weight.nbytes,), np.dtype("uint8"))
    blocks = -(-count // block)
    if packed.nbytes != -(-count // 2) or math.prod(absmax.shape) != blocks or values.shape != (16,):
        expected = f"4 bits for each of {list(shape)} and a scale for each {block} of them, {blocks}"
        raise misfit(name, weight, f"{name}.absmax", absmax, expected)
    absmax = absmax.laid((blocks,))
    if "nested_absmax" not in parts:
        return Blocks(packed, values, absmax, shape, block)
    of_scales, outer = parts["nested_absmax"], told["nested_blocksize"]
    if absmax.dtype != np.uint8 or math.prod(of_scales.shape) != -(-blocks // outer):
        expected = f"uint8 and a scale for each {outer} of them"
        raise misfit(f"{name}.absmax", absmax, f"{name}.nested_absmax", of_scales, expected)
    of_scales = of_scales.laid((math.prod(of_scales.shape),))
    of_codes = parts["nested_quant_map"]
    if of_codes.shape != (256,):
        raise misfit(f"{name}.absmax", absmax, f"{name}.nested_quant_map", of_codes, "256 values")
    nested = Nested(absmax, of_codes, of_scales, outer, float(told["nested_offset"]))
    return Blocks(packed, values, nested, shape, block)


def _state(name: str, stored: Stored, nested: bool) -> dict[str, Any]:
    """What a weight says of itself, and of its scales' scales where they are nested: a JSON object in bytes."""
    try:
        told = json.loads(stored.read(...).tobytes())
        whole = all(type(n) is int and n > 0 for n in (*told["shape"], told["blocksize"]))
        inner = not nested or (told["nested_blocksize"] > 0 and isinstance(told["nested_offset"], float))
        right = whole and len(told["shape"]) == 2 and inner
    except (ValueError, KeyError, TypeError):
        right = False
    if not right:
        raise ShardlmError(f"{stored.file}: the state of {name} is damaged; download the checkpoint again")
    return told
