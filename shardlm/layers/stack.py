"""Runs the layers: one scan over stacked blocks, with a policy for what the backward pass keeps. The stages of a
pipeline are pipeline.py's."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from shardlm.errors import ShardlmError
from shardlm.layers.block import Block, BlockConfig
from shardlm.layers.context import SELECTION, Context, Pages
from shardlm.layers.lora import A
from shardlm.layers.norm import NormConfig
from shardlm.layers.own_sums import is_own_product, own_axes, projections, spread
from shardlm.layers.param import Execution, Params
from shardlm.layers.pipeline import Schedule, stage_rules
from shardlm.layers.pipeline import pipelined as run_stages
from shardlm.layers.seen import VECTORS
from shardlm.layers.stage_weights import ahead, layer_of
from shardlm.ops.cudnn_attention import HEADS

Aux = dict[str, jax.Array]
Remat = Literal["none", "full", "dots", "names", "offload"]
"""What the forward pass keeps of each block for the backward pass:

none     everything but weights as layers use them, which are cast and gathered again; most memory
full     only each block's input; the block runs again (https://arxiv.org/abs/1604.06174)
dots     the outputs of weight matmuls, and of attention where cuDNN computes whole rows of it; norms and activations
         run again, and other attention
names    the block's input and the outputs of attention and MLP
offload  the block's input, in pinned host memory
"""


@dataclasses.dataclass(frozen=True)
class Segment:
    """`repeats` times the same pattern of blocks: one scan."""

    pattern: tuple[BlockConfig, ...]
    repeats: int

    @property
    def num_layers(self) -> int:
        return len(self.pattern) * self.repeats


def segments_of(blocks: Sequence[BlockConfig]) -> tuple[Segment, ...]:
    """The segments of a decoder with these layers: from the first on, always the pattern that repeats farthest."""
    found: list[Segment] = []
    start = 0
    while start < len(blocks):
        rest = blocks[start:]

        def repeats(period: int, rest=rest) -> int:
            same = itertools.takewhile(lambda i: rest[i] == rest[i % period], range(len(rest)))
            return sum(1 for _ in same) // period

        reach = {period: period * repeats(period) for period in range(1, len(rest) // 2 + 1) if repeats(period) > 1}
        period = max(reach, key=lambda p: (reach[p], -p), default=1)
        found.append(Segment(tuple(rest[:period]), repeats(period)))
        start += found[-1].num_layers
    return tuple(found)


class Stack(nnx.Module):
    """The blocks of one segment, whose layers `params` names, every parameter stacked [repeats, ...]. At most one
    segment of a model is `pipelined` where the mesh has a pipeline axis: run in stages (layers/pipeline.py)."""

    def __init__(
        self, segment: Segment, embed_dim: int, out_scale: float, norm: NormConfig, pipelined: bool, params: Params
    ):
        self.repeats, self.pipelined = segment.repeats, pipelined
        params, period = dataclasses.replace(params, stack=(segment.repeats,)), len(segment.pattern)
        of_block = [dataclasses.replace(params, layers=params.layers[i::period]) for i in range(period)]
        blocks = zip(segment.pattern, of_block, strict=True)
        self.blocks = nnx.List([Block(c, embed_dim, out_scale, norm, own) for c, own in blocks])

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        ctx: Context,
        pages: Pages | None,
        first_layer: int,
        execution: Execution,
        scan: "Scan | None" = None,
    ) -> tuple[jax.Array, Pages | None, Aux]:
        """x [B, T, D] through all layers of the segment, by `scan`, else scan_blocks; auxiliary values are stacked,
        [layers that have them, ...]."""
        graph, stacked = nnx.split(self.blocks)
        if not (self.pipelined and execution.rules.act.axes("microbatches")):
            return (scan or scan_blocks)(graph, stacked, x, positions, ctx, pages, first_layer, execution)
        inside = dataclasses.replace(execution, rules=stage_rules(execution.rules))

        def stage(held, masters, first, x, rows, full, repeat):
            stage_ctx = dataclasses.replace(ctx.within(rows), rules=inside.rules, held=full)
            own = held, masters, first, schedule.slots
            number = first_layer + repeat * len(self.blocks)
            return scan_stage(graph, *own, x, rows["positions"], stage_ctx, number, inside)

        schedule = self.schedule(execution)
        rows = ctx.rows(x.shape[-1]) | {"positions": positions}
        learned = {VECTORS: rows.pop(VECTORS)} if execution.learns_images and VECTORS in rows else {}
        how = {"rules": execution.rules, "schedule": schedule, "policy": kept_of_stage(execution.remat, stacked)}
        how |= {"dtype": ahead(execution), "spread": spreading(stacked, inside)}
        x, aux = run_stages(stage, stacked, x, rows, learned, **how)
        return x, pages, jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), aux)

    def schedule(self, execution: Execution) -> Schedule:
        """When each stage of a pipelined segment runs what."""
        return Schedule(self.repeats, execution.rules.mesh.pipeline, execution.rounds, execution.microbatches)


def scan_blocks(graph, stacked, x, positions, ctx: Context, pages: Pages | None, first_layer, execution: Execution):
    """One scan over blocks stacked [repeats, ...], under the remat policy. Returns as Stack does."""
    repeats = jax.tree.leaves(stacked)[0].shape[0]

    def layer(carry, inputs):
        x, pages, selection = carry
        index, state = inputs
        own = dataclasses.replace(ctx, selection=selection)
        x, pages, aux = run_repeat(graph, state, x, positions, own, pages, first_layer, index, execution)
        return (x, pages, aux.pop(SELECTION, None)), aux

    # x is made again only when the backward pass's own carry is there; weights come when they may. Else XLA makes the
    # last layer beside the head (Llama 3 8B on 8 H100: 12.5 GiB of temporaries, 11.5 so, and 0.3% more seconds, as x is
    # copied out of what was kept; compiled), and as it begins gathers a layer ahead, and all that leads to them,
    # attention a second time where tokens or sequences are gathered inside a layer (DeepSeek V3 on 1,024 as fsdp=32 x
    # expert=8 x context=4: 91.5 s a step and 54.8 GiB, 89.6 and 48.9 so); of layers outside a pipeline's stages, beside
    # the stages' backward pass (seed 17 16.4 | 14.9 GiB, 1.89 s both). Not in stages themselves: bound there (all
    # arguments, as jax 0.10.2 fails with a tuple in a checkpoint inside another), 8B in four takes 20.02 GiB of
    # temporaries either way and 4.68 | 4.71 s, llama3_70b_256 36.05 | 36.07 GiB and 22.8 | 23.0 s, V3 of 19 layers in
    # four 30.3 | 25.5 GiB and 16.3 | 16.9 s.
    # Without a loop weights are bound too: else XLA makes layers again before their gradients' turn (8 of 8B over 8
    # H100, remat=full: 12.7 GiB of temporaries for 7.3, and the same seconds; compiled).
    bound = (True, not execution.unroll) if execution.remat != "none" else False
    body = layer if pages is not None else rematerialised(layer, execution.remat, stacked, prevent_cse=bound)
    unroll = execution.unroll or repeats
    start = (x, pages, ctx.selection)
    (x, pages, selection), aux = jax.lax.scan(body, start, (jnp.arange(repeats), stacked), unroll=unroll)
    aux = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), aux)
    return x, pages, aux if selection is None else aux | {SELECTION: selection}


Scan = Callable[..., tuple[jax.Array, Pages | None, Aux]]
"""As scan_blocks."""


def traced_once() -> Scan:
    """scan_blocks for segments of which many are alike, as where each layer is one: those are traced once. Of Llama 3
    8B's 32 layers Python takes 3.5 s for a program, and 0.7 s so (measured, one core); XLA has the same operations."""

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def scan(graph, execution, shares, *rest):
        return scan_blocks(graph, *rest, dataclasses.replace(execution, shares=shares))

    def of_segment(graph, stacked, x, positions, ctx, pages, first_layer, execution):
        plain = dataclasses.replace(execution, shares=None)
        return scan(graph, plain, execution.shares, stacked, x, positions, ctx, pages, np.int32(first_layer))

    return of_segment


