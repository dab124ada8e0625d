"""Every kernel of GPUs against its reference on the device, at shapes with rows, heads and keys that blocks do not
divide; launch.bench gpu does the same at the sizes of large models, and times it."""

import importlib.util

import jax
import pytest
from rehearsal import ON_CPU

from shardlm.bench.kernel_cases import (
    FORMS,
    TINY,
    EightBit,
    FewBits,
    FewBitsExperts,
    Grouped,
    Held8,
    LayerProducts,
    Meeting,
    Paged,
    Recurrent,
    Rotations,
    Whole,
)
from shardlm.bench.kernel_timing import largest_error
from shardlm.bench.kernels import kernel_of
from shardlm.mesh import MeshSpec

SHAPES = {
    "paged attention": {
        "decode": Paged(3, 1, 1040, 12, 4, 80),
        "decode, fp8": Paged(5, 1, 656, 8, 2, 128, how="fp8"),
        "decode, int8": Paged(5, 1, 656, 8, 2, 64, how="int8", window=200),
        "chunk, softcap": Paged(2, 33, 656, 8, 1, 256, softcap=30.0),
        "latents": Paged(2, 1, 656, 16, 1, 192, value_dim=128),
        "latents, a chunk, int8": Paged(2, 40, 656, 16, 1, 192, value_dim=128, how="int8"),
    },
    "attention": {
        "forward": Whole(2, 512, 8, 2, 128, documents=2),
        "backward": Whole(2, 512, 8, 2, 64, documents=2, back=True),
        "window": Whole(1, 512, 8, 8, 128, window=100, back=True),
        "window, sinks": Whole(1, 512, 8, 8, 128, window=100, back=True, sinks=True),
        "chunks in parts": Paged(2, 512, 1360, 8, 2, 128, in_parts=True),
        "chunks in parts, nothing before": Paged(2, 64, 64, 8, 2, 128, in_parts=True),
        "chunks in parts, two blocks": Paged(1, 128, 9344, 8, 2, 64, in_parts=True),
    },
    "ring attention": {
        f"{place}{', back' if back else ''}": Meeting(1, 512, 8, 2, 128, diagonal=place == "own block", back=back)
        for place in ("own block", "earlier block")
        for back in (False, True)
    },
    "products of a layer": {  # gated by one kernel, and by a step of its own
        "5 rows": LayerProducts(5, 512, 8, 2, 10_272),
        "33 rows": LayerProducts(33, 1024, 16, 4, 1120),
        "64 rows": LayerProducts(64, 512, 8, 2, 12_320),
        "rotation and pages": Rotations(5, 8, 2, 128),
        "rotation and pages, norms": Rotations(64, 6, 3, 80, norms=True),
        **{f"rotation and pages, {how}": Rotations(7, 8, 2, 64, how=how) for how in ("fp8", "int8")},
    },
    "linear attention": {
        "decode": Recurrent(5, 7, 6, 2, 64, served=True),
        "decode, by channel": Recurrent(3, 7, 4, 4, 128, by_channel=True, served=True),
        "drafts": Recurrent(5, 12, 6, 2, 64, served=True, drafts=3),
        "drafts, by channel": Recurrent(3, 9, 4, 4, 128, by_channel=True, served=True, drafts=2),
        "chunks": Recurrent(2, 300, 4, 2, 64),
        "chunks, back": Recurrent(1, 200, 4, 2, 64, back=True),  # by XLA
        "chunks, by channel": Recurrent(1, 300, 4, 4, 128, by_channel=True),
    },
    "grouped matmul": {"forward": Grouped(1024, 256, 384, 8), "back": Grouped(1024, 256, 384, 8, back=True)},
    "8-bit products": {
        f"{how}{', back' if back else ''}": EightBit(512, 1024, 768, how, back=back)
        for how in ("fp8", "int8")
        for back in (False, True)
    },
    "weights in few bits": {
        **{how: FewBits(3, 512, 384, groups, True) for how, groups in FORMS.items()},
        **{f"{how}, experts": FewBitsExperts(40, 512, 384, 4, groups, True) for how, groups in FORMS.items()},
        **{how: Held8(3, 512, 384, how) for how in ("int8_dynamic", "fp8_dynamic")},
    },
    "images": TINY["images"],
}


@pytest.mark.parametrize("family", SHAPES)
def test_kernels_equal_their_references(family, gpu):
    if family == "grouped matmul" and not ON_CPU and not importlib.util.find_spec("tokamax"):
        pytest.skip("the experts' kernels are tokamax's, which is not installed: pip install 'shardlm[experts]'")
    errors = {}
    with jax.set_mesh(MeshSpec().build([gpu])):
        for name, shape in (TINY if ON_CPU else SHAPES)[family].items():
            kernel = kernel_of(shape, gpu.platform == "gpu")
            errors[name] = (largest_error(kernel, jax.jit(kernel.inputs)(jax.random.key(1))), kernel.allowed)
    assert not {name: pair for name, pair in errors.items() if pair[0] > pair[1]}
