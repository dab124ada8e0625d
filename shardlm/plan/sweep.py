"""What if: one thing varied - the number of GPUs, the GPU, the cluster, a field of the configuration or one that is
searched - and the best plan for each of its values.

All else stays: with the number of GPUs also the global batch (strong scaling), unless rows per GPU are kept (weak
scaling). The run's tokens are those of the configuration as given, so that days and dollars compare like with like.
"""

import dataclasses
import time

from shardlm.clusters import Fabric
from shardlm.config import override
from shardlm.errors import ShardlmError
from shardlm.hardware_file import SHIPPED, Hardware
from shardlm.plan.asked import LOCAL, budget_of, cluster_of
from shardlm.plan.budget import Budget
from shardlm.plan.change import Change, first_change
from shardlm.plan.cluster import Cluster
from shardlm.plan.constraints import FIELDS, FREE, Constraints
from shardlm.plan.local import cluster_of_profile
from shardlm.plan.plan import Plan
from shardlm.plan.search import search
from shardlm.plan.training_images import RowImages
from shardlm.train.config import RunConfig

NUM_GPUS, GPU, CLUSTER = HARDWARE_FIELDS = ("num_gpus", "gpu", "cluster")


@dataclasses.dataclass(frozen=True)
class Over:
    """What is varied: one of HARDWARE_FIELDS, a path of the configuration or a searched field; its values as text."""

    field: str
    values: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> "Over":
        """From num_gpus=64,128. Raises ShardlmError for what is no field with values."""
        field, _, values = text.partition("=")
        words = tuple(values.split(","))
        if not field or not all(words):
            raise ShardlmError(f"{text!r} is no sweep; write FIELD=VALUE,VALUE, for instance num_gpus=64,128,256")
        twice = next((word for i, word in enumerate(words) if word in words[:i]), None)
        if twice:
            raise ShardlmError(f"{text}: {twice} is there twice; give each value once")
        return cls(field, words)


def base_cluster(
    over: Over,
    gpu: str | None,
    cluster: str | None,
    num_gpus: int | None,
    gpus_per_host: int = 0,
    file: str | None = None,
    profile: str | None = None,
    fabric: Fabric | None = None,
) -> Cluster:
    """What asked.cluster_of gives, with the largest or the first of the values for what is varied.

    Raises ShardlmError where that is given besides, and as cluster_of does.
    """
    given = {NUM_GPUS: num_gpus, GPU: gpu, CLUSTER: cluster}
    if LOCAL in (gpu, over.values[0]):
        raise ShardlmError(
            f"--gpu={LOCAL}: a sweep measures nothing; give the machine's profile, which launch.plan --gpu={LOCAL} "
            "--profile=FILE saves, as --profile=FILE"
        )
    if profile and over.field in (GPU, CLUSTER):
        raise ShardlmError(f"--profile is of one machine, and the sweep varies the {over.field}; leave out one of them")
    if given.get(over.field):
        raise ShardlmError(f"--{over.field}={given[over.field]} is what the sweep varies; leave it out")
    if fabric and over.field == CLUSTER:
        raise ShardlmError(f"--fabric={fabric}: each cluster of the sweep has its own; leave it out")
    if over.field == NUM_GPUS:
        num_gpus = max(int(value) if value.isdigit() else 0 for value in over.values) or 1
    elif over.field in (GPU, CLUSTER):
        other = CLUSTER if over.field == GPU else GPU
        if given[other]:
            raise ShardlmError(f"--{other}={given[other]} says the {over.field} too, which is varied; leave it out")
        gpu, cluster = (over.values[0], None) if over.field == GPU else (None, over.values[0])
    return cluster_of(gpu, cluster, num_gpus, gpus_per_host, file, profile, fabric=fabric)


@dataclasses.dataclass(frozen=True)
class Case:
    """What one value asks for. Read for all values before any is searched, so that a wrong one is said at once."""

    value: str
    config: RunConfig
    cluster: Cluster
    constraints: Constraints
    budget: Budget
    images: RowImages | None = None


@dataclasses.dataclass(frozen=True)
class Row:
    """What one value gives.

    plan        the fastest that fits; None where none does
    why         there is none
    change      that would make it fit; None where it fits, or no single change would
    considered  configurations that were looked at
    """

    case: Case
    plan: Plan | None
    why: str
    change: Change | None
    considered: int


@dataclasses.dataclass(frozen=True)
class Sweep:
    """seconds  that it took"""

    over: Over
    rows: tuple[Row, ...]
    seconds: float

    @property
    def fits(self) -> bool:
        """Whether anything does."""
        return any(row.plan for row in self.rows)

    def throughput(self) -> list[tuple[int, float, bool]]:
        """(number of GPUs, tokens/s of the best plan, whether one fits), in the order of the values."""
        return [
            (row.case.cluster.num_gpus, row.plan.cost.tokens_per_second if row.plan else 0.0, row.plan is not None)
            for row in self.rows
        ]


