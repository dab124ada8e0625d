"""What communication costs beside the kernels that hide it.

Gathers of weights run behind the layer before, forward and backward; scatters of gradients behind the layer that the
backward pass does next, and so do sums of every microbatch; sums over replicas behind the backward pass of the last
microbatch. The first gather and the last scatter of a pass find nothing to hide behind. What the optimizer moves hides
behind what it does to other weights. In pipeline stages our programs hide little. What a layer waits for (sequences
over tensor, tokens to experts, a microbatch from the stage before) is exposed in full. Over PCIe, where weights take as
long as layers, it counts what XLA leaves before and between its loops over layers, and at their ends.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from shardlm.plan.changed import changed
from shardlm.plan.cluster import Cluster
from shardlm.plan.constants import PCIE
from shardlm.plan.links import Route
from shardlm.plan.measured import MeasuredRoute, route_of
from shardlm.plan.sketch import Sketch
from shardlm.plan.traffic import GATHER, RAGGED, REDUCE, SCATTER, Sent

# Of gathers and scatters inside pipeline stages, how much XLA runs beside kernels, where all could: its loop over a
# stage's few layers begins the second of two gathers behind the first layer's kernels. Compiled for H100: Llama 3 70B
# on 256 in 4 stages of 4 rounds 0.12 of gathers and of scatters (data=2 x fsdp=2 x context=2 x tensor=8), in 16 of 2
# rounds 0.10 and 0.59. DeepSeek V3 in 8 stages of 1F1B 0.22 and 0.79, of both 0.33. Of moves to and from a stage 0.01
# to 0.08 are hidden.
IN_STAGES = {"gpipe": 0.15, "circular": 0.15, "1f1b": 0.33}
# Of sums of gradients in every tick, over context or expert: 0.45 in 8 stages of 70B (zero1), 0.42 in V3.
SUMS_IN_STAGES = 0.4
# Where tokens are sent to experts one collective is under way at a time (xla_options.py): of gathers 0.24 is hidden, of
# scatters 0.42 (Mixtral on 32 so, compiled).
BESIDE_TOKENS = 0.3


@dataclasses.dataclass(frozen=True)
class SlowLink:
    """What our programs expose where PCIe joins the GPUs of a host, besides what outlasts the kernels. Nothing hides
    embedding and head: they come before, between and after the layers, and a loop that gathers has no room for another
    gather beside it.

    covered   of the seconds of layers' kernels, those behind which something can run: a layer's gathers begin behind
              the last kernels of the layer before, and its own last kernels run when all are there
    exchanged the same where experts are exchanged, for whose tokens weights wait
    forward   of layers' gathers, what no kernel covers however long they are: those of the layer's first products
    backward  the same of gathers and scatters
    sums      of sums of whole gradients in every layer; lone_sums: of layers that gather nothing
    in_stages as IN_STAGES has it, of schedules that go one way
    """

    covered: float
    exchanged: float
    forward: float
    backward: float
    sums: float
    lone_sums: float
    in_stages: float


# Read from programs compiled for L40S and RTX PRO 6000 with four collectives under way (jax 0.10.2): Llama 3 8B over
# fsdp=8 exposes 0.10 of gathers forward and 0.16 of what is sent backward, of 8 layers 0.10 and 0.24 (with RTX PRO 6000
# 0.11 and 0.19); as data=2 x fsdp=4 0.36 of sums, 8 layers of replicas 0.89. Mixtral over fsdp=4 x expert=2 hides 0.36
# of its kernels' seconds forward, 0.4 backward. As fsdp=2 x pipeline=4 0.8 of gathers and scatters are hidden, and of
# 1F1B no more than over NVLink.
PCIE_LINK = SlowLink(covered=0.85, exchanged=0.45, forward=0.12, backward=0.16, sums=0.36, lone_sums=0.9, in_stages=0.6)


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


def timed(sent: Iterable[Sent], sketch: Sketch, cluster: Cluster) -> list[Timed]:
    """How long each takes; nothing of it is hidden yet. Many are the same but for their reason: of layers of a pattern
    that are alike."""
    sent, remat = list(sent), sketch.config.remat
    routes = {axes: route_of(cluster.group(sketch.mesh, axes), cluster) for axes in {one.axes for one in sent}}
    known: dict[tuple, Timed] = {}
    found = []
    sums = Counter(filter(None, map(_sum, sent))) if cluster.is_cpu else {}
    for one in sent:
        key = (one.axes, one.kind, one.nbytes, one.shown, one.count, one.host, one.beside, one.update)
        if key in known:
            found.append(changed(known[key], sent=one))
        else:
            nbytes = one.shown_bytes if cluster.is_cpu and one.kind == RAGGED else one.nbytes  # whole buffers
            count = one.count / sums.get(_sum(one), 1)
            known[key] = _timed(one, nbytes, count, routes[one.axes], remat)
            found.append(known[key])
    return found


def keeping(comms: Iterable[Timed], remat: str) -> list[Timed]:
    """The same of a step that keeps something else of the forward pass."""
    shares = [(one, _forward_share(one.sent, remat)) for one in comms]
    return [one if share == one.forward else changed(one, forward=share) for one, share in shares]


def overlapped(
    comms: Sequence[Timed],
    sketch: Sketch,
    cluster: Cluster,
    forward: float,
    backward: float,
    in_stages: float = 1.0,
    update: float = 0.0,
    head: float = 0.0,
) -> tuple[Timed, ...]:
    """Each with what of it is exposed, beside `forward`, `backward` and the optimizer's `update` seconds of kernels in
    a step, of which `head` are the head's. `in_stages` is how much of what pipeline stages could hide is hidden; 1: by
    programs that hide all."""
    kernels = (forward - head / 3, backward - 2 * head / 3)  # of layers: a third of the head's are forward
    # While a layer waits on a link inside the island, weights move over the network.
    for one in comms:
        if not one.sent.beside and not one.sent.update and one.link != "network":
            forward += one.seconds * one.forward
            backward += one.seconds * (1 - one.forward)
    layers = [one for one in comms if one.sent.beside and not _last(one.sent, sketch)]
    # XLA:CPU runs a collective as any kernel: nothing beside it.
    hideable = 0.0 if cluster.is_cpu else 1 - 1 / max(1, sketch.shape.cached_layers)
    first = hideable * sum(one.seconds * one.forward for one in layers)
    then = hideable * sum(one.seconds * (1 - one.forward) for one in layers)
    sums = hideable * sum(one.seconds for one in comms if one.sent.beside and _last(one.sent, sketch))
    in_forward, in_backward = _part(forward, first), _part(backward, then)
    behind = _part((backward - then * in_backward) / sketch.passes, sums)
    updated = sum(one.seconds for one in comms if one.sent.update)
    behind_update = 0.0 if cluster.is_cpu else _part(update, updated)
    alone = in_stages < 1 and any(one.sent.kind == RAGGED for one in comms)
    share = in_stages if sketch.mesh.pipeline > 1 else BESIDE_TOKENS if alone else 1.0
    ours = in_stages < 1 and not (alone or cluster.is_cpu) and any(one.link == PCIE.name for one in comms)
    staged = ours and sketch.mesh.pipeline > 1 and not sketch.schedule.both_ways
    slow = None
    if ours and sketch.mesh.pipeline == 1:  # what waits for the same link covers nothing
        slow = _hidden_over_pcie(comms, sketch, *kernels)

    def exposed(one: Timed) -> Timed:
        if one.sent.update:
            return changed(one, exposed_seconds=one.seconds * (1 - behind_update))
        if slow and one.sent.beside and one.link == PCIE.name:
            return changed(one, exposed_seconds=one.seconds - slow(one))
        last = behind if _last(one.sent, sketch) else None
        part = PCIE_LINK.in_stages if staged and one.link == PCIE.name else share
        seconds = _in_stages(one, _hidden(one, hideable, in_forward, in_backward, last), part)
        return one if seconds == one.exposed_seconds else changed(one, exposed_seconds=seconds)

    return tuple(map(exposed, comms))


def _hidden_over_pcie(
    comms: Sequence[Timed], sketch: Sketch, forward: float, backward: float
) -> Callable[[Timed], float]:
    """Seconds that are hidden of what goes over a slow link, beside so many seconds of layers' kernels."""
    layers = [one for one in comms if one.sent.beside and not _at_ends(one.sent)]
    covered = PCIE_LINK.covered if sketch.mesh.expert == 1 else PCIE_LINK.exchanged
    first = _part(covered * forward, sum(one.seconds * one.forward for one in layers))
    then = _part(covered * backward, sum(one.seconds * (1 - one.forward) for one in layers))
    last = 1 / max(1, sketch.shape.cached_layers)  # of scatters, the last layer's
    gathers = any(one.sent.kind == GATHER for one in layers)
    exposed = {REDUCE: PCIE_LINK.sums if gathers else PCIE_LINK.lone_sums}

    def hidden(one: Timed) -> float:
        if _at_ends(one.sent):
            return 0.0
        most = 1 - exposed.get(one.sent.kind, PCIE_LINK.backward) - (0.0 if one.sent.kind == GATHER else last)
        in_forward, in_backward = min(first, 1 - PCIE_LINK.forward), min(then, max(0.0, most))
        return one.seconds * (in_forward * one.forward + in_backward * (1 - one.forward))

    return hidden


