"""What `launch.bench gpu` times on a GPU, compiled for one without it: the kernels are in every repetition, and nothing
that a repetition should compute is computed once for all."""

import re

import pytest
from gpu_programs import MARKS

from shardlm.bench.kernel_timing import programs_of, runs_of
from shardlm.bench.kernels import kernel_of
from shardlm.bench.sizes import FULL
from shardlm.hardware import named
from shardlm.mesh import MeshSpec
from shardlm.topology import topology

pytestmark = MARKS


def loop_of(family: str, name: str) -> tuple[str, str]:
    """(the body of the loop over repetitions, the rest of the program)."""
    mesh, kernel = MeshSpec().build(topology("h200", 1, 1)), kernel_of(FULL.kernels[family][name], on_gpu=True)
    text = programs_of(kernel, mesh, runs_of(kernel, named("h200"), FULL.round_seconds))["run"]()().as_text()
    [name] = set(re.findall(r"body=%?([\w.\-]+)", text))
    body = re.search(rf"^%?{re.escape(name)} [^\n]*\{{\n(.*?)^\}}", text, re.MULTILINE | re.DOTALL)[1]
    return body, text.replace(body, "")


@pytest.mark.parametrize(
    ("family", "name", "kernel"),
    [
        ("paged attention", "decode 64 x 4k, int8", "__gpu$xla.gpu.triton"),
        ("paged attention", "chunk 4 x 512 of 4k, latents", "__gpu$xla.gpu.triton"),
        ("attention", "backward, 4 x 8k, heads of 128, 30 documents", " conditional("),  # of the ways by cuDNN
        ("attention", "chunk 1 x 2k of 8k, in parts", "__cudnn$fmhaSoftmax"),
        ("attention", "chunk 4 x 512 of 4k, in parts", "%loop_gather_fusion"),
        ("ring attention", "earlier block, back", "__cudnn$fmhaSoftmaxBackward"),
        ("products of a layer", "2 rows", "__gpu$xla.gpu.triton"),
        ("weights in few bits", "int4, 128 experts, 128 rows each", "__gpu$xla.gpu.triton"),
    ],
)
def test_the_kernel_is_in_every_repetition(family, name, kernel):
    body, rest = loop_of(family, name)
    assert kernel in body and kernel not in rest
    assert not re.search(r" = \S+ copy\(", body)  # of the arguments, that would be timed too


def test_weights_in_few_bits_are_made_anew_in_every_repetition():
    body, rest = loop_of("weights in few bits", "int4, 2048 rows, made anew")
    made = r" = bf16\[64,64,14336\]\S* fusion\("
    assert re.search(made, body) and not re.search(made, rest)
