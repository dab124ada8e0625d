"""Models some of whose layers remember a text by arrays of one size (ops/gated_delta.py): what serving them takes. Each
request that runs has one slot of such memories, where pages grow with its length. A memory goes forward only: what it
was some tokens before is not kept; where drafts are verified it stays behind until it is known which of them were right
(ops/delta_drafts.py)."""

import itertools
import logging
import math
from collections.abc import Sequence

from shardlm.errors import ShardlmError
from shardlm.layers.context import MEMORIES
from shardlm.layers.page_layout import PageLayout
from shardlm.models.transformer_config import TransformerConfig
from shardlm.serve.snapshots import LEAST
from shardlm.state import ModelDef, memory_entries, text_entries

log = logging.getLogger(__name__)
MOST_OF_ROOM = 0.5  # of what is free, that memories take where it is not said how many requests run at once
SNAPSHOTS = 0.2  # of what these leave, that copies take by which prefixes are cached


def refuse(shape: TransformerConfig) -> None:
    """Raises ShardlmError, before weights are read, for a model that has no other layers."""
    if len(shape.memories) == shape.num_layers:
        raise ShardlmError("no layer of the model attends to tokens; a model that is served needs one that does")


def slot_bytes(model: ModelDef, unsure: int = 0) -> int:
    """Of what a layer of a stage remembers one text by, with so many tokens that may turn out wrong, over all its
    devices: those over which heads are not split have a copy each."""
    rules = model.execution.rules
    devices = rules.mesh.size("expert", "tensor")
    found = 0
    for name, (shape, dtype) in memory_entries(model, unsure).items():
        ways = rules.mesh.size(*rules.act.split(tuple(filter(None, MEMORIES[name]))))
        found += math.prod(shape) * dtype.itemsize * devices // ways
    return found


def request_bytes(model: ModelDef, layout: PageLayout) -> int:
    """Of what all layers of a stage remember one text by, n-grams' tokens included, over all its devices."""
    if not layout.memories:
        return 0
    devices = model.execution.rules.mesh.size("expert", "tensor")
    texts = (
        count * math.prod(shape) * dtype.itemsize for count, shape, dtype in text_entries(model, layout.unsure).values()
    )
    return layout.memories * slot_bytes(model, layout.unsure) + devices * sum(texts)


def rows_beside(slots: Sequence[int], rooms: Sequence[int], most: int) -> int:
    """How many requests, `most` at most, leave memories MOST_OF_ROOM of the room of each stage; `slots`: bytes of one
    in each. Raises ShardlmError where there is no room for one."""
    pairs = [(room, own) for room, own in zip(rooms, itertools.cycle(slots), strict=False) if own]
    rows = min((int(room * MOST_OF_ROOM) // own - 1 for room, own in pairs), default=most)
    if rows < 1:
        room, own = min(pairs)
        raise ShardlmError(
            f"a request's memory in layers of linear attention takes {own / 2**30:.2f} GiB, and {room / 2**30:.2f} GiB "
            "are free: raise gpu_memory_utilization, split the model over more devices, or quantise it"
        )
    return min(most, rows)


def snapshots_beside(slots: Sequence[int], rows: int, rooms: Sequence[int], length: int) -> int:
    """How many copies of memories (snapshots.py) there are beside those of so many requests of `length` tokens at most:
    as many as SNAPSHOTS of the rest of each stage's room holds, and as may be of use. 0 where there is no room for one,
    which the log says."""
    pairs = [(room - (rows + 1) * own, own) for room, own in zip(rooms, itertools.cycle(slots), strict=False) if own]
    if not pairs or length < LEAST:
        return 0
    fitting = min(int(max(0, room) * SNAPSHOTS) // own for room, own in pairs)
    if not fitting:
        log.info("prefix caching is off: no memory is left to copy what layers of linear attention remember")
    return min(fitting, rows * (length // LEAST))


def left_beside(slots: Sequence[int], rows: int, rooms: Sequence[int]) -> list[int]:
    """Of the room of each stage, what the memories of so many requests, and of padding, leave to pages. Raises
    ShardlmError where they take it all."""
    pairs = [(room, (rows + 1) * own) for room, own in zip(rooms, itertools.cycle(slots), strict=False)]
    for room, taken in pairs:
        if taken and taken >= room:
            raise ShardlmError(
                f"max_num_seqs={rows}: memories in layers of linear attention take {taken / 2**30:.2f} GiB of the "
                f"{room / 2**30:.2f} that there are for them and for pages; lower it, or raise kv_cache_bytes "
                "(--kv_cache_gib) or gpu_memory_utilization"
            )
    return [room - taken for room, taken in pairs]
