"""What communication costs beside the kernels that hide it.

Gathers of weights run behind the layer before, forward and backward; scatters of gradients behind the layer that the
backward pass does next; sums over replicas behind the backward pass of the last microbatch. The first gather and the
last scatter of a pass find nothing to hide behind. What a layer waits for (sequences over tensor, tokens to experts, a
microbatch from the stage before) is exposed in full.

In pipeline stages beside tensor it hides too much: of Llama 3 70B on 256 H100 as pipeline=4 x fsdp=4 x context=2 x
tensor=8, remat=none, the compiled program hides 0.14 of 1.29 s of gathers and scatters, as XLA starts a layer's gathers
after the kernels of the one before; here it is 0.49 of 1.13 (2.09 s a step, estimated 1.43).
"""

import dataclasses

from shardlm.plan.cluster import Cluster
from shardlm.plan.links import Route
from shardlm.plan.measured import MeasuredRoute, route_of
from shardlm.plan.sketch import Sketch
from shardlm.plan.traffic import GATHER, REDUCE, SCATTER, Sent


@dataclasses.dataclass(frozen=True)
class Timed:
    """What a device sends for one reason in a step, and how long; `exposed` of it no kernel covers.

    link     the slowest on its way: NVLink, PCIe or network
    forward  share of it that belongs to the forward pass
    cores    share of the device's cores that it takes
    """

    sent: Sent
    seconds: float
    exposed_seconds: float
    link: str
    forward: float
    cores: float

    @property
    def hidden_seconds(self) -> float:
        return self.seconds - self.exposed_seconds

    @property
    def slowing_seconds(self) -> float:
        """How much longer kernels take because this holds some of the cores beside them."""
        return self.hidden_seconds * self.cores / (1 - self.cores)


def overlapped(
    sent: list[Sent], sketch: Sketch, cluster: Cluster, forward: float, backward: float
) -> tuple[Timed, ...]:
    """Each with what of it is exposed, beside `forward` and `backward` seconds of kernels in a step."""
    routes = {axes: route_of(cluster.group(sketch.mesh, axes), cluster) for axes in {one.axes for one in sent}}
    timed = [_timed(one, routes[one.axes], sketch.config.remat) for one in sent]
    # While a layer waits on a link inside the island, weights move over the network.
    for one in timed:
        if not one.sent.beside and one.link != "network":
            forward += one.seconds * one.forward
            backward += one.seconds * (1 - one.forward)
    layers = [one for one in timed if one.sent.beside and one.sent.kind != REDUCE]
    # XLA:CPU runs a collective as any kernel: nothing beside it.
    hideable = 0.0 if cluster.is_cpu else 1 - 1 / max(1, sketch.shape.cached_layers)
    first = hideable * sum(one.seconds * one.forward for one in layers)
    then = hideable * sum(one.seconds * (1 - one.forward) for one in layers)
    sums = hideable * sum(one.seconds for one in timed if one.sent.beside and one.sent.kind == REDUCE)
    in_forward, in_backward = _part(forward, first), _part(backward, then)
    behind = _part((backward - then * in_backward) / sketch.passes, sums)
    return tuple(_with_hidden(one, hideable, in_forward, in_backward, behind) for one in timed)


def _part(window: float, wanted: float) -> float:
    """What of `wanted` seconds the window covers."""
    return max(0.0, min(1.0, window / wanted)) if wanted else 0.0


def _with_hidden(one: Timed, hideable: float, in_forward: float, in_backward: float, behind: float) -> Timed:
    if not one.sent.beside:
        return one
    part = behind if one.sent.kind == REDUCE else in_forward * one.forward + in_backward * (1 - one.forward)
    return dataclasses.replace(one, exposed_seconds=one.seconds * (1 - hideable * part))


def _timed(sent: Sent, route: Route | MeasuredRoute, remat: str) -> Timed:
    """Not hidden yet."""
    seconds = route.seconds(sent.kind, sent.nbytes, sent.count) + sent.host * sent.count
    return Timed(sent, seconds, seconds, route.name, _forward_share(sent, remat), route.cores)


def _forward_share(sent: Sent, remat: str) -> float:
    """Of gathers half, as the backward pass gathers again; of what layers exchange, one run of all."""
    weights = sent.beside and sent.kind in (GATHER, SCATTER, REDUCE) and "tensor" not in sent.axes
    if weights:
        return 0.5 if sent.kind == GATHER else 0.0
    return 1 / 2 if remat == "none" else 1 / 3
