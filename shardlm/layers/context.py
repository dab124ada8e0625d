"""What a block attends to. Blocks do not know training from serving: they call `ctx.attend`, and the context is
either the packed batch itself (packed.py) or a paged cache of what came before (paged.py)."""

from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp

from shardlm.layers.seen import Seen
from shardlm.ops.block_choice import BlockIndex, PooledIndex
from shardlm.ops.compression import Compressed
from shardlm.ops.gated_delta import BIAS, SKIP
from shardlm.ops.head_choice import HeadIndex
from shardlm.ops.kv_format import AXES, SCALE
from shardlm.ops.rope import Sines
from shardlm.ops.rotate_write import Unrotated
from shardlm.ops.token_choice import Index
from shardlm.rules import Rules, Table

Pages = dict[str, jax.Array]  # entry name -> [layers of a page * num_pages, page_size, K, H] (kv_format.order_of)
# What layers without pages remember a text by (ops/gated_delta.py, Memory), [layers * slots, ...]: the names of its
# dimensions. The last three are there where drafts are verified (ops/delta_drafts.py).
MEMORIES = {
    "state": (None, "heads", "head_dim", "head_dim"),
    "conv_q": (None, None, "kv_heads", "head_dim"),
    "conv_k": (None, None, "kv_heads", "head_dim"),
    "conv_v": (None, None, "heads", "head_dim"),
    "log_decay": (None, None, "heads"),
    "beta": (None, None, "heads"),
    "start": (None,),
}
CONVOLVED = "conv_v"  # the one that short convolutions have, which have no state (layers/short_conv.py)

# What is kept of each text beside them, in slots too and whole on each device, [layers that have it * slots, ...]: what
# the convolutions of n-grams see of its last tokens, and those tokens (layers/ngrams.py); with START behind the name,
# of how many of them it is known that they stay, where drafts are verified (ops/text_rows.py).
START = "_start"
NGRAMS = {"ngram_conv": (None, None, None, None), "ngram_tokens": (None, None)}
TEXTS = NGRAMS | {name + START: (None,) for name in NGRAMS}
SLOTTED = MEMORIES | TEXTS

ROWS = "c"  # the pages' entry of attention to entries that stand for several tokens (ops/compressed_pages.py)
INDEX = "i"  # the pages' entry that indexers' keys are in
INDEXES = (INDEX, INDEX + SCALE, INDEX + AXES)
SELECTION = "selection"  # and the name, among a block's auxiliary values, of the tokens that one chose
Selection = Any  # as a context has it: of packed rows bool [B, T, T], of pages what ops/paged_choice.py says

KEPT = "kept "  # before the names of keys and values that later layers read, among a block's auxiliary values

HANDED = "handed out"  # among a decoder's auxiliary values: the streams between some of its layers, side by side


