"""Projections of few tokens, as decoding has them, by kernels that normalise what they read and gate what they make
(ops/few_rows.py): for weights in the compute dtype without adapters, up to `Execution.fused_rows` tokens, which is
where the GPU was seen to be quicker so (serve/try_out.py). All else is `project`'s.

Each device multiplies its part of the weights; where that is a part of what is summed over, sums cross devices. What
is read is normalised by the kernel that multiplies it: `Late` stands for such a norm until then. What goes back to the
stream leaves its kernel in parts, which XLA adds to it: a kernel that makes whole sums and adds them takes as long as
both (H200, measured: down 30.5 us, and 27.3 + 1.5 and what starting takes).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from shardlm.layers.lora import A
from shardlm.layers.norm import Norm
from shardlm.layers.param import MADE_FIRST, SCALE, Execution, gathered, in_use, project
from shardlm.mesh import shard_map
from shardlm.ops import few_rows
from shardlm.ops.swiglu import Activation


@dataclasses.dataclass(frozen=True)
class Late:
    """x [B, T, D], whose norm is taken by what reads it."""

    x: jax.Array
    norm: Norm
    execution: Execution

    @functools.cached_property
    def taken(self) -> jax.Array:
        """The norm of x."""
        return self.norm(self.x, self.execution)


def norm_of(x: jax.Array, norm: Norm, execution: Execution) -> jax.Array | Late:
    """The norm of x [B, T, D], or where kernels may take it x itself."""
    kind = norm.config.kind == "rms" and norm.config.scaled
    late = kind and math.prod(x.shape[:-1]) <= execution.fused_rows
    return Late(x, norm, execution) if late else norm(x, execution)


def late_norm(norm: Norm, execution: Execution) -> few_rows.Norm:
    """As kernels take it."""
    return few_rows.Norm(in_use(norm.scale, execution), norm.config.eps, norm.config.offset)


def taken(x: jax.Array | Late) -> jax.Array:
    """As an array."""
    return x.taken if isinstance(x, Late) else x


def over(x: jax.Array | Late, spec: jax.sharding.PartitionSpec) -> jax.Array | Late:
    """x, split as `spec` says."""
    return dataclasses.replace(x, x=jax.reshard(x.x, spec)) if isinstance(x, Late) else jax.reshard(x, spec)


def project_each(
    x: jax.Array | Late, module: nnx.Module, letters: Mapping[str, str], execution: Execution
) -> dict[str, jax.Array]:
    """x [B, T, D] times each weight [D, *made] of a module, by name: [B, T, *made], by einsum letters."""
    if not _fit(x, module, list(letters), 1, execution):
        x = taken(x)
        return {name: project(how, x, module, name, execution) for name, how in letters.items()}
    made = _run(few_rows.products, x, module, list(letters), execution, len(letters))
    return dict(zip(letters, made, strict=True))


def sums_each(
    x: jax.Array | Late, module: nnx.Module, letters: Mapping[str, str], execution: Execution
) -> dict[str, few_rows.Sums] | None:
    """The same before their parts are added up; None where no kernel makes them."""
    if not _fit(x, module, list(letters), 1, execution):
        return None

    def run(x, ws, norm) -> list[jax.Array]:
        parts, squares = few_rows.in_parts(x, ws, norm)
        return parts if squares is None else [*parts, squares]

    made = _run(run, x, module, list(letters), execution, len(letters), lead=1)
    rows, eps = (x.x, x.norm.config.eps) if isinstance(x, Late) else (x, 0.0)
    squares = made[-1] if isinstance(x, Late) else None
    how = {"summed": rows.shape[-1], "eps": eps, "dtype": jnp.dtype(rows.dtype)}
    return {name: few_rows.Sums(parts, squares, **how) for name, parts in zip(letters, made, strict=False)}


def project_gated(x: jax.Array | Late, module: nnx.Module, activation: Activation, execution: Execution):
    """activation(x @ gate) * (x @ up) [B, T, F] of x [B, T, D] and a module's two weights [D, F]; None where no kernel
    makes it."""
    names = ["gate", "up"]
    if activation not in few_rows.GATES or not _fit(x, module, names, 1, execution):
        return None
    run = lambda x, ws, norm: [few_rows.gated(x, *ws, activation, norm)]  # noqa: E731
    [made] = _run(run, x, module, names, execution, 1)
    return made


def project_back(letters: str, x: jax.Array, module: nnx.Module, name: str, execution: Execution) -> jax.Array:
    """x [B, T, *summed] times a weight [*summed, D] of a module: [B, T, D], split as between blocks."""
    stream = execution.rules.act.spec("batch", "seq", "embed")
    if not _fit(x, module, [name], x.ndim - 2, execution):
        return project(letters, x, module, name, execution, stream)
    [made] = _run(few_rows.products, x, module, [name], execution, 1)
    return jax.reshard(made, stream)


def _across(module: nnx.Module, name: str, execution: Execution) -> tuple[str, ...]:
    """The axes over which sums by a weight cross devices."""
    param, rules = getattr(module, name), execution.rules
    axes = (rules.use.axes(summed) for summed in param.get_metadata("names")[: param.get_metadata("into")])
    return tuple(axis for each in axes for axis in each if rules.mesh.size(axis) > 1)


def _fit(x, module: nnx.Module, names: Sequence[str], into: int, execution: Execution) -> bool:
    """Whether rows are few enough, and each of these weights is an array of the compute dtype alone."""
    x = x.x if isinstance(x, Late) else x
    if math.prod(x.shape[:-into]) > execution.fused_rows or execution.matmul != "dtype":
        return False
    beside = {name + end for name in names for end in (A, SCALE, MADE_FIRST)}
    if any(hasattr(module, name) for name in beside):
        return False
    params = [getattr(module, name) for name in names]
    return all(p.ndim == len(p.get_metadata("names")) for p in params)


def _run(
    kernel: Callable[..., list[jax.Array]],
    x: jax.Array | Late,
    module: nnx.Module,
    names: Sequence[str],
    execution: Execution,
    count: int,
    lead: int = 0,
) -> list[jax.Array]:
    """`kernel` on each device's rows [M, K] and weights [K, F]: `count` results [M, F], made as the first weights make.
    With `lead` so many dimensions stand before, and where rows have a norm one more result has rows alone."""
    rules, params = execution.rules, [getattr(module, name) for name in names]
    into, norm = params[0].get_metadata("into"), None
    if isinstance(x, Late):
        norm, x = late_norm(x.norm, execution), x.x
    specs = [rules.use.spec(*p.get_metadata("names")) for p in params]
    across = _across(module, names[0], execution)
    assert not (across and (norm or lead)), "a device has a part of what is summed up"
    rows = jax.typeof(x).sharding.spec[:-into]

    def local(x, arrays, norm):
        flat = [a.reshape(math.prod(a.shape[:into]), -1) for a in arrays]
        made = kernel(x.reshape(-1, flat[0].shape[0]), flat, norm)
        made = [jax.lax.psum(y, across) for y in made] if across else made
        each = [a.shape[into:] for a in arrays[:count]] + [()] * (len(made) - count)
        return [y.reshape(*y.shape[:lead], *x.shape[:-into], *shape) for y, shape in zip(made, each, strict=True)]

    of_x = jax.sharding.PartitionSpec(*rows, *specs[0][:into])
    each = [spec[into:] for spec in specs[:count]] + [()] * bool(lead and norm)
    out = [jax.sharding.PartitionSpec(*[None] * lead, *rows, *spec) for spec in each]
    run = shard_map(local, in_specs=(of_x, specs, jax.sharding.PartitionSpec()), out_specs=out)
    arrays = [gathered(module, name, execution).astype(execution.dtype) for name in names]
    return run(jax.reshard(x, of_x), arrays, norm)
