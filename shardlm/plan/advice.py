"""Hardware for a training target: of each kind of cluster the fewest GPUs that reach so many tokens in so many days
(ladder.py), and what they cost. The words around it are advice_output.py's."""

import dataclasses
import time
from collections.abc import Sequence

from shardlm.clusters import ClusterKind
from shardlm.hardware_file import SHIPPED, Hardware
from shardlm.plan.alike import Shared
from shardlm.plan.asked import Say, list_price, silent
from shardlm.plan.budget import Budget
from shardlm.plan.cluster import NIC
from shardlm.plan.constraints import FREE, Constraints
from shardlm.plan.ladder import Ladder, Point
from shardlm.plan.target import TrainingTarget
from shardlm.train.config import RunConfig

# Tokens of the largest global batch of Llama 3 405B (https://arxiv.org/abs/2407.21783, section 3.4.1).
MOST_BATCH = 16 * 2**20
SYSTEMS = ("dgx-a100", "dgx-h100", "dgx-h200", "dgx-b200", "gb200-nvl72", "dgx-b300", "gb300-nvl72")


@dataclasses.dataclass(frozen=True)
class Offer:
    """What a kind of cluster has for a target.

    least_gpus  whose peak rates together the target takes; no plan needs fewer
    point    the fewest GPUs that reach it; where none do, the fastest of all that were tried
    tried    all that were looked at, by the number of GPUs
    beyond   twice as many GPUs, where that was asked for
    """

    kind: ClusterKind
    target: TrainingTarget
    least_gpus: float
    point: Point
    tried: tuple[Point, ...]
    budget: Budget
    max_dollars: float
    beyond: Point | None = None

    @property
    def in_time(self) -> bool:
        return self.point.rate >= self.target.tokens_per_second

    @property
    def reached(self) -> bool:
        """In time, and for the dollars; a price that is not known exceeds nothing."""
        return self.in_time and not (self.max_dollars and self.dollars > self.max_dollars)

    @property
    def days(self) -> float:
        return self.budget.days(self.point.plan)

    @property
    def dollars(self) -> float:
        return self.budget.dollars(self.point.plan)

    @property
    def megawatt_hours(self) -> float:
        """Of the GPUs at their power limit; hosts, network and cooling take more."""
        plan = self.point.plan
        return plan.gpu.watts * plan.cluster.num_gpus * self.days * 24 / 1e6


@dataclasses.dataclass(frozen=True)
class Advice:
    """offers   those that reach the target first, by dollars and then by days; those without a price after those with
    nothing     kinds on which nothing fits or runs, and why
    """

    config: RunConfig
    target: TrainingTarget
    offers: tuple[Offer, ...]
    nothing: tuple[tuple[ClusterKind, str], ...]
    considered: int
    seconds: float

    @property
    def best(self) -> Offer | None:
        return self.offers[0] if self.offers and self.offers[0].reached else None


def advise(
    config: RunConfig,
    target: TrainingTarget,
    constraints: Constraints = FREE,
    *,
    names: Sequence[str] = SYSTEMS,
    max_dollars: float = 0,
    max_batch_tokens: int = 0,
    dollars_per_gpu_hour: float = 0,
    hardware: Hardware = SHIPPED,
    say: Say = silent,
) -> Advice:
    """Looks at every kind of cluster of `names`, or GPU as NVIDIA builds it into hosts.

    max_dollars       that the run may cost; 0: anything
    max_batch_tokens  up to which the global batch may be raised; 0: MOST_BATCH
    say               is told which kind is looked at, as that takes long

    Raises ShardlmError for a name that is neither, and where constraints leave no choice.
    """
    start = time.perf_counter()
    kinds = [kind_named(name, hardware) for name in dict.fromkeys(names)]
    rows = max(config.train.global_batch, (max_batch_tokens or MOST_BATCH) // config.train.seq_len)
    ladders: dict[Hosts, Ladder] = {}
    shared = Shared()
    offers, nothing = [], []
    for kind in kinds:
        gpu = hardware.gpu(kind.gpu)
        say(f"looking at {kind.name} ({gpu.name}) ...")
        new = Ladder(config, kind, gpu, constraints, target.tokens_per_second, rows, shared)
        ladder = ladders.setdefault(_hosts(kind), new)
        point = ladder.fewest()
        if point is None:
            nothing.append((kind, ladder.tried[-1].why))
            continue
        price = (dollars_per_gpu_hour, "as given") if dollars_per_gpu_hour else list_price(gpu.name, kind.name)
        budget = Budget(target.tokens, *price)
        offers.append(Offer(kind, target, ladder.least, point, ladder.tried, budget, max_dollars))
    offers.sort(key=lambda o: (not o.reached, not o.in_time, not o.budget.dollars_per_gpu_hour, o.dollars, o.days))
    if offers and offers[0].reached:
        twice = ladders[_hosts(offers[0].kind)].beyond(offers[0].point)
        offers[0] = dataclasses.replace(offers[0], beyond=twice)
    considered = sum(ladder.considered for ladder in ladders.values())
    return Advice(config, target, tuple(offers), tuple(nothing), considered, time.perf_counter() - start)


Hosts = tuple[str, int, float, str]


def _hosts(kind: ClusterKind) -> Hosts:
    """What kinds of cluster that are one search have in common."""
    return kind.gpu, kind.gpus_per_host, kind.nic_bytes_per_second, kind.fabric


def kind_named(name: str, hardware: Hardware) -> ClusterKind:
    """A kind of cluster, or of a GPU's name hosts of eight with its network. Raises ShardlmError for neither."""
    if name.lower() in hardware.gpus:
        gpu = hardware.gpu(name)
        return ClusterKind(gpu.name, gpu.name, 8, gpu.nic_bytes_per_second or NIC, "infiniband", gpu.datasheet)
    return hardware.cluster(name)
