"""What bitsandbytes holds in 8 and 4 bits, written here as its functional.py lays it out
(https://github.com/bitsandbytes-foundation/bitsandbytes/blob/main/bitsandbytes/functional.py)."""

import ml_dtypes
import numpy as np
import pytest
from few_bits import as_bytes, check, opened

from shardlm.errors import ShardlmError

OPTIONS = {"quant_method": "bitsandbytes", "load_in_4bit": True}
O, I, BLOCK = 10, 35, 16  # rows begin within bytes and within blocks
RNG = np.random.default_rng(0)
VALUES = RNG.normal(size=16).astype(np.float32)
NIBBLES = RNG.integers(0, 16, O * I)
BYTES = (NIBBLES[::2] << 4 | NIBBLES[1::2]).astype(np.uint8)[:, None]  # the first of two in the higher bits
BLOCKS = -(-O * I // BLOCK)
STATE = {"quant_type": "nf4", "blocksize": BLOCK, "dtype": "bfloat16", "shape": [O, I]}


def tensors(state=STATE, kind="nf4", **changes):
    found = {"weight": BYTES, "weight__quant_map": VALUES}
    return found | {"weight__quant_state__bitsandbytes____" + kind: as_bytes(state)} | changes


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_4_bits_with_a_scale_for_each_block(tmp_path, kind):
    absmax = RNG.uniform(0.5, 2, BLOCKS).astype(np.float32)
    found = opened(tmp_path / "f", OPTIONS, **tensors(kind=kind, weight__absmax=absmax), norm=np.ones(3))
    assert set(found) == {"w.weight", "w.norm"}
    check(found["w.weight"], (VALUES[NIBBLES] * absmax.repeat(BLOCK)[: O * I]).reshape(O, I))


@pytest.mark.parametrize("held", [np.uint8, ml_dtypes.bfloat16])
def test_4_bits_with_scales_in_8_bits(tmp_path, held):
    """As unsloth publishes (bnb_4bit_use_double_quant). What FSDP moves is said to be of 16 bits, in the same bytes
    (bnb_4bit_quant_storage)."""
    inner, outer = 4, -(-BLOCKS // 4)
    state = STATE | {"nested_blocksize": inner, "nested_dtype": "float32", "nested_offset": 0.75}
    values, scales = RNG.normal(size=256).astype(np.float32), RNG.uniform(0.5, 2, outer).astype(np.float32)
    absmax = RNG.integers(0, 256, BLOCKS).astype(np.uint8)
    nested = {"weight__nested_quant_map": values}
    rows = O if held == np.uint8 else O - 2  # an even number of bytes
    count, blocks = rows * I, -(-rows * I // BLOCK)
    nested |= {"weight": BYTES[: count // 2].reshape(-1).view(held)[:, None], "weight__absmax": absmax[:blocks]}
    nested["weight__nested_absmax"] = scales[: -(-blocks // inner)]
    state["shape"] = [rows, I]
    found = opened(tmp_path / "f", OPTIONS, **tensors(state, **nested))["w.weight"]
    of_each = values[absmax] * scales.repeat(inner)[:BLOCKS] + np.float32(0.75)
    check(found, (VALUES[NIBBLES] * of_each.repeat(BLOCK)[: O * I]).reshape(O, I)[:rows])


def test_8_bits_with_a_scale_for_each_row(tmp_path):
    """int8_vectorwise_dequant: a row's scale stands for 127."""
    numbers = RNG.integers(-127, 128, (O, I)).astype(np.int8)
    scales = RNG.uniform(0.5, 2, O).astype(np.float32)
    arrays = {"weight": numbers, "SCB": scales, "weight_format": np.zeros((), np.uint8)}
    found = opened(tmp_path / "f", {"quant_method": "bitsandbytes"}, **arrays, bias=np.ones(O))
    assert set(found) == {"w.weight", "w.bias"}
    check(found["w.weight"], numbers.astype(np.float32) * scales[:, None] * np.float32(1 / 127))
    with pytest.raises(ShardlmError, match=r"w\.weight_format is .*3.*; supported is 0"):
        opened(tmp_path / "g", OPTIONS, **arrays | {"weight_format": np.full((), 3, np.uint8)})


ABSMAX = np.ones(BLOCKS, np.float32)
OF_EIGHT = np.ones(256, np.float32)
EIGHT = {"weight__absmax": np.zeros(BLOCKS, np.uint8), "weight__nested_absmax": np.ones(1, np.float32)}


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (tensors(), r"w\.weight is there, and w\.weight\.absmax is not"),
        ({"weight__absmax": ABSMAX}, r"w\.weight\.absmax is there, and w\.weight is not"),
        ({"weight": BYTES}, r"w\.weight is there, and w\.weight\.absmax is not"),
        ({"weight": BYTES.view(np.int8)}, r"w\.weight is there, and w\.SCB is not"),
        ({"SCB": ABSMAX}, r"w\.SCB is there, and w\.weight is not"),
        ({"weight": BYTES.view(np.int8), "SCB": ABSMAX}, r"w\.SCB is float32\[22\]; needed are int8 \[O, I\]"),
        (tensors(weight__absmax=ABSMAX[1:]), r"absmax is float32\[21\]; needed are 4 bits for each of \[10, 35\]"),
        (tensors(weight__absmax=ABSMAX, weight=BYTES[1:]), r"w\.weight is uint8\[174, 1\]"),
        (tensors({"shape": [1]}, weight__absmax=ABSMAX), r"the state of w\.weight is damaged"),
        (tensors(STATE | {"blocksize": 0}, weight__absmax=ABSMAX), r"the state of w\.weight is damaged"),
        (
            tensors(**EIGHT, weight__nested_quant_map=OF_EIGHT),
            r"the state of w\.weight is damaged",
        ),
        (tensors(**EIGHT), r"w\.weight is there, and w\.weight\.nested_quant_map is not"),
        (
            tensors(
                STATE | {"nested_blocksize": 4, "nested_offset": 0.5},
                **EIGHT,
                weight__nested_quant_map=OF_EIGHT,
            ),
            r"nested_absmax is float32\[1\]; needed are uint8 and a scale for each 4 of them",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path, arrays, message):
    with pytest.raises(ShardlmError, match=message):
        opened(tmp_path / "f", OPTIONS, **arrays)
