"""The activations of feed-forward layers and experts."""

from typing import Literal

import jax
import jax.numpy as jnp

Activation = Literal["silu", "gelu_tanh", "gelu", "relu", "relu2", "clamped", "xielu", "silu_of_cut", "quick_gelu"]
ALPHA, LIMIT = 1.702, 7.0  # of "clamped"; of "quick_gelu" the first


def activate(x: jax.Array, activation: Activation) -> jax.Array:
    """Elementwise, any shape and float dtype."""
    if activation == "gelu_tanh":
        return jax.nn.gelu(x, approximate=True)
    if activation == "gelu":
        return jax.nn.gelu(x, approximate=False)
    if activation == "quick_gelu":  # by a sigmoid (https://arxiv.org/abs/1606.08415, section 2)
        return x * jax.nn.sigmoid(ALPHA * x)
    if activation == "relu2":
        return jnp.square(jax.nn.relu(x))
    return {"silu": jax.nn.silu, "relu": jax.nn.relu}[activation](x)


def gated(gate: jax.Array, up: jax.Array, activation: Activation, limit: float = 0.0) -> jax.Array:
    """activation(gate) * up. "clamped" is GPT-OSS's (https://arxiv.org/abs/2508.10925, section 2.2): a sigmoid gate of
    slope 1.702 on clamped values, and 1 added to `up`. With a limit both factors are cut to it, `up` on both sides
    (Step 3.5), or with "silu_of_cut" the gate before its SiLU (DeepSeek V4)."""
    if activation == "silu_of_cut":
        return swiglu(jnp.minimum(gate, limit), jnp.clip(up, -limit, limit))
    if limit:
        return jnp.minimum(activate(gate, activation), limit) * jnp.clip(up, -limit, limit)
    if activation == "silu":
        return swiglu(gate, up)
    if activation == "clamped":
        gate, up = jnp.minimum(gate, LIMIT), jnp.clip(up, -LIMIT, LIMIT)
        return gate * jax.nn.sigmoid(ALPHA * gate) * (up + 1)
    return activate(gate, activation) * up


def xielu(x: jax.Array, rise: jax.Array, bend: jax.Array, slope: jax.Array, top: jax.Array) -> jax.Array:
    """Above 0 a parabola, below it an exponential (https://arxiv.org/abs/2411.13010), computed in float32.

    x any shape and float dtype; rise and bend [1], before their softplus; slope at 0 and `top`, just below 0, to which
    exponents are cut, scalars. Returns x's shape and dtype.
    """
    x32 = x.astype(jnp.float32)
    rise, bend, slope, top = (a.astype(jnp.float32) for a in (rise, bend, slope, top))
    above = jax.nn.softplus(rise) * jnp.square(x32)
    below = (slope + jax.nn.softplus(bend)) * (jnp.expm1(jnp.minimum(x32, top)) - x32)
    return (jnp.where(x32 > 0, above, below) + slope * x32).astype(x.dtype)


@jax.custom_vjp
def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) * up (https://arxiv.org/abs/2002.05202, eq. 5), any shape and float dtype.

    The backward pass keeps gate and up only. Autodiff keeps more, and XLA:CPU then fuses its gradient with a
    transpose into one slow loop: 20% of a training step of 768 x 12 layers on two cores.
    """
    return jax.nn.silu(gate) * up


def _forward(gate, up):
    return swiglu(gate, up), (gate, up)


def _backward(kept, d_out):
    gate, up = kept
    sigmoid = jax.nn.sigmoid(gate)
    silu = gate * sigmoid
    return d_out * up * (sigmoid + silu * (1 - sigmoid)), d_out * silu


swiglu.defvjp(_forward, _backward)
