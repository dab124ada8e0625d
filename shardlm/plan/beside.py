"""The forward pass of a model that is not trained and stands beside the one that is: the teacher that a run learns
from, or the checkpoint as it was that preferences and rewarded replies are compared with. As formulas have it, from the
sketch of a run that would train it (Sketch.beside)."""

from collections.abc import Iterable, Iterator

from shardlm.plan.changed import changed
from shardlm.plan.op import Op
from shardlm.plan.sketch import Sketch
from shardlm.plan.traffic import Sent


def forward_ops(ops: Iterable[Op]) -> Iterator[Op]:
    """Of operations of a step, those of its forward pass. Layers that are alike have the very same."""
    made: dict[int, tuple[Op, Op]] = {}
    for op in ops:
        if not op.forward:
            continue
        if id(op) not in made:
            made[id(op)] = op, changed(op, count=op.forward, again=0.0)
        yield made[id(op)][1]


def turned_rows(sketch: Sketch) -> Iterator[Op]:
    """Of a forward pass that keeps nothing, over tensor: several rows are turned for each gather and scatter of their
    sequence and back, which is fused with no other kernel (compiled, of Llama 3 8B beside a model that is trained)."""
    if sketch.mesh.tensor > 1 and sketch.rows > 1:
        moved = 4 * 2 * sketch.itemsize * sketch.tokens * sketch.shape.embed_dim
        runs = sketch.passes * sketch.shape.num_layers
        yield Op("other", "rows turned", "memory", 0, moved, runs, runs)


def forward_weights(sent: Iterable[Sent]) -> Iterator[Sent]:
    """Of what is sent of weights that have no gradient, layers' for the forward pass and the backward one, the
    former."""
    for one in sent:
        again = one.why.startswith("segments.")
        yield changed(one, nbytes=one.nbytes / 2, count=one.count / 2) if again else one


def forward_activations(once: Iterable[Sent], twice: Iterable[Sent]) -> Iterator[Sent]:
    """Of what layers send in steps with one and with two forward passes, a single one."""
    for one, two in zip(once, twice, strict=True):
        yield changed(one, nbytes=two.nbytes - one.nbytes, count=max(two.count - one.count, 1))
