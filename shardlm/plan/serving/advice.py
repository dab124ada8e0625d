"""Hardware for a serving target: of each kind of cluster the best replica, how many of them the rate takes, and what
they cost. The words around it are serving/advice_output.py's."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from shardlm.clusters import ClusterKind
from shardlm.errors import ShardlmError
from shardlm.hardware_file import SHIPPED, Hardware
from shardlm.plan.advice import SYSTEMS, kind_named
from shardlm.plan.asked import list_price
from shardlm.plan.cluster import Cluster
from shardlm.plan.serving.case import ServingCase
from shardlm.plan.serving.change import why_not
from shardlm.plan.serving.search import ServingPlan, meshes

KINDS = ("l40s", *SYSTEMS)
MOST_HOSTS = 8  # of one replica


@dataclasses.dataclass(frozen=True)
class ServingOffer:
    """What a kind of cluster has for a target.

    plan      of the replica whose copies together take the fewest GPUs
    others    the same of replicas of other numbers of GPUs, the fewest GPUs first
    """

    kind: ClusterKind
    plan: ServingPlan
    others: tuple[ServingPlan, ...]
    dollars_per_gpu_hour: float
    price_source: str

    @property
    def num_gpus(self) -> int:
        return self.plan.num_gpus

    @property
    def dollars_per_hour(self) -> float:
        """Of the GPUs that are used, whole hosts or not; 0 where no price is known."""
        return self.num_gpus * self.dollars_per_gpu_hour

    def dollars_per_million(self, tokens_of_request: int) -> float:
        """Of a million tokens at the rate asked for, `tokens_of_request` of each request counted."""
        return self.dollars_per_hour / (self.plan.case.request_rate * 3600 * tokens_of_request) * 1e6


@dataclasses.dataclass(frozen=True)
class ServingAdvice:
    """offers   by dollars, those without a price last, by GPUs
    nothing  kinds on which no replica fits or is as fast as asked for, and why
    """

    offers: tuple[ServingOffer, ...]
    nothing: tuple[tuple[ClusterKind, str], ...]
    seconds: float


def advise_serving(
    case_on: Callable[[Cluster], ServingCase],
    *,
    names: Sequence[str] = KINDS,
    fixed: Mapping[str, int],
    dollars_per_gpu_hour: float = 0,
    hardware: Hardware = SHIPPED,
) -> ServingAdvice:
    """Looks at every kind of cluster of `names`, or GPU in hosts of eight.

    case_on  what is to be served, at which rate, on a cluster
    fixed    sizes of axes of a replica's mesh that are not searched

    Raises ShardlmError for a name that is neither, and for a case that cannot be.
    """
    start = time.perf_counter()
    kinds = [kind_named(name, hardware) for name in dict.fromkeys(names)]
    offers, nothing = [], []
    found: dict[tuple, tuple[ServingPlan, ...] | str] = {}  # kinds of equal GPUs, hosts and network are one search
    for kind in kinds:
        key = (kind.gpu, kind.gpus_per_host, kind.nic_bytes_per_second, kind.fabric)
        if key not in found:
            found[key] = _by_size(case_on, kind, hardware, fixed)
        plans = found[key]
        if isinstance(plans, str):
            nothing.append((kind, plans))
            continue
        price = (dollars_per_gpu_hour, "as given") if dollars_per_gpu_hour else list_price(kind.gpu, kind.name)
        offers.append(ServingOffer(kind, plans[0], plans[1:], *price))
    offers.sort(key=lambda offer: (not offer.dollars_per_gpu_hour, offer.dollars_per_hour, offer.num_gpus))
    return ServingAdvice(tuple(offers), tuple(nothing), time.perf_counter() - start)


def _by_size(
    case_on: Callable[[Cluster], ServingCase], kind: ClusterKind, hardware: Hardware, fixed: Mapping[str, int]
) -> tuple[ServingPlan, ...] | str:
    """The best plan for each number of GPUs of a replica, the fewest GPUs in all first: of those within a host, else
    within two, four, ...; why there is none."""
    hosts = 1
    while True:
        count = hosts * kind.gpus_per_host
        gpu, network = hardware.gpu(kind.gpu), (kind.nic_bytes_per_second, kind.fabric)
        cluster = Cluster.of(gpu, count, kind.gpus_per_host, *network)
        case = case_on(cluster)
        plans = sorted(_plans(case, fixed), key=_order)
        if plans:
            best: dict[int, ServingPlan] = {}
            for plan in plans:
                best.setdefault(plan.gpus_per_replica, plan)
            return tuple(best.values())
        if hosts == MOST_HOSTS:
            return why_not(case, fixed)
        hosts *= 2


def _plans(case: ServingCase, fixed: Mapping[str, int]) -> Iterator[ServingPlan]:
    for mesh in meshes(case, case.cluster.num_gpus, fixed):
        with contextlib.suppress(ShardlmError):  # said by why_not, where it is all of them
            yield ServingPlan.of(case.on(mesh=mesh))


def _order(plan: ServingPlan) -> tuple[float, float]:
    """Fewer GPUs, and of equally many what answers sooner."""
    return plan.num_gpus, plan.usual.ttft_seconds
