"""The program that copies what layers remember texts by (layers/context.py, SLOTTED) from slots to slots."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from shardlm.layers.context import SLOTTED, Pages
from shardlm.layers.page_layout import PageLayout
from shardlm.mesh import shard_map
from shardlm.rules import Rules
from shardlm.serve.state import ServeState

COPIES = 4  # slots that one call copies
NO_COPIES = (np.zeros((COPIES, 2), np.int32),)  # an example of a call's arguments


def copier(layout: PageLayout, rules: Rules, of_drafts: Callable = lambda drafts, pairs: drafts) -> Callable:
    """The program, a function of (nothing, the state, pairs), as a runner's programs are; `of_drafts` copies what a
    proposer remembers."""

    def run(_, state: ServeState, pairs: jax.Array) -> ServeState:
        pages = copy_memories(layout, rules, state.pages, pairs) if layout.memories else state.pages
        return dataclasses.replace(state, pages=pages, drafts=of_drafts(state.drafts, pairs))

    return run


def copy_memories(layout: PageLayout, rules: Rules, pages: Pages, pairs: jax.Array) -> Pages:
    """Pages in which the slots pairs[:, 1] are those of pairs[:, 0], int32 [COPIES, 2], in this order and in all
    layers."""
    specs = {name: rules.act.spec(*names) for name, names in SLOTTED.items() if name in pages}

    def local(memory: Pages, pairs: jax.Array) -> Pages:
        layers = {name: jnp.arange(a.shape[0] // layout.slots) * layout.slots for name, a in memory.items()}

        def one(i, memory):
            old, new = pairs[i]
            copied = {name: a.at[layers[name] + old].get(mode="promise_in_bounds") for name, a in memory.items()}
            return {
                name: a.at[layers[name] + new].set(copied[name], mode="promise_in_bounds") for name, a in memory.items()
            }

        return jax.lax.fori_loop(0, COPIES, one, memory)

    run = shard_map(local, in_specs=(specs, PartitionSpec()), out_specs=specs)
    return pages | run({name: pages[name] for name in specs}, pairs)
