"""What a step copies between a GPU and its host's memory, where state (train/offload.py) or layers' inputs
(remat="offload") rest there, and what of it no kernel hides."""

from shardlm.plan.activations import layer
from shardlm.plan.cluster import Cluster
from shardlm.plan.constants import GAP
from shardlm.plan.overlap import Timed
from shardlm.plan.sketch import Sketch
from shardlm.plan.state import MASTER, moments
from shardlm.plan.traffic import Sent

COPY, HOST = "copy", ("host",)  # as a profile names them (hlo/rows.py)
LINK = "PCIe"


def host_copies(sketch: Sketch, cluster: Cluster, forward: float, backward: float) -> tuple[Timed, ...]:
    """Beside `forward` and `backward` seconds of kernels. On a CPU both memories are one."""
    if cluster.is_cpu:
        return ()
    found = [*_state(sketch, cluster), *_inputs(sketch, cluster, forward, backward)]
    return tuple(one for one in found if one.sent.nbytes)


def _state(sketch: Sketch, cluster: Cluster) -> list[Timed]:
    """All of it comes for the update and goes back, a layer at a time: the update waits for it, and what goes back for
    the update, so that neither hides the other; weights come for the layers before. Compiled for H100, Llama 3 8B on 8:
    0.95 of the optimizer's state exposed, 0.98 with the weights."""
    offload, optim, rules = sketch.config.offload, sketch.config.optim, sketch.rules
    trained = [weight for weight in sketch.weights if weight.trained]
    found = []
    if offload.optimizer:
        average = MASTER * sum(weight.numbers(rules.optimizer) for weight in trained) if optim.ema_decay else 0
        nbytes = moments(trained, optim, rules.optimizer) + average
        found.append(_exposed(cluster, "the optimizer's state", 2 * nbytes, update=True))
    if offload.params:
        nbytes = MASTER * sum(weight.numbers(rules.rest) for weight in trained)
        found.append(_exposed(cluster, "weights", nbytes))
        found.append(_exposed(cluster, "weights for the update and back", 2 * nbytes, update=True))
    return found


def _exposed(cluster: Cluster, why: str, nbytes: float, update: bool = False) -> Timed:
    seconds = nbytes / cluster.host_bytes_per_second
    return Timed(Sent(HOST, why, nbytes, COPY, update=update), seconds, seconds, LINK, 0.0 if update else 1.0, 0.0)


def _inputs(sketch: Sketch, cluster: Cluster, forward: float, backward: float) -> list[Timed]:
    """Of each layer, there behind its kernels, and back before its gradients: XLA unrolls that loop twice, and begins
    the second layer's copy beside the first's kernels."""
    if sketch.config.remat != "offload":
        return []
    runs = sketch.passes / sketch.mesh.pipeline
    nbytes = runs * sum(
        segment.repeats * sum(layer(block, sketch).stream for block in segment.pattern)
        for segment in sketch.shape.segments
    )
    count = runs * sketch.shape.cached_layers
    seconds = nbytes / cluster.host_bytes_per_second + count * GAP
    there, back = (Sent(HOST, f"layers' inputs{way}", nbytes, COPY, count) for way in ("", " back"))
    return [
        Timed(there, seconds, max(0.0, seconds - forward), LINK, 1.0, 0.0),
        Timed(back, seconds, max(seconds / 2, seconds - backward), LINK, 0.0, 0.0),
    ]
