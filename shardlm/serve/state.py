"""What serving keeps on the device between programs: the pages of all layers, and the state of every slot."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardlm.generate import make_pages
from shardlm.layers.context import Pages
from shardlm.layers.page_layout import PageLayout
from shardlm.ops.batch_sampling import Edits, RowSettings
from shardlm.ops.penalties import TokenCounts, empty_counts
from shardlm.serve.sampling_params import MAX_BIASES
from shardlm.state import ModelDef

MAX_BANNED = 32  # stop tokens of a request that are held back, by min_tokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    """Of each slot and, last, of one that padding has: S + 1 rows.

    last      int32 [S + 1], the token that was sampled last
    position  int32 [S + 1], its position, which the host does not know while drafts are verified
    told      int8 [S + 1], what is told of tokens besides their log-probability: 1 their rank, 2 other tokens too
    allowed   int32 [S + 1, ceil(V / 32)], tokens that a grammar allows next; -1 everywhere without one
    counts    what was said, where penalties are asked for
    shift     int32 [S + 1], how far rotations are from the place of a token, after images on three axes; None where the
              model has none
    """

    last: jax.Array
    position: jax.Array
    settings: RowSettings
    edits: Edits
    told: jax.Array
    allowed: jax.Array
    counts: TokenCounts
    shift: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ServeState:
    """Donated to every program. `drafts` is what a proposer of drafts keeps (speculation/); vectors [places, (1 + deep)
    * D], of the images of prompts that are being read (encoder_cache.py), None where the model does not see. Of
    pipeline stages the last has slots and drafts, and the first has vectors."""

    pages: Pages
    slots: Slots | None
    drafts: Any = ()
    vectors: jax.Array | None = None


def empty_state(
    model: ModelDef,
    layout: PageLayout,
    page_size: int,
    max_rows: int,
    drafts: Callable[[], Any] = tuple,
    vectors: tuple[int, int] | None = None,
    axes: bool = False,
) -> ServeState:
    """Inside jit, under the model's mesh. `drafts` makes a proposer's part; `vectors`: their shape; `axes`: whether
    tokens have positions on three."""
    rows, vocab = max_rows + 1, model.config.vocab_size
    slots = Slots(
        last=jnp.zeros(rows, jnp.int32),
        position=jnp.zeros(rows, jnp.int32),
        settings=jax.tree.map(jnp.asarray, RowSettings.defaults(rows)),
        edits=jax.tree.map(jnp.asarray, no_edits(rows)),
        told=jnp.zeros(rows, jnp.int8),
        allowed=jnp.full((rows, -(-vocab // 32)), -1, jnp.int32),
        counts=empty_counts(rows, vocab),
        shift=jnp.zeros(rows, jnp.int32) if axes else None,
    )
    own = empty_stage(model, layout, page_size, vectors)
    return dataclasses.replace(own, slots=slots, drafts=drafts())


def empty_stage(
    model: ModelDef, layout: PageLayout, page_size: int, vectors: tuple[int, int] | None = None
) -> ServeState:
    """The same of a stage that is not the last: pages, and vectors."""
    seen = jnp.zeros(vectors, model.execution.dtype) if vectors else None
    return ServeState(make_pages(model, layout, page_size), None, (), seen)


def no_edits(rows: int) -> Edits:
    """As numpy arrays that a host fills in."""
    return Edits(
        np.full((rows, MAX_BIASES), -1, np.int32),
        np.zeros((rows, MAX_BIASES), np.float32),
        np.full((rows, MAX_BANNED), -1, np.int32),
    )


def take(tree: Any, rows: jax.Array) -> Any:
    """These rows of every array; all of them are there."""
    return jax.tree.map(lambda a: a.at[rows].get(mode="promise_in_bounds", wrap_negative_indices=False), tree)


def put(tree: Any, rows: jax.Array, new: Any) -> Any:
    """Every array with these rows int32 [R] replaced, no two of them the same but for the last row, which padding has
    and which stays as it is: XLA writes 16-bit numbers to rows that may be the same by compare-and-swap."""

    def replaced(a: jax.Array, b: jax.Array) -> jax.Array:
        nowhere = len(a) + jnp.arange(len(rows), dtype=rows.dtype)
        at = jnp.where(rows < len(a) - 1, rows, nowhere)
        return a.at[at].set(b, mode="drop", wrap_negative_indices=False, unique_indices=True)

    return jax.tree.map(replaced, tree, new)
