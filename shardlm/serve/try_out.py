"""Whether projections of few tokens are kernels with norm and gate (layers/fused.py), and what is between them and
pages one too (ops/rotate_write.py): a GPU says which way is quicker, once the weights are there and before programs are
compiled."""

import concurrent.futures
import dataclasses
import functools
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from shardlm.compiled_together import compiled_together
from shardlm.generate import PAGE_SIZE, make_pages
from shardlm.layers.attention import AttentionConfig
from shardlm.layers.block import Block
from shardlm.layers.context import Pages
from shardlm.layers.mlp import Mlp
from shardlm.layers.paged import Paged
from shardlm.layers.param import Execution
from shardlm.models.transformer import Transformer
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops import few_rows
from shardlm.serve.option_types import Fused
from shardlm.serve.speculation.build import layouts_of
from shardlm.state import ModelDef

log = logging.getLogger(__name__)

TRIED = (few_rows.TILE, few_rows.MOST)  # tokens: kernels are made for either
LAYERS = 4  # so many that their weights are more than what a GPU keeps of them (50 MB of an H200)
CALLS, ROUNDS = 50, 3


def settled(wanted: Fused, model: ModelDef, params: Any, deterministic: bool) -> ModelDef:
    """The model with the tokens up to which its projections are such kernels. Says in the log how many, and why; call
    under the mesh of the parameters."""
    rows, why = chosen(wanted, model, params, deterministic)
    if rows:
        log.info("projections of up to %d tokens have norm and gate in them: %s", rows, why)
    elif wanted == "on":
        log.warning("fused_products=on is without effect: %s", why)
    else:
        log.info("projections have no norm and gate in them: %s", why)
    return with_rows(model, rows)


def with_rows(model: ModelDef, rows: int) -> ModelDef:
    """The model with such projections of up to so many tokens; call under its mesh. Made anew: what it runs by is in
    its graph, and a replaced `execution` would change nothing."""
    execution = dataclasses.replace(model.execution, fused_rows=rows)
    return model if model.execution == execution else ModelDef.make(model.config, execution)


def like_model(draft: ModelDef, params: Any, rows: int) -> ModelDef:
    """A draft model, of as many tokens as the model that it drafts for, where it can have them."""
    with jax.set_mesh(jax.tree.leaves(params)[0].sharding.mesh):
        return draft if _why_not(draft) else with_rows(draft, rows)


def chosen(wanted: Fused, model: ModelDef, params: Any, deterministic: bool) -> tuple[int, str]:
    """(tokens, why); 0: none."""
    reasons = {
        "fused_products=off": wanted == "off",
        "the deterministic mode has one program for all tokens": deterministic,
    }
    why = next((reason for reason, holds in reasons.items() if holds), _why_not(model))
    if why:
        return 0, why
    if wanted == "on":
        return few_rows.MOST, "fused_products=on"
    if jax.sharding.get_mesh().shape.get("pipeline", 1) > 1 or jax.process_count() > 1:
        return 0, "stages and several processes do not try out which is quicker; fused_products=on has it"
    return quickest(seconds(model, params))