def sweep(
    config: RunConfig,
    cluster: Cluster,
    over: Over,
    constraints: Constraints = FREE,
    *,
    tokens: float = 0,
    dollars_per_gpu_hour: float = 0,
    scale_batch: bool = False,
    hardware: Hardware = SHIPPED,
    images: RowImages | None = None,
) -> Sweep:
    """The best plan for each value. `cluster` says what is not varied; tokens and price as in asked.budget_of.

    images       of each row
    scale_batch  keeps the rows per GPU of the smallest number of GPUs, which has the configuration's global batch

    Raises ShardlmError for a field or a value that does not exist; a value that nothing runs or fits with has a row
    that says so.
    """
    if scale_batch and over.field != NUM_GPUS:
        raise ShardlmError(f"scale_batch goes with a sweep of {NUM_GPUS}, not of {over.field}; leave it out")
    start = time.perf_counter()
    tokens = budget_of(config, cluster, tokens, dollars_per_gpu_hour).tokens
    asked = [_asked(config, cluster, over.field, value, constraints, hardware) for value in over.values]
    if scale_batch:
        fewest = min(there.num_gpus for _, there, _ in asked)
        asked = [(_scaled(one, there.num_gpus, fewest), there, rules) for one, there, rules in asked]
    cases = []
    for value, (one, there, rules) in zip(over.values, asked, strict=True):
        at = value if over.field == CLUSTER else None
        budget = budget_of(one, there, tokens, dollars_per_gpu_hour, at)
        cases.append(Case(value, one, there, rules, budget, images))
    rows = tuple(map(best, cases))
    return Sweep(over, rows, time.perf_counter() - start)


def best(case: Case) -> Row:
    """The fastest plan of a case, or why there is none."""
    config, cluster, constraints = case.config, case.cluster, case.constraints
    try:
        found = search(config, cluster, constraints, every=False, images=case.images)
    except ShardlmError as error:
        return Row(case, None, str(error), None, 0)
    if found.plans:
        return Row(case, found.plans[0], "", None, found.considered)
    least = found.smallest
    why = f"nothing fits: the smallest plan needs {gib(least.memory.total)} of {gib(cluster.gpu.hbm_bytes)} GiB"
    return Row(case, None, why, first_change(config, cluster, constraints, case.images), found.considered)


def _asked(
    config: RunConfig, cluster: Cluster, field: str, value: str, constraints: Constraints, hardware: Hardware
) -> tuple[RunConfig, Cluster, Constraints]:
    if field == NUM_GPUS:
        if not value.isdigit() or not int(value):
            raise ShardlmError(f"{NUM_GPUS}={value}: a number of GPUs is a whole number of at least 1")
        return config, _with(cluster, int(value), hardware), constraints
    if field == GPU:
        gpu = hardware.gpu(value)
        return config, Cluster.of(gpu, cluster.num_gpus, cluster.gpus_per_host, fabric=cluster.fabric), constraints
    if field == CLUSTER:
        kind = hardware.cluster(value)
        host = min(kind.gpus_per_host, cluster.num_gpus)
        there = Cluster.of(hardware.gpu(kind.gpu), cluster.num_gpus, host, kind.nic_bytes_per_second, kind.fabric)
        return config, there, constraints
    if constraints.names(field):
        raise ShardlmError(f"{constraints.of(field)}: {field} is what the sweep varies; leave it out")
    if field in FIELDS:
        more = Constraints.parse([f"{field}={value}"])
        return config, cluster, Constraints((*constraints.items, *more.items))
    try:
        return override(config, [(field, value)]), cluster, constraints
    except ShardlmError as error:
        raise ShardlmError(f"sweep of {field}: {error} (or one of {', '.join(HARDWARE_FIELDS)})") from error


def _with(cluster: Cluster, count: int, hardware: Hardware) -> Cluster:
    """So many GPUs; fewer than a host's are part of one. CPU devices are all of one host, which they share."""
    host = min(cluster.gpus_per_host, count)
    if cluster.measured is not None:
        return cluster_of_profile(cluster.measured, count, 0 if cluster.is_cpu else host, hardware)
    return Cluster.of(cluster.gpu, count, host, cluster.nic_bytes_per_second, cluster.fabric)


def _scaled(config: RunConfig, num_gpus: int, fewest: int) -> RunConfig:
    rows, over = divmod(config.train.global_batch * num_gpus, fewest)
    if over:
        raise ShardlmError(
            f"scale_batch: a global batch of {config.train.global_batch} rows on {fewest} GPUs is "
            f"{config.train.global_batch * num_gpus / fewest:g} on {num_gpus}, which is not whole; choose multiples of "
            f"{fewest} GPUs"
        )
    return dataclasses.replace(config, train=dataclasses.replace(config.train, global_batch=rows))


def gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.1f}"


def around(
    config: RunConfig, cluster: Cluster, constraints: Constraints = FREE, images: RowImages | None = None
) -> list[tuple[int, float, bool]]:
    """`Sweep.throughput` of a quarter to four times the cluster's GPUs, at the same global batch."""
    host = min(cluster.gpus_per_host, cluster.num_gpus)
    counts = [int(cluster.num_gpus * times) for times in (0.25, 0.5, 1, 2, 4)]
    whole = tuple(str(count) for count in counts if count >= host and count % host == 0)
    return sweep(config, cluster, Over(NUM_GPUS, whole), constraints, images=images).throughput()
