"""Shapes that kernels are held to their references at, and timed. What runs is kernels.py's."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from shardlm.ops.grouped_weights import LONGEST, OWN, Groups
from shardlm.ops.kv_format import KvFormat
from shardlm.ops.quantized_matmul import Matmul
from shardlm.ops.weight_format import WeightFormat

PAGE = 16


@dataclasses.dataclass(frozen=True)
class Paged:
    """Attention over pages: `tokens` queries at the end of each row of `context` positions. With value_dim, values are
    the first numbers of the keys, as latents'. `in_parts`: not by the kernel that reads pages, but by cuDNN to each
    other and to what is gathered before them (ops/chunk_attention.py)."""

    rows: int
    tokens: int
    context: int
    heads: int
    kv_heads: int
    width: int
    value_dim: int = 0
    how: KvFormat = "auto"
    window: int = 0
    softcap: float = 0.0
    in_parts: bool = False


@dataclasses.dataclass(frozen=True)
class Whole:
    """Causal attention of whole rows, in `documents` of equal length, with `sinks` of the heads; `back`: its
    gradients, without those of the sinks."""

    rows: int
    length: int
    heads: int
    kv_heads: int
    width: int
    window: int = 0
    documents: int = 1
    back: bool = False
    sinks: bool = False


@dataclasses.dataclass(frozen=True)
class Meeting:
    """A block of queries and one of keys in ring attention, of the same place in the row or (not `diagonal`) of an
    earlier one; `back`: its gradients under the log-partition of the row."""

    rows: int
    length: int
    heads: int
    kv_heads: int
    width: int
    diagonal: bool = True
    back: bool = False


@dataclasses.dataclass(frozen=True)
class Grouped:
    """Rows by the weight of their expert, groups of several sizes and one that is empty; `back`: gradients of both."""

    rows: int
    width: int
    hidden: int
    groups: int
    back: bool = False


@dataclasses.dataclass(frozen=True)
class EightBit:
    """A projection that multiplies 8-bit numbers, as training does."""

    rows: int
    width: int
    hidden: int
    matmul: Matmul
    back: bool = False


@dataclasses.dataclass(frozen=True)
class LayerProducts:
    """The projections of a layer, norms and gate for few tokens, as decoding has them; `fused`: by the kernels that
    have norms and gate in them, else by XLA."""

    rows: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    fused: bool = True


@dataclasses.dataclass(frozen=True)
class Rotations:
    """What is between the projections of a token of each row and attention, layer after layer: the sums of parts, with
    `norms` those of heads, the rotation, and what is written into pages; `fused`: by one kernel, else by XLA."""

    rows: int
    heads: int
    kv_heads: int
    width: int
    norms: bool = False
    fused: bool = True
    how: KvFormat = "auto"


@dataclasses.dataclass(frozen=True)
class FewBits:
    """A projection whose weight is held in few bits and multiplied in bfloat16, as serving does; `kernel`: by Pallas,
    else made anew before."""

    rows: int
    width: int
    hidden: int
    how: Groups
    kernel: bool


@dataclasses.dataclass(frozen=True)
class FewBitsExperts:
    """The same of experts, `rows` of each."""

    rows: int
    width: int
    hidden: int
    experts: int
    how: Groups
    kernel: bool


@dataclasses.dataclass(frozen=True)
class Held8:
    """A projection whose weight is held in 8 bits and multiplied so, as serving does with quantization=`how`."""

    rows: int
    width: int
    hidden: int
    how: WeightFormat


@dataclasses.dataclass(frozen=True)
class Recurrent:
    """Linear attention by the gated delta rule, of rows that begin, in chunks, or (`served`) of tokens one after the
    other of rows that are remembered in slots; with `drafts` so many more at a time, all of which stay. `by_channel`: a
    decay for each number of a key. Mamba 2 takes nothing back. Values are as wide as keys, or `value_width`. `back`:
    the gradients of rows, made by chunks or by tokens. `by_xla`: chunks by XLA's products where there are kernels."""

    rows: int
    tokens: int
    heads: int
    kv_heads: int
    width: int
    by_channel: bool = False
    served: bool = False
    drafts: int = 0
    takes_back: bool = True
    value_width: int = 0
    back: bool = False
    by_xla: bool = False

    @property
    def values(self) -> int:
        return self.value_width or self.width


@dataclasses.dataclass(frozen=True)
class Looked:
    """One image in so many patches through an encoder of published_encoders.ENCODERS, a square."""

    encoder: str
    patches: int


Shape = (
    Paged
    | Whole
    | Meeting
    | Grouped
    | EightBit
    | LayerProducts
    | Rotations
    | FewBits
    | FewBitsExperts
    | Held8
    | Recurrent
    | Looked
)
KernelCases = Mapping[str, Shape]

