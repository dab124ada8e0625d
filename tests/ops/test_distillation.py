"""The losses of a student and its teacher in chunks are held to plain formulas over all logits: values, gradients, the
teacher's other width, split vocabularies, and figures of TRL's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import mesh_of, relative_error

from shardlm.mesh import MeshSpec
from shardlm.ops import cross_entropy
from shardlm.ops.cross_entropy import HeadLayout, LogitsConfig
from shardlm.ops.distillation import Divergence, Head, Shares, distillation, reference
from shardlm.rules import Rules

B, T, D, WIDE, V = 8, 16, 24, 40, 64
TOLERANCE = 1e-5  # the same float32 sums in another order
SHARES = Shares(0.7, 1e-2)
CAPPED = LogitsConfig(0.5, 2.0)


def inputs():
    rng = np.random.default_rng(0)
    hidden, taught = (rng.standard_normal((B, T, width), np.float32) for width in (D, WIDE))
    head, teacher = (rng.standard_normal((width, V), np.float32) * 2 / np.sqrt(width) for width in (D, WIDE))
    weights = (rng.random((B, T)) < 0.8).astype(np.float32)
    return hidden, head, taught, teacher, rng.integers(0, V, (B, T)).astype(np.int32), weights


def expected(of):
    hidden, head, taught, teacher, targets, weights = inputs()

    def loss(hidden, head, bias):
        nll, lse = cross_entropy.reference(hidden, head, targets, CAPPED, bias)
        student = cross_entropy.shaped(hidden @ head + bias, CAPPED)
        gap = reference(student, taught @ teacher, of)
        data, z = jnp.sum(weights * nll), jnp.sum(weights * SHARES.z_loss * lse**2)
        total = (1 - SHARES.teacher) * (data + z) + SHARES.teacher * jnp.sum(weights * gap)
        return total, {"nll": data, "z_loss": z, "divergence": jnp.sum(weights * gap)}

    (total, parts), grads = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(hidden, head, jnp.linspace(-1.0, 1.0, V))
    return parts | {"total": total, "grads": grads}


@pytest.mark.parametrize(
    "of",
    [Divergence(), Divergence("reverse_kl", 2.0), Divergence("jsd", 0.7, 0.2)],
    ids=lambda of: of.kind,
)
@pytest.mark.parametrize("spec", [MeshSpec(), MeshSpec(fsdp=2, context=2, tensor=2)], ids=str)
def test_equals_the_formulas(spec, of):
    hidden, head, taught, teacher, targets, weights = inputs()
    rules = Rules.make("zero3", spec)
    layouts = HeadLayout(("embed", "vocab"), rules, CAPPED), HeadLayout(("vocab", "embed"), rules)

    with jax.set_mesh(mesh_of(spec)):
        tokens, rows = rules.act.spec("batch", "whole_seq"), rules.act.spec("batch", "seq", "embed")
        split = [jax.device_put(a, tokens) for a in (targets, weights)]
        above = Head(jax.device_put(taught, rows), jax.device_put(teacher.T, rules.rest.spec("vocab", "embed")), None)

        def loss(hidden, head, bias):
            how = {"layouts": layouts, "of": of, "shares": SHARES, "chunk_bytes": 10 * V // spec.tensor * 4}
            total, parts = distillation(Head(hidden, head, bias), above, *split, **how)
            return total * 2, parts | {"total": total}  # a cotangent other than 1

        x, w = jax.device_put(hidden, rows), jax.device_put(head, rules.rest.spec("embed", "vocab"))
        bias = jax.device_put(jnp.linspace(-1.0, 1.0, V), rules.act.spec("vocab"))
        grads, found = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(x, w, bias)
    found |= {"grads": tuple(np.asarray(grad) / 2 for grad in grads)}
    assert relative_error(found, expected(of)) < TOLERANCE


def test_figures_of_trl():
    """`generalized_jsd_loss` of TRL 1.16 on these logits, with beta 0, 1 and 0.3, at temperature 2."""
    student = jnp.array([[2.0, -1.0, 0.5, 0.0], [0.0, 0.1, 9.0, -4.0]])
    teacher = jnp.array([[1.0, 1.0, -2.0, 0.25], [0.0, 3.0, 2.0, 8.0]])
    figures = [[0.261528892, 5.55259582], [0.242011519, 3.00758314], [0.0516052514, 0.514133738]]
    kinds = Divergence("forward_kl", 2.0), Divergence("reverse_kl", 2.0), Divergence("jsd", 2.0, 0.3)
    for of, figure in zip(kinds, figures, strict=True):
        np.testing.assert_allclose(reference(student, teacher, of), figure, rtol=2e-6)