def _at_ends(sent: Sent) -> bool:
    """Whether it is of weights outside layers, as embedding and head."""
    return sent.kind in (GATHER, SCATTER, REDUCE) and not sent.why.startswith("segments.")


def _in_stages(one: Timed, hidden_seconds: float, share: float) -> float:
    """Exposed, with a share of what is hidden, and of moves between stages nothing but where all is. Sums in every tick
    are hidden by kernels of that tick, and not by the last microbatch's."""
    if share < 1 and one.sent.kind == REDUCE and one.sent.beside and one.sent.count > 1:
        return one.seconds * (1 - SUMS_IN_STAGES)
    kept = 0.0 if "pipeline" in one.sent.axes and share < 1 else share
    return one.seconds - kept * hidden_seconds


def _part(window: float, wanted: float) -> float:
    """What of `wanted` seconds the window covers."""
    return max(0.0, min(1.0, window / wanted)) if wanted else 0.0


def _last(sent: Sent, sketch: Sketch) -> bool:
    """Whether it is a sum over replicas, made once all microbatches are done, and not one of every layer."""
    return sent.kind == REDUCE and (sent.count < sketch.passes or sketch.passes == 1 or sketch.mesh.pipeline > 1)


def _hidden(one: Timed, hideable: float, in_forward: float, in_backward: float, last: float | None) -> float:
    """Seconds, where all that could be hidden is; `last` is what the last microbatch covers of such a sum."""
    if not one.sent.beside:
        return one.hidden_seconds
    part = in_forward * one.forward + in_backward * (1 - one.forward) if last is None else last
    return one.seconds * hideable * part


def _sum(sent: Sent) -> tuple | None:
    """What XLA:CPU makes one collective of: the gradients of a layer's weights that are summed, scattered or not."""
    return (sent.axes, sent.kind, sent.count) if sent.beside and sent.kind in (SCATTER, REDUCE) else None


def _timed(sent: Sent, nbytes: float, count: float, route: Route | MeasuredRoute, remat: str) -> Timed:
    """Not hidden yet."""
    seconds = route.seconds(sent.kind, nbytes, count) + sent.host * sent.count
    return Timed(sent, seconds, seconds, route.name, _forward_share(sent, remat), route.cores)


def _forward_share(sent: Sent, remat: str) -> float:
    """Of gathers half, as the backward pass gathers again; of what layers exchange, one run of all."""
    if sent.update:
        return 0.0
    weights = sent.beside and sent.kind in (GATHER, SCATTER, REDUCE) and "tensor" not in sent.axes
    if weights:
        return 0.5 if sent.kind == GATHER else 0.0
    return 1 / 2 if remat == "none" else 1 / 3