class Context(Protocol):
    absorbs: ClassVar[bool]  # whether attention over latents (layers/mla.py) stays in the space of the latents
    weights: jax.Array | None  # float32 [B, T], of each token in the loss; None outside training
    inputs: jax.Array | None  # [L, B, T, P], what each layer takes of each token besides the stream
    selection: Selection | None  # what the last indexer chose, where layers share choices; None elsewhere
    tokens: jax.Array | None  # int32 [B, T], where layers look at the tokens themselves; None elsewhere
    faster: jax.Array | None  # float32 [dim / 2], factors on the frequencies of rotations; None: they are not learned
    ngrams: tuple[jax.Array, ...] | None  # [B, T, E] of each layer that has n-grams (layers/ngrams.py); None elsewhere
    seen: Seen | None  # of tokens that stand for images (layers/seen.py); None where the model does not see
    sines: Sines | None  # of this step's rotations, where they are made once for all layers
    turns: jax.Array | None  # int32 [B, T, 3], positions that rotations have, on three axes; None: those of the text

    @property
    def real(self) -> jax.Array:
        """bool [B, T], False for padding."""

    def of_repeat(self, index: jax.Array) -> "Context":
        """As the blocks of one repeat of a scanned pattern see it."""

    def backwards(self) -> "Context":
        """As layers see it in which no token sees one after it, inside of images neither."""

    def kept_by(self, name: str) -> tuple[jax.Array | None, jax.Array | None]:
        """The keys and values [B, T, K, H] of the last layer that keeps some under a name; None where they are in
        pages."""

    def rotates(self, pages: Pages | None, kv_name: str) -> bool:
        """Whether `attend` takes queries with keys and values before their rotation, with kv heads split so."""

    def attend(
        self,
        q: jax.Array | Unrotated,
        k: jax.Array | None,
        v: jax.Array | None,
        positions: jax.Array,
        pages: Pages | None,
        layer: jax.Array,
        *,
        scale: float,
        window: int,
        kv_name: str,
        softcap: float = 0.0,
        sinks: jax.Array | None = None,
        value_dim: int = 0,
        kv_heads: int = 0,
        chunk: int = 0,
        selection: Selection | None = None,
    ) -> tuple[jax.Array, Pages | None]:
        """q [B, T, N, H], k and v [B, T, K, H], positions int32 [B, T], layer int32 scalar. A token sees `window`
        positions, 0 for all before it, or those of its own `chunk`; `softcap` and `sinks` [N] are ops/attention.py's;
        `kv_name` names how the K dimension is split. Where v is None, values are the first `value_dim` of keys; where k
        is too, the `kv_heads` of another layer are in its pages. `selection`: the tokens that each query attends to,
        None: all. Where it `rotates`, q may have k and v in it, which are None then. Returns the heads' output [B, T,
        N, H] and the pages with k and v written."""

    def attend_compressed(
        self,
        q: jax.Array,
        kv: jax.Array,
        compressed: Compressed | None,
        positions: jax.Array,
        pages: Pages | None,
        layer: jax.Array,
        sinks: jax.Array,
        *,
        scale: float,
        window: int,
        rows: int,
    ) -> tuple[jax.Array, Pages | None]:
        """q [B, T, N, H] to the last `window` tokens' kv [B, T, H], keys and values of all heads, and to entries that
        stand for several tokens; sinks [N]. `rows`: in how many a layer keeps that in pages. Returns q's shape, and the
        pages with all that is new."""

    def select(
        self,
        index: Index | BlockIndex | PooledIndex | HeadIndex,
        positions: jax.Array,
        pages: Pages | None,
        layer: jax.Array,
    ) -> tuple[Selection | None, Pages | None]:
        """The tokens that each query attends to, None: all before it, since there are no more than it may; and the
        pages with the index's keys written."""

    def unselected(self, positions: jax.Array, pages: Pages | None, count: int) -> Selection | None:
        """What `select` gives for `count` tokens, of nothing yet."""

    def recur(
        self,
        x: dict[str, jax.Array],
        taps: dict[str, jax.Array],
        log_decay: jax.Array,
        beta: jax.Array,
        positions: jax.Array,
        pages: Pages | None,
        layer: jax.Array,
    ) -> tuple[jax.Array, Pages | None]:
        """Linear attention (ops/gated_delta.py, delta_net, with its shapes) to the text so far. Returns the heads'
        output [B, T, N, V] and the pages with what the text is remembered by."""

    def convolve_heads(
        self, x: jax.Array, taps: jax.Array, positions: jax.Array, pages: Pages | None, layer: jax.Array
    ) -> tuple[jax.Array, Pages | None]:
        """x [B, T, N, V], split as heads are, convolved over the tokens of a text with taps [N, V, W]
        (ops/short_conv.py). Returns (x's shape, the pages with what the text is remembered by)."""

    def preceded(
        self, name: str, tokens: jax.Array, count: int, none: int, positions: jax.Array, pages: Pages | None
    ) -> tuple[jax.Array, jax.Array, jax.Array, Pages | None]:
        """(tokens int32 [B, T] of whole rows; the `count` tokens before those of each row [B, count], `none` where its
        text has none; of which text of its row each token is int32 [B, T] as ops/short_conv.py has it; the pages with
        the last tokens under `name`)."""

    def convolve(
        self,
        name: str,
        x: jax.Array,
        taps: jax.Array,
        spacing: int,
        positions: jax.Array,
        pages: Pages | None,
        place: int,
    ) -> tuple[jax.Array, Pages | None]:
        """x [B, T, S, D], the sequence split as between blocks, convolved over the tokens of a text with taps [S, D, W]
        (ops/short_conv.py). Returns (x's shape, the pages with its last tokens under `name`, of the layer in this
        `place` among those that have some)."""


def one_per_device(kv: jax.Array, rules: Rules) -> jax.Array:
    """Whole kv heads [B, T, K, H], fewer than the devices that split heads, repeated so that each holds its own one."""
    ways = rules.mesh.size(*rules.act.axes("kv_heads"))
    split = rules.act.spec("batch", "whole_seq", "kv_heads", "head_dim")
    return jax.reshard(jnp.repeat(kv, ways // kv.shape[2], axis=2), split)


def one_group_each(
    x: dict[str, jax.Array], taps: dict[str, jax.Array], ways: int
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """What linear attention reads of one device [B, T, K, H] and its taps [K, ...], with fewer queries and keys than
    `ways` repeated, so that each of so many shares has the one that its values go with."""
    copies = max(1, ways // x["k"].shape[2])
    x = {name: a if name == "v" else jnp.repeat(a, copies, axis=2) for name, a in x.items()}
    return x, {name: jnp.repeat(a, copies, axis=0) if name[-1] in "qk" else a for name, a in taps.items()}


def rates_of(act: Table, log_decay: jax.Array) -> jax.sharding.PartitionSpec:
    """How decays are split, which are of heads [B, T, N] or of each number of their keys [B, T, N, H]."""
    return act.spec(*("batch", "whole_seq", "heads", "head_dim")[: log_decay.ndim])


def heads_of(act: Table, taps: dict[str, jax.Array]) -> dict[str, Any]:
    """How what linear attention reads is split: as heads are."""
    names = {"q": "kv_heads", "k": "kv_heads", "v": "heads"}
    biases = {BIAS + name: of for name, of in names.items()}
    of_taps = names | biases | {SKIP: "heads"}
    return {
        "x": {name: act.spec("batch", "whole_seq", of, "head_dim") for name, of in names.items()},
        "taps": {name: act.spec(of_taps[name], *("head_dim", None)[: a.ndim - 1]) for name, a in taps.items()},
        "each": act.spec("batch", "whole_seq", "heads"),
    }


def specs_of(compressed: Compressed | None, act: Table) -> Compressed | None:
    """How what entries are made of and chosen by is split: as tokens are; what a layer has of it is whole."""
    tokens = act.spec("batch", "whole_seq")
    return jax.tree.map_with_path(
        lambda path, a: jax.sharding.PartitionSpec() if path[-1].name in ("bias", "scale") else tokens, compressed
    )