FORMS: Mapping[str, Groups] = MappingProxyType(
    {
        **OWN,
        "int4 with zeros": Groups("int4", LONGEST, "float16", zeros=True, within=128, published=True),
        "fp8 in blocks": Groups("fp8", LONGEST, "float32", within=128, published=True),
        "mxfp4": Groups("fp4", LONGEST, "bfloat16", within=32, published=True),
    }
)
"""What weights are held in: those made here, and some of published checkpoints (AWQ's, DeepSeek's, GPT-OSS's)."""
_DECODE = Paged(64, 1, 4096, 32, 8, 128)
_CHUNKS = {
    "1 x 2k of 8k": Paged(1, 2048, 8192, 32, 8, 128),
    "1 x 2k of 26k": Paged(1, 2048, 26_624, 32, 8, 128),  # three blocks before it
    "4 x 512 of 4k": Paged(4, 512, 4096, 32, 8, 128),
}
_ROTATIONS = {
    "2 rows": Rotations(2, 32, 8, 128),
    "64 rows, norms": Rotations(64, 32, 8, 128, norms=True),
    "64 rows, int8": Rotations(64, 32, 8, 128, how="int8"),
}
_PACKED = {"8 x 4k, heads of 64": Whole(8, 4096, 32, 8, 64), "4 x 8k, heads of 128": Whole(4, 8192, 32, 8, 128)}
_MEETING = Meeting(1, 4096, 32, 8, 128)
_EXPERTS = Grouped(16_384, 4096, 14_336, 8)
_REMEMBERED = Recurrent(64, 16, 32, 16, 128, served=True)  # as Qwen3-Next and Qwen 3.5 9B
_PROMPT = Recurrent(1, 8192, 32, 16, 128)
_TRAINED = dataclasses.replace(_PROMPT, tokens=2048, back=True)  # no more: tokens one by one keep a state each
_MAMBA = Recurrent(1, 8192, 128, 8, 128, takes_back=False, value_width=64)  # as Nemotron-H 8B
_IMAGES = (
    *(("Qwen2.5-VL 7B", patches) for patches in (1024, 4096, 16_384)),  # squares of 448, 896 and 1,792 pixels
    ("Qwen3-VL 8B", 4096),
    ("Gemma 3", 4096),
    ("Mistral Small 3.1", 4096),
)
FULL: Mapping[str, KernelCases] = MappingProxyType(
    {
        "paged attention": {
            "decode 64 x 4k": _DECODE,
            "decode 64 x 4k, fp8": dataclasses.replace(_DECODE, how="fp8"),
            "decode 64 x 4k, int8": dataclasses.replace(_DECODE, how="int8"),
            "decode 1 x 32k": Paged(1, 1, 32_768, 32, 8, 128),
            "decode 64 x 4k, window 1k, softcap": dataclasses.replace(_DECODE, window=1024, softcap=50.0),
            "decode 64 x 4k, latents": Paged(64, 1, 4096, 128, 1, 576, value_dim=512),
            **{f"chunk {name}": chunk for name, chunk in _CHUNKS.items()},
            "chunk 4 x 512 of 4k, latents": Paged(4, 512, 4096, 16, 1, 576, value_dim=512),
        },
        "products of a layer": {
            **{
                f"{rows} rows{'' if fused else ', apart'}": LayerProducts(rows, 4096, 32, 8, 14_336, fused)
                for rows in (2, 16, 64)
                for fused in (True, False)
            },
            **{
                f"rotation and pages, {name}{'' if fused else ', apart'}": dataclasses.replace(own, fused=fused)
                for name, own in _ROTATIONS.items()
                for fused in (True, False)
            },
        },
        "attention": {
            **{
                f"{'backward' if back else 'forward'}, {name}, {documents} documents": dataclasses.replace(
                    rows, documents=documents, back=back
                )
                for name, rows in _PACKED.items()
                for documents in (1, 8, 30)  # each has its way (ops/cudnn_attention.py)
                for back in (False, True)
            },
            **{f"chunk {name}, in parts": dataclasses.replace(own, in_parts=True) for name, own in _CHUNKS.items()},
            "backward, heads of 64, window 128, sinks": Whole(2, 4096, 64, 8, 64, window=128, back=True, sinks=True),
        },
        "ring attention": {
            "own block": _MEETING,
            "earlier block, back": dataclasses.replace(_MEETING, diagonal=False, back=True),
        },
        "linear attention": {
            "decode 64, 16 tokens": _REMEMBERED,
            "decode 64, 16 tokens, by channel": dataclasses.replace(_REMEMBERED, kv_heads=32, by_channel=True),
            "2 drafts 64, 48 tokens": dataclasses.replace(_REMEMBERED, tokens=48, drafts=2),
            "prompt of 8k": _PROMPT,
            "prompt of 8k, by XLA": dataclasses.replace(_PROMPT, by_xla=True),
            "4 prompts of 2k": dataclasses.replace(_PROMPT, rows=4, tokens=2048),
            "prompt of 8k, by channel": Recurrent(1, 8192, 32, 32, 128, by_channel=True),
            "Mamba 2, decode 64, 16 tokens": dataclasses.replace(_MAMBA, rows=64, tokens=16, served=True),
            "Mamba 2, prompt of 8k": _MAMBA,
            "2k, back": _TRAINED,
            "2k, back, by XLA": dataclasses.replace(_TRAINED, by_xla=True),
            "Mamba 2, 2k, back": dataclasses.replace(_MAMBA, tokens=2048, back=True),
        },
        "grouped matmul": {
            "8 experts, back": dataclasses.replace(_EXPERTS, back=True),
            "64 experts": Grouped(16_384, 2048, 1408, 64),
        },
        "8-bit products": {
            "fp8": EightBit(8192, 4096, 14_336, "fp8"),
            "fp8, back": EightBit(8192, 4096, 14_336, "fp8", back=True),
            "int8": EightBit(8192, 4096, 14_336, "int8"),
            "int8, back": EightBit(8192, 4096, 14_336, "int8", back=True),
            **{f"{how}, 64 rows": Held8(64, 4096, 14_336, how) for how in ("fp8_dynamic", "int8_dynamic")},
        },
        "weights in few bits": {
            **{
                f"{how}, {rows} rows": FewBits(rows, 4096, 14_336, FORMS[how], True)
                for rows in (1, 64)
                for how in ("int4", "int8", "fp8", "mxfp4", "int4 with zeros")
            },
            "int4, 2048 rows, made anew": FewBits(2048, 4096, 14_336, FORMS["int4"], False),
            "int4, 128 experts, 128 rows each": FewBitsExperts(128, 2048, 768, 128, FORMS["int4"], True),
            "mxfp4, 32 experts, 16 rows each": FewBitsExperts(16, 2880, 2880, 32, FORMS["mxfp4"], True),
        },
        "images": {f"{encoder}, {patches:,} patches": Looked(encoder, patches) for encoder, patches in _IMAGES},
    }
)
TINY: Mapping[str, KernelCases] = MappingProxyType(
    {
        "paged attention": {
            "decode, int8, window, softcap": Paged(2, 1, 32, 4, 2, 16, how="int8", window=8, softcap=5.0),
            "chunk, latents, fp8": Paged(1, 8, 32, 4, 1, 24, value_dim=16, how="fp8"),
        },
        "products of a layer": {
            "3 rows": LayerProducts(3, 64, 4, 2, 96),
            "apart": LayerProducts(3, 64, 4, 2, 96, False),
            "rotation and pages": Rotations(3, 4, 2, 16, norms=True),
            "rotation and pages, fp8": Rotations(3, 4, 2, 16, how="fp8"),
            "rotation and pages, apart": Rotations(3, 4, 2, 16, fused=False),
        },
        "attention": {
            "backward, sinks": Whole(2, 64, 4, 2, 16, documents=3, back=True, sinks=True),
            "chunk, in parts": Paged(2, 16, 64, 4, 2, 16, in_parts=True),
        },
        "ring attention": {"earlier block, back": Meeting(1, 64, 4, 2, 16, diagonal=False, back=True)},
        "linear attention": {
            "decode, by channel": Recurrent(2, 3, 4, 2, 16, by_channel=True, served=True),
            "2 drafts": Recurrent(2, 6, 4, 2, 16, served=True, drafts=2),
            "prompt": Recurrent(1, 100, 4, 2, 16, value_width=32),
            "prompt, by XLA": Recurrent(1, 100, 4, 2, 16, value_width=32, by_xla=True),
            "back": Recurrent(1, 100, 4, 2, 16, value_width=32, back=True),
            "Mamba 2, decode": Recurrent(2, 3, 4, 2, 16, served=True, takes_back=False, value_width=8),
            "Mamba 2, prompt": Recurrent(1, 200, 4, 2, 16, takes_back=False, value_width=8),
            "Mamba 2, back": Recurrent(1, 100, 4, 2, 16, takes_back=False, value_width=32, back=True),
        },
        "grouped matmul": {"4 experts, back": Grouped(64, 32, 64, 4, back=True)},
        "8-bit products": {
            "fp8": EightBit(32, 64, 64, "fp8"),
            "int8, back": EightBit(32, 64, 64, "int8", back=True),
            "int8_dynamic": Held8(2, 64, 64, "int8_dynamic"),
        },
        "weights in few bits": {
            "int4": FewBits(2, 64, 64, FORMS["int4"], True),
            "int8, made anew": FewBits(2, 64, 64, FORMS["int8"], False),
            "mxfp4, 2 experts": FewBitsExperts(4, 64, 64, 2, FORMS["mxfp4"], True),
        },
        "images": {"windows": Looked("windows", 256), "deep": Looked("deep", 256)},
    }
)