def scan_stage(graph, held, masters, first, slots: int, x, positions, ctx: Context, number, execution: Execution):
    """One scan over the blocks of a pipeline's stage in a tick, under the remat policy: `slots` from `first` on, of
    weights [n, ...] that stage_weights.py describes, the first of which is layer `number`. Returns (x, masters,
    auxiliary values [slots, blocks that have them, ...])."""

    def layer(carry, index):
        x, masters = carry
        state, masters = layer_of(held, masters, first + index)
        x, _, aux = run_repeat(graph, state, x, positions, ctx, None, number, index, execution)
        return (x, masters), aux

    body = rematerialised(layer, execution.remat, held)
    (x, masters), aux = jax.lax.scan(body, (x, masters), jnp.arange(slots), unroll=execution.unroll or slots)
    return x, masters, aux


def run_repeat(graph, state, x, positions, ctx: Context, pages: Pages | None, first_layer, index, execution: Execution):
    """x through the blocks of repeat `index` of a segment, whose weights `state` is. Returns (x, pages, auxiliary
    values [blocks that have them, ...], and the last choice of tokens as it is)."""
    found: dict[str, list] = {}
    blocks, own = nnx.merge(graph, state), ctx.of_repeat(index)
    for offset, block in enumerate(blocks):
        number = first_layer + index * len(blocks) + offset
        x, pages, aux = block(x, positions, own, pages, number, execution)
        if SELECTION in aux:
            own = dataclasses.replace(own, selection=aux.pop(SELECTION))
        for name, value in aux.items():
            found.setdefault(name, []).append(value)
    found = {name: jax.tree.map(lambda *a: jnp.stack(a), *values) for name, values in found.items()}
    return x, pages, found if own.selection is None else found | {SELECTION: own.selection}


