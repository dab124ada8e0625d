"""Parameters: born sharded and stacked, with the names of their dimensions in their metadata."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from shardlm.ops.quantized_matmul import Matmul, quantized_einsum
from shardlm.rules import Rules

Initializer = Callable[[jax.Array, tuple[int, ...], jax.sharding.PartitionSpec], jax.Array]


@dataclasses.dataclass(frozen=True)
class Execution:
    """How a model runs, as opposed to what it is: chosen per run, not stored in checkpoints' architecture.

    rules      where dimensions are split
    dtype      of activations and of weights in use
    remat      what the backward pass keeps of each block (layers/stack.py)
    attention  implementation, resolved: "xla" or "cudnn" (ops/attention.py)
    context_attention  how it crosses the context axis, resolved: "ring" or "ulysses"
    matmul     numbers that projections multiply (ops/quantized_matmul.py)
    grouped_matmul  implementation of the experts' matmuls, resolved (ops/grouped_matmul.py)
    unroll     blocks per iteration of the scan over layers; 0 unrolls them all
    microbatches, rounds  of a pipeline (layers/pipeline.py)
    """

    rules: Rules
    dtype: jnp.dtype = jnp.float32
    remat: str = "none"
    attention: str = "xla"
    context_attention: str = "ring"
    matmul: Matmul = "dtype"
    grouped_matmul: str = "blocked"
    unroll: int = 1
    microbatches: int = 1
    rounds: int = 1


def normal(std: float) -> Initializer:
    """Normal with this standard deviation, truncated at two of them."""

    def init(key, shape, spec):
        return std * jax.random.truncated_normal(key, -2, 2, shape, jnp.float32, out_sharding=spec)

    return init


def constant(value: float) -> Initializer:
    """Every element the same."""

    def init(key, shape, spec):
        return jnp.full(shape, value, jnp.float32, out_sharding=spec)

    return init


@dataclasses.dataclass(frozen=True)
class Params:
    """Makes the parameters of one module: carries the random stream, the rules and the leading stack dimensions."""

    rngs: nnx.Rngs
    rules: Rules
    stack: tuple[int, ...] = ()

    def __call__(self, shape: tuple[int, ...], names: tuple[str, ...], init: Initializer) -> nnx.Param:
        """A float32 parameter [*stack, *shape], at rest where the rules put it.

        Its metadata holds `names` of one layer's dimensions and `stack_names`. Raises ShardlmError when the shape
        does not divide over the mesh. The values depend on the seed only, not on the mesh.
        """
        stack_names = ("layers",) * len(self.stack)
        full = (*self.stack, *shape)
        spec = self.rules.rest.spec(*stack_names, *names, shape=full)
        return nnx.Param(init(self.rngs.params(), full, spec), names=names, stack_names=stack_names)


def project(
    letters: str,
    x: jax.Array,
    param: nnx.Param,
    execution: Execution,
    out_sharding: jax.sharding.PartitionSpec | None = None,
) -> jax.Array:
    """x times a weight, by einsum letters; where the weight's sharded dimension is summed over, `out_sharding` says
    where the sum goes. Every projection of a block passes here; embedding, router and head do not."""
    if execution.matmul == "dtype":
        return jnp.einsum(letters, x, in_use(param, execution), out_sharding=out_sharding)
    use = execution.rules.use.spec(*param.get_metadata("names"))
    return quantized_einsum(letters, x, param[...], execution.matmul, use=use, out_sharding=out_sharding)


def in_use(param: nnx.Param, execution: Execution) -> jax.Array:
    """One layer's weight, cast and then gathered, so that the all-gather moves the compute dtype."""
    return execution.rules.gather(param[...].astype(execution.dtype), *param.get_metadata("names"))
