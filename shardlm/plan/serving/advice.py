"""Hardware for a serving target: of each kind of cluster the best replica, how many of them the rate takes, and what
they cost. The words around it are serving/advice_output.py's."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from shardlm.clusters import ClusterKind
from shardlm.errors import ShardlmError
from shardlm.hardware_file import SHIPPED, Hardware
from shardlm.plan.advice import SYSTEMS, kind_named
from shardlm.plan.asked import Say, list_price, silent
from shardlm.plan.cluster import Cluster
from shardlm.plan.serving.attainment import fewest_gpus
from shardlm.plan.serving.case import ServingCase
from shardlm.plan.serving.change import why_not
from shardlm.plan.serving.search import ServingPlan, best_on, meshes

KINDS = ("l40s", *SYSTEMS)
MOST_HOSTS = 8  # of one replica


@dataclasses.dataclass(frozen=True)
class ServingOffer:
    """What a kind of cluster has for a target.

    plan      of the replica whose copies together take the fewest GPUs
    others    the same of replicas of other numbers of GPUs, the fewest GPUs first
    times     by attainment, of requests that come at random to the replica (arrivals.times_of_requests)
    counted   by attainment, of those others' numbers of GPUs those of which fewer replicas will not do; of the rest
              that is not known (attainment.Fewest)
    """

    kind: ClusterKind
    plan: ServingPlan
    others: tuple[ServingPlan, ...]
    dollars_per_gpu_hour: float
    price_source: str
    times: Mapping[str, Any] | None = None
    counted: frozenset[int] = frozenset()

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
    say: Say = silent,
) -> ServingAdvice:
    """Looks at every kind of cluster of `names`, or GPU in hosts of eight.

    case_on  what is to be served, at which rate, on a cluster
    fixed    sizes of axes of a replica's mesh that are not searched
    say      is told which kind is looked at, and on which meshes requests are tried

    Raises ShardlmError for a name that is neither, and for a case that cannot be.
    """
    start = time.perf_counter()
    kinds = [kind_named(name, hardware) for name in dict.fromkeys(names)]
    offers, nothing = [], []
    found: dict[tuple, _Plans | str] = {}
    for kind in kinds:
        hosts = (kind.gpu, kind.gpus_per_host)
        key = (*hosts, kind.nic_bytes_per_second, kind.fabric)
        if hosts in found:  # replicas within a host, whatever joins the hosts
            key = hosts
        elif key not in found:
            say(f"looking at {kind.name} ({kind.gpu}) ...")
            plans = _by_size(case_on, kind, hardware, fixed, say)
            if not isinstance(plans, str) and plans.best.gpus_per_replica <= kind.gpus_per_host:
                key = hosts
            found[key] = plans
        plans = found[key]
        if isinstance(plans, str):
            nothing.append((kind, plans))
            continue
        price = (dollars_per_gpu_hour, "as given") if dollars_per_gpu_hour else list_price(kind.gpu, kind.name)
        offers.append(ServingOffer(kind, plans.best, plans.others, *price, plans.times, plans.counted))
    offers.sort(key=lambda offer: (not offer.dollars_per_gpu_hour, offer.dollars_per_hour, offer.num_gpus))
    return ServingAdvice(tuple(offers), tuple(nothing), time.perf_counter() - start)


@dataclasses.dataclass(frozen=True)
class _Plans:
    """What a ServingOffer has of them."""

    best: ServingPlan
    others: tuple[ServingPlan, ...]
    times: Mapping[str, Any] | None = None
    counted: frozenset[int] = frozenset()


def _by_size(
    case_on: Callable[[Cluster], ServingCase],
    kind: ClusterKind,
    hardware: Hardware,
    fixed: Mapping[str, int],
    say: Say,
) -> _Plans | str:
    """The best plan for each number of GPUs of a replica, the fewest GPUs in all first: of those within a host, else
    within two, four, ...; why there is none."""
    hosts, late, tried = 1, "", 0
    while True:
        count = hosts * kind.gpus_per_host
        gpu, network = hardware.gpu(kind.gpu), (kind.nic_bytes_per_second, kind.fabric)
        cluster = Cluster.of(gpu, count, kind.gpus_per_host, *network)
        case = case_on(cluster)
        plans = sorted((p for p in _plans(case, fixed) if p.gpus_per_replica > tried), key=_order)
        best: dict[int, ServingPlan] = {}
        for plan in plans:
            best.setdefault(plan.gpus_per_replica, plan)
        if plans and not case.attainment:
            return _Plans(plans[0], tuple(best.values())[1:])
        if plans:
            try:
                found = fewest_gpus(plans, say)
                return _Plans(found.plan, found.others, found.times, found.counted)
            except ShardlmError as error:
                late, tried = str(error), count
        if hosts == MOST_HOSTS:
            return late or why_not(case, fixed)
        hosts *= 2


def _plans(case: ServingCase, fixed: Mapping[str, int]) -> Iterator[ServingPlan]:
    for mesh in meshes(case, case.cluster.num_gpus, fixed):
        with contextlib.suppress(ShardlmError):  # said by why_not, where it is all of them
            yield best_on(case.on(mesh=mesh))


def _order(plan: ServingPlan) -> tuple[float, float]:
    """Fewer GPUs, and of equally many what answers sooner."""
    return plan.num_gpus, plan.usual.ttft_seconds
