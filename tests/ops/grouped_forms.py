"""Kinds of few bits that weights are held in, and any weight in them."""

import jax.numpy as jnp
import numpy as np

from shardlm.ops.grouped_weights import OWN, Grouped, Groups, as_published, quantised, scale_shape

FORMS = {
    **OWN,
    "AWQ": Groups("int4", 128, "float16", zeros=True, within=128, published=True),
    "GPTQ, 8 bits": Groups("int8", 128, "float16", zeros=True, within=32, published=True),
    "fp8 in blocks": Groups("fp8", 128, "float32", within=128, published=True),
    "mxfp4": Groups("fp4", 128, "bfloat16", within=32, published=True),
    "GPTQ, groups of 32": Groups("int4", 128, "float16", zeros=True, within=32, published=True),
    "Q4_K": Groups("int4", 128, "float32", zeros=True, within=32, published=True, whole=False),
    "Q6_K": Groups("int8", 128, "float32", within=16, published=True),
}


def any_weight(rng, shape, axis: int, groups: Groups) -> Grouped:
    """As it is held, on the device."""
    if not groups.published:
        w = rng.normal(size=shape).astype(np.float32)
        return on_device(quantised(w, axis, groups.size(shape[axis]), groups.numbers))
    group = groups.size(shape[axis])
    scales = scale_shape(shape, axis, groups)
    factors = rng.uniform(0.01, 0.02, scales).astype(groups.scale).astype(np.float32)
    first, last = {"fp4": (0, 16), "int4": (-8, 8)}.get(groups.numbers, (-128, 128))
    codes = rng.integers(first, last, shape).astype(np.int8)
    if groups.numbers == "fp8":
        codes = rng.normal(size=shape).astype(groups.stored)
    zeros = rng.integers(first, last + 1, scales) if groups.zeros else None
    if not groups.whole:
        zeros = zeros + rng.uniform(size=scales)
    return on_device(as_published(codes, factors, zeros, axis, group, groups))


def on_device(held: Grouped) -> Grouped:
    return Grouped(*(a if a is None else jnp.asarray(a) for a in held))
