"""Operations counted in a compiled program equal what its shapes say."""

import jax
import jax.numpy as jnp
import pytest

from shardlm.hlo.flops import matmul_flops
from shardlm.hlo.text import parse
from shardlm.hlo.walk import branches


def text_of(f, *shapes):
    return jax.jit(f).lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).compile().as_text()


def test_matmuls_in_loops():
    def run(x, w):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    work = matmul_flops(text_of(run, (4, 32), (7, 32, 32)))
    assert work.flops == 7 * 2 * 4 * 32 * 32 and not work.uncounted


def test_contractions_over_several_dimensions():
    work = matmul_flops(text_of(lambda x, y: jnp.einsum("abk,kbn->an", x, y), (3, 5, 7), (7, 5, 11)))
    assert work.flops == 2 * 3 * 5 * 7 * 11


ATTENTION = """HloModule m

ENTRY %main (q: bf16[2,64,8,16]) -> bf16[2,8,64,16] {
  %q = bf16[2,64,8,16]{3,2,1,0} parameter(0)
  %k = bf16[2,64,2,16]{3,2,1,0} parameter(1)
  ROOT %o = (bf16[2,8,64,16]{3,1,2,0}) custom-call(%q, %k, %k), custom_call_target="__cudnn$fmhaSoftmax", \
backend_config={"cudnn_fmha_backend_config": {"intermediate_tensor_shape": {"dimensions": ["2", "8", "64", "64"]}, \
"mask_type": "MASK", "sliding_window_length": WINDOW}}
}
"""


@pytest.mark.parametrize(
    "target,mask,window,pairs,matmuls",
    [
        ("Softmax", "NO_MASK", 0, 64 * 64, 2),
        ("Softmax", "CAUSAL", 0, 64 * 65 / 2, 2),
        ("Softmax", "CAUSAL", 10, 64 * 10 - 9 * 10 / 2, 2),
        ("SoftmaxBackward", "CAUSAL", 0, 64 * 65 / 2, 5),
    ],
)
def test_attention_of_cudnn(target, mask, window, pairs, matmuls):
    text = ATTENTION.replace("fmhaSoftmax", f"fmha{target}").replace("MASK", mask).replace("WINDOW", str(window))
    assert matmul_flops(text).flops == matmuls * 2 * (2 * 8 * pairs * 16)
    narrow = text.replace("%q, %k, %k", "%q, %k, %v").replace(
        "  ROOT", "  %v = bf16[2,64,2,8]{3,2,1,0} parameter(2)\n  ROOT"
    )
    values = {2: 1, 5: 2}[matmuls]  # products as wide as values, here half as wide as keys
    assert matmul_flops(narrow).flops == (matmuls - values / 2) * 2 * (2 * 8 * pairs * 16)


WAYS = """HloModule m
%body (s: bf16[8]) -> bf16[8] {
  %s = bf16[8]{0} parameter(0)
  ROOT %o = bf16[8]{0} custom-call(%s), custom_call_target="__cudnn$fmhaSoftmaxBackward"
}
%condition (s: bf16[8]) -> pred[] {
  %s = bf16[8]{0} parameter(0)
  ROOT %c = pred[] constant(false)
}
%looped (a: bf16[8]) -> bf16[8] {
  %a = bf16[8]{0} parameter(0)
  ROOT %w = bf16[8]{0} while(%a), condition=%condition, body=%body
}
%once (a: bf16[8]) -> bf16[8] {
  %a = bf16[8]{0} parameter(0)
  ROOT %o = bf16[8]{0} custom-call(%a), custom_call_target="__cudnn$fmhaSoftmaxBackward"
}
ENTRY %main (q: bf16[8], i: s32[]) -> bf16[8] {
  %q = bf16[8]{0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %x = bf16[8]{0} conditional(%i, %q, %q), branch_computations={%once, %looped}
}
"""


def test_of_attentions_ways_those_in_a_loop_are_left_out():
    """Unless there are no others."""
    module = parse(WAYS)
    assert branches(module, module.computations["main"].root) == ["once"]
    module = parse(WAYS.replace("{%once, %looped}", "{%looped, %looped}"))
    assert branches(module, module.computations["main"].root) == ["looped", "looped"]
    module = parse(WAYS.replace("__cudnn$fmhaSoftmaxBackward", "other"))
    assert branches(module, module.computations["main"].root) == ["once", "looped"]


def test_a_stage_that_waits_does_not_stand_for_one_that_attends():
    """In a conditional of layers in a loop and of nothing, the layers are what runs; also where one is in no loop."""
    once = WAYS.index("%once")
    ways = WAYS[:once] + WAYS[once:].replace("__cudnn$fmhaSoftmaxBackward", "other")
    first = '%o = bf16[8]{0} custom-call(%a), custom_call_target="__cudnn$fmhaSoftmaxBackward"'
    for layers in (ways, ways.replace("while(%a)", "while(%o)").replace("  ROOT %w", f"  {first}\n  ROOT %w")):
        module = parse(layers)
        assert branches(module, module.computations["main"].root) == ["once", "looped"]


def test_what_cannot_be_counted_is_named():
    text = ATTENTION.replace("__cudnn$fmhaSoftmax", "own_kernel")
    assert dict(matmul_flops(text).uncounted) == {"own_kernel": 1}
