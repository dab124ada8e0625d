"""The chunked cross-entropy is held to its reference: values, gradients, padding of the last chunk, z-loss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import mesh_of, relative_error

from shardlm.mesh import MeshSpec
from shardlm.ops.cross_entropy import HeadLayout, LogitsConfig, cross_entropy, reference, token_nll
from shardlm.rules import Rules

B, T, D, V = 8, 16, 24, 64
# The same float32 sums in another order.
TOLERANCE = 1e-5


def inputs():
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((B, T, D), np.float32)
    head = rng.standard_normal((D, V), np.float32) / np.sqrt(D)
    weights = (rng.random((B, T)) < 0.8).astype(np.float32)
    return hidden, head.astype(np.float32), rng.integers(0, V, (B, T)).astype(np.int32), weights


def expected(z_loss):
    hidden, head, targets, weights = inputs()

    def loss(hidden, head):
        nll, lse = reference(hidden, head, targets)
        return jnp.sum(weights * (nll + z_loss * lse**2)), jnp.sum(weights * nll)

    (total, nll), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(hidden, head)
    return {"total": total, "nll": nll, "hidden": grads[0], "head": grads[1]}


@pytest.mark.parametrize("spec", [MeshSpec(), MeshSpec(data=2, fsdp=2, tensor=2), MeshSpec(tensor=8)], ids=str)
@pytest.mark.parametrize("chunk_tokens", [1000, 5, 1])
@pytest.mark.parametrize("tied", [False, True])
def test_equals_reference(spec, chunk_tokens, tied):
    hidden, head, targets, weights = inputs()
    rules = Rules.make("zero3", spec)
    names = ("vocab", "embed") if tied else ("embed", "vocab")
    local_vocab = V // spec.tensor

    def loss(hidden, head):
        layout = HeadLayout(names, rules)
        chunk_bytes = chunk_tokens * local_vocab * 4
        total, parts = cross_entropy(
            hidden, head, *place((targets, weights)), layout=layout, z_loss=1e-2, chunk_bytes=chunk_bytes
        )
        return total * 2, parts["nll"]  # a cotangent other than 1

    def place(tokens):
        return jax.tree.map(lambda a: jax.reshard(a, rules.act.spec("batch", "whole_seq")), tokens)

    with jax.set_mesh(mesh_of(spec)):
        x = jax.device_put(hidden, rules.act.spec("batch", "seq", "embed"))
        w = jax.device_put(head.T if tied else head, rules.rest.spec(*names))
        (total, nll), (d_hidden, d_head) = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(x, w)
    d_head = np.asarray(d_head).T if tied else d_head
    found = {"total": total / 2, "nll": nll, "hidden": np.asarray(d_hidden) / 2, "head": np.asarray(d_head) / 2}
    assert relative_error(found, expected(1e-2)) < TOLERANCE


@pytest.mark.parametrize(
    ("spec", "tied", "logits"),
    [
        (MeshSpec(), False, LogitsConfig()),
        (MeshSpec(data=2, context=2, tensor=2), True, LogitsConfig(0.5, 2.0)),
        (MeshSpec(fsdp=2, tensor=4), False, LogitsConfig()),
    ],
    ids=str,
)
def test_each_tokens_own_equals_the_reference(spec, tied, logits):
    hidden, head, targets, _ = inputs()
    rules = Rules.make("zero3", spec)
    layout = HeadLayout(("vocab", "embed") if tied else ("embed", "vocab"), rules, logits)
    power = jnp.linspace(0.5, 2.0, B * T).reshape(B, T)  # cotangents that depend on the losses

    def loss(hidden, head):
        nll = token_nll(hidden, head, targets, layout=layout, chunk_bytes=5 * V // spec.tensor * 4)
        return jnp.sum(jnp.power(nll, jax.reshard(power, jax.typeof(nll).sharding.spec))), nll

    def naive(hidden, head):
        nll, _ = reference(hidden, head, targets, logits)
        return jnp.sum(jnp.power(nll, power)), nll

    (_, nll), grads = jax.value_and_grad(naive, (0, 1), has_aux=True)(hidden, head)
    with jax.set_mesh(mesh_of(spec)):
        targets = jax.device_put(targets, rules.act.spec("batch", "whole_seq"))
        x = jax.device_put(hidden, rules.act.spec("batch", "seq", "embed"))
        w = jax.device_put(head.T if tied else head, rules.rest.spec(*layout.names))
        (_, found), (d_hidden, d_head) = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(x, w)
    found = {"nll": found, "hidden": d_hidden, "head": np.asarray(d_head).T if tied else d_head}
    assert relative_error(found, {"nll": nll, "hidden": grads[0], "head": grads[1]}) < TOLERANCE


@pytest.mark.parametrize("spec", [MeshSpec(), MeshSpec(fsdp=2, context=2, tensor=2)], ids=str)
def test_a_bias_of_the_head(spec):
    """Of Phi 2, in both losses: it and all gradients."""
    hidden, head, targets, weights = inputs()
    bias, rules, capped = jnp.linspace(-1.0, 1.0, V), Rules.make("zero3", spec), LogitsConfig(0.5, 2.0)
    layout = HeadLayout(("embed", "vocab"), rules, capped)

    def naive(hidden, head, bias):
        nll, _ = reference(hidden, head, targets, capped, bias)
        return jnp.sum(weights * (nll + jnp.square(nll)))

    def loss(hidden, head, bias):
        own = {"layout": layout, "chunk_bytes": 5 * V // spec.tensor * 4, "bias": bias}
        nll = token_nll(hidden, head, split["targets"], **own)
        total, _ = cross_entropy(hidden, head, split["targets"], split["weights"], **own)
        return total + jnp.sum(split["weights"] * jnp.square(nll))

    expected, of_each = jax.value_and_grad(naive, (0, 1, 2))(hidden, head, bias)
    with jax.set_mesh(mesh_of(spec)):
        tokens = rules.act.spec("batch", "whole_seq")
        split = {"targets": jax.device_put(targets, tokens), "weights": jax.device_put(weights, tokens)}
        x = jax.device_put(hidden, rules.act.spec("batch", "seq", "embed"))
        own = jax.device_put(head, rules.rest.spec(*layout.names)), jax.device_put(bias, rules.act.spec("vocab"))
        found, grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(x, *own)
    assert relative_error({"loss": found, "each": grads}, {"loss": expected, "each": of_each}) < TOLERANCE


def test_never_holds_all_logits():
    rules = Rules.make("zero3", MeshSpec())
    layout = HeadLayout(("embed", "vocab"), rules)
    tokens, vocab, width, chunk_bytes = 4096, 4096, 8, 2**20
    shapes = [(1, tokens, width), (width, vocab), (1, tokens), (1, tokens)]
    args = [jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, ["float32", "float32", "int32", "float32"], strict=True)]
    with jax.set_mesh(mesh_of(MeshSpec())):
        for loss in (
            lambda *a: cross_entropy(*a, layout=layout, chunk_bytes=chunk_bytes)[0],
            lambda *a: jnp.sum(jnp.square(token_nll(*a[:3], layout=layout, chunk_bytes=chunk_bytes) * a[3])),
        ):
            run = jax.jit(jax.grad(loss, (0, 1)))
            temporary = run.lower(*args).compile().memory_analysis().temp_size_in_bytes
            assert temporary < 8 * chunk_bytes < tokens * vocab * 4 / 4


def test_gradient_of_the_head_is_kept_in_float32():
    hidden, head, targets, weights = inputs()
    layout = HeadLayout(("embed", "vocab"), Rules.make("zero3", MeshSpec()))
    with jax.set_mesh(mesh_of(MeshSpec())):
        grad = jax.grad(lambda w: cross_entropy(hidden.astype(jnp.bfloat16), w, targets, weights, layout=layout)[0])
        assert grad(jnp.asarray(head)).dtype == jnp.float32