def rematerialised(layer, remat: Remat, stacked, prevent_cse: bool | tuple[bool, ...] = False):
    """A layer under a remat policy by name; its weights are `stacked`. `prevent_cse`, of all arguments or each, binds
    them to the gradients that the backward pass takes. Raises ShardlmError for an unknown name."""
    # A scan already keeps XLA from merging the recomputation with the forward pass.
    return jax.checkpoint(layer, policy=kept(remat, stacked), prevent_cse=prevent_cse)


def kept(remat: Remat, stacked):
    """What a block keeps, as a policy of jax.checkpoint."""
    policies = jax.checkpoint_policies
    if remat == "none":
        return _all_but_weights(stacked)
    if remat == "full":
        if len({path[0] for path, _ in jax.tree.leaves_with_path(stacked)}) > 1:
            # Else all blocks of a pattern would be made again before the last one's gradients: of Qwen 3.5's four, with
            # three linear attentions, 6,144 tokens and embed_dim=1024, 4.7 GiB of temporaries, 3.3 so (compiled).
            return policies.save_only_these_names("block_input")
        return policies.nothing_saveable  # the input of what is recomputed is kept anyway
    if remat == "dots":
        products = policies.save_from_both_policies(_products(stacked), is_own_product)
        return policies.save_from_both_policies(products, policies.save_only_these_names(HEADS))
    if remat == "names":
        return policies.save_only_these_names("block_input", "attention_out", "mlp_out")
    if remat == "offload":
        return policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=["block_input"],
            offload_src="device",
            offload_dst="pinned_host",
        )
    raise ShardlmError(f"unknown remat policy {remat!r}; choose from {', '.join(get_args(Remat))}")


def _products(stacked):
    """Keeps weight matmuls, but for the second of an adapter: its sum with the projection's own is made again of what
    the first left, which is as narrow as the rank (Llama 3 8B with rank 16, 4,096 tokens: 10 GiB of 21; compiled)."""
    adapters = [a for path, a in jax.tree.leaves_with_path(stacked) if A in jax.tree_util.keystr(path)]
    ranks = {a.shape[-1] for a in adapters}

    def policy(primitive, *avals, **params):
        if not jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *avals, **params):
            return False
        (summed, _), _ = params["dimension_numbers"]
        return len(summed) > 1 or avals[0].shape[summed[0]] not in ranks

    return policy


def _all_but_weights(stacked):
    """Keeps all but what is made of a layer's weights by casting and gathering them, which is known by its shape: kept
    of every layer, Llama 3 8B in use is 14 GiB on each of the GPUs that it rests on in parts, and as much to write into
    stacks and read back; of a round of a pipeline's stage, its layers are a float32 copy every tick (8 layers of Llama
    3 8B, 2 stages x 2 rounds, tensor=2, 4 microbatches: 28.4 GiB of temporaries, 20.0 without and without masks). Nor
    numbers of fp8: jax rounds what a policy keeps as if the largest exponent stood for infinity, so that e4m3's numbers
    above 240 become NaN (jax 0.10.2 and 0.11.2)."""
    each = [a.shape[1:] for a in jax.tree.leaves(stacked)]
    shapes = set(each)

    def policy(primitive, *avals, **params):
        if primitive.name == "dynamic_slice":
            return avals[0].shape[1:] not in shapes
        if [a.shape[1:] for a in avals[: len(each)]] == each:
            return False  # layer_of: a stage's layer
        if primitive.name not in ("convert_element_type", "reshard"):
            return True
        made = jnp.dtype(params.get("new_dtype", avals[0].dtype))
        return avals[0].shape not in shapes and not (made.itemsize == 1 and jnp.issubdtype(made, jnp.floating))

    return policy


def spreading(stacked, execution: Execution) -> Callable:
    """What spreads a stage's masters [n, ...] over the devices that sum their gradients for themselves. Numbers of 8
    bits are multiplied by whole weights; beside adapters, projections have no gradients."""
    axes = own_axes(execution.rules) if execution.matmul == "dtype" and not execution.lora.rank else ()
    return functools.partial(spread, chosen=projections(stacked) if axes else [], axes=axes)


def kept_of_stage(remat: Remat, stacked):
    """The same of all blocks of a stage, whose inputs are not those of what is recomputed."""
    if remat in ("full", "dots"):
        inputs = jax.checkpoint_policies.save_only_these_names("block_input")
        own = kept(remat, stacked)
        return inputs if remat == "full" else jax.checkpoint_policies.save_from_both_policies(inputs, own)
    return kept(remat, stacked)