def _why_not(model: ModelDef) -> str:
    """What a model under its mesh lacks for such kernels; "": nothing."""
    execution, platform = model.execution, _platform(jax.sharding.get_mesh())
    reasons = {
        f"the platform is {platform}": platform == "cpu",
        # float16 ends at 65,504: 6,000 in the stream and a norm's 16 are infinite where the root divides afterwards.
        f"the dtype is {jnp.dtype(execution.dtype).name}": jnp.dtype(execution.dtype) != jnp.bfloat16,
        "weights are in few bits": execution.weights != "dtype",
        "projections have adapters": bool(execution.lora.rank),
        "its layers read more than the stream": any(block.beside != "none" for block in model.config.blocks()),
        "no layer is attention and a feed-forward network": not _fit(model.config),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _platform(mesh: Mesh) -> str:
    return mesh.devices.flat[0].platform


def quickest(measured: dict[tuple[int, bool], float]) -> tuple[int, str]:
    """(tokens, why) from seconds by tokens and whether projections were fused: the most for which they were quicker, as
    for all fewer."""
    quicker = [measured[rows, True] < measured[rows, False] for rows in TRIED]
    found = [rows for rows, _ in itertools.takewhile(lambda pair: pair[1], zip(TRIED, quicker, strict=True))]
    said = (
        f"{rows} tokens {measured[rows, True] * 1e6:.0f} us, apart {measured[rows, False] * 1e6:.0f}" for rows in TRIED
    )
    return max(found, default=0), f"measured of a layer: {'; '.join(said)}"


def seconds(model: ModelDef, params: Any) -> dict[tuple[int, bool], float]:
    """Measured, of a layer without its experts, by tokens and whether its projections are fused."""
    spec = model.execution.rules.act.spec("batch", "seq", "embed")

    def x_of(rows: int) -> jax.Array:
        return jnp.ones((rows, 1, model.config.embed_dim), model.execution.dtype, out_sharding=spec)

    def lower(rows: int, fused: bool) -> Callable[[], Any]:
        own = dataclasses.replace(model.execution, fused_rows=rows * fused)
        run = functools.partial(_layers, dataclasses.replace(model, execution=own))
        try:
            return jax.jit(run).lower(params, x_of(rows)).compile
        except Exception as error:
            return functools.partial(_without, fused, error)

    cases = itertools.product(TRIED, (False, True))
    found = compiled_together((case, functools.partial(lower, *case)) for case in cases)
    programs = {case: _program(future, case[1]) for case, future in found}  # nothing is timed while others compile
    layers = CALLS * len(_fit(model.config))
    return {case: _timed(run, params, x_of(case[0])) / layers if run else math.inf for case, run in programs.items()}


def _program(future: concurrent.futures.Future, fused: bool) -> Callable[..., Any] | None:
    try:
        return future.result()
    except Exception as error:
        return _without(fused, error)


def _without(fused: bool, error: Exception) -> None:
    """A GPU that does not have the kernels is served without them, and that is said. Raises errors of other programs,
    and of Python's."""
    if not fused or isinstance(error, (AttributeError, TypeError, KeyError)):
        raise error
    log.warning("kernels with norm and gate cannot be compiled for this GPU: %s", error)


def _timed(run: Callable[..., Any], *args: Any) -> float:
    """The quickest of some calls, after one."""
    found = []
    for _ in range(1 + ROUNDS):
        started = time.perf_counter()
        jax.block_until_ready(run(*args))
        found.append(time.perf_counter() - started)
    return min(found[1:])


def _layers(model: ModelDef, params: Any, x: jax.Array) -> Any:
    """x [B, 1, D] so many times through some layers, without experts: each row attends to itself, in a page of its own.
    In a loop, of which the host starts one program: it takes longer to than a layer."""
    rows, act = x.shape[0], model.execution.rules.act
    [layout] = layouts_of(model, None, PAGE_SIZE, PAGE_SIZE, 1)
    layout = dataclasses.replace(layout, num_pages=1 + rows)
    of_rows = act.spec("batch", "whole_seq")
    table = jnp.broadcast_to(1 + jnp.arange(rows, dtype=jnp.int32)[:, None], (rows, len(layout.windows)))
    table, positions = (jax.reshard(a, of_rows) for a in (table, jnp.zeros((rows, 1), jnp.int32)))
    ctx = Paged.make(table, jnp.ones((rows, 1), bool, out_sharding=of_rows), layout, model.execution)
    blocks = list(zip(_fit(model.config), _blocks(model.model(params)), strict=True))

    def once(_, carry: tuple[jax.Array, Pages]) -> tuple[jax.Array, Pages]:
        x, pages = carry
        for layer, block in blocks:
            x, pages = _of_block(block, x, positions, ctx, pages, jnp.int32(layer), model.execution)
        return x, pages

    return jax.lax.fori_loop(0, CALLS, once, (x, make_pages(model, layout)))


def _of_block(block: Block, x, positions, ctx: Paged, pages: Pages, layer, execution: Execution):
    first = block.before(x, "attention", execution)
    h, pages, _ = block.attention(first, positions, ctx, pages, layer, execution)
    stream, x = x, x + h
    if isinstance(getattr(block, "mlp", None), Mlp):
        if not block.config.shares_norm:
            first = block.before(stream if block.config.parallel else x, "mlp", execution)
        x = x + block.mlp(first, None, execution)[0]
    return x, pages


def _fit(config: TransformerConfig) -> list[int]:
    """The first layers that attend to tokens and have one stream."""
    blocks = enumerate(config.blocks())
    fit = (i for i, block in blocks if isinstance(block.attention, AttentionConfig) and not block.streams)
    return list(itertools.islice(fit, LAYERS))


def _blocks(model: Transformer) -> Iterator[Block]:
    """Those of a model whose layers are apart."""
    for i in _fit(model.config):
        graph, state = nnx.split(model.segments[i].blocks)
        yield from nnx.merge(graph, jax.tree.map(lambda a: a[0], state))
