"""Runs the layers: one scan over stacked blocks, with a policy for what the backward pass keeps."""

import dataclasses
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from shardlm.errors import ShardlmError
from shardlm.layers.block import Block, BlockConfig
from shardlm.layers.context import Context, Pages
from shardlm.layers.param import Execution, Params

Remat = Literal["none", "full", "dots", "names", "offload"]
"""What the forward pass keeps of each block for the backward pass:

none     everything; fastest, most memory
full     only the block's input; the block runs again (https://arxiv.org/abs/1604.06174)
dots     the outputs of weight matmuls; norms, activations and attention run again
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


class Stack(nnx.Module):
    """The blocks of one segment, every parameter stacked [repeats, ...]."""

    def __init__(self, segment: Segment, embed_dim: int, out_scale: float, norm_eps: float, params: Params):
        self.repeats = segment.repeats
        params = dataclasses.replace(params, stack=(segment.repeats,))
        self.blocks = nnx.List([Block(c, embed_dim, out_scale, norm_eps, params) for c in segment.pattern])

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        ctx: Context,
        pages: Pages | None,
        first_layer: int,
        execution: Execution,
    ) -> tuple[jax.Array, Pages | None, dict[str, jax.Array]]:
        """x [B, T, D] through all layers of the segment; auxiliary losses are summed over layers."""
        graph, stacked = nnx.split(self.blocks)

        def layer(carry, inputs):
            x, pages = carry
            index, state = inputs
            total: dict[str, jax.Array] = {}
            for offset, block in enumerate(nnx.merge(graph, state)):
                number = first_layer + index * len(self.blocks) + offset
                x, pages, aux = block(x, positions, ctx, pages, number, execution)
                total = {name: total.get(name, 0.0) + value for name, value in aux.items()}
            return (x, pages), total

        body = layer if pages is not None else rematerialised(layer, execution.remat)
        unroll = execution.unroll or self.repeats
        (x, pages), aux = jax.lax.scan(body, (x, pages), (jnp.arange(self.repeats), stacked), unroll=unroll)
        return x, pages, jax.tree.map(jnp.sum, aux)


def rematerialised(layer, remat: Remat):
    """The scan body under a remat policy by name. Raises ShardlmError for an unknown name."""
    policies = jax.checkpoint_policies
    if remat == "none":
        return layer
    if remat == "full":
        policy = policies.nothing_saveable
    elif remat == "dots":
        policy = policies.dots_with_no_batch_dims_saveable
    elif remat == "names":
        policy = policies.save_only_these_names("block_input", "attention_out", "mlp_out")
    elif remat == "offload":
        policy = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=["block_input"],
            offload_src="device",
            offload_dst="pinned_host",
        )
    else:
        raise ShardlmError(f"unknown remat policy {remat!r}; choose from {', '.join(get_args(Remat))}")
    # The scan already keeps XLA from merging the recomputation with the forward pass.
    return jax.checkpoint(layer, policy=policy, prevent_cse=False)
