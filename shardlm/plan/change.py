"""What to change where nothing fits: the shortest changes after which something does, and the fewest GPUs. By formulas;
answer.py has them compiled."""

import dataclasses
from collections.abc import Iterator
from typing import get_args

from shardlm.errors import ShardlmError
from shardlm.hardware import GPUS
from shardlm.moments import Moments
from shardlm.plan.cluster import Cluster
from shardlm.plan.constraints import Constraints
from shardlm.plan.plan import Plan
from shardlm.plan.ranked import Ranked
from shardlm.plan.search import first_fit
from shardlm.plan.training_images import RowImages
from shardlm.plan.verify import Verified
from shardlm.train.config import RunConfig

MOST_GPUS = 2**17


@dataclasses.dataclass(frozen=True)
class Change:
    """Something to change, in words, and a plan that fits with it; `verified` as of a Ranked."""

    what: str
    plan: Plan
    verified: Verified | None = None

    @property
    def ranked(self) -> Ranked:
        return Ranked(self.plan, self.verified)


def changes(
    config: RunConfig, cluster: Cluster, constraints: Constraints, images: RowImages | None = None
) -> list[Change]:
    """Single changes after which a configuration whose rows have `images` fits, the least intrusive first: constraints,
    the batch, the bits of moments, the GPU, the row's length, the number of GPUs."""
    return list(_found(config, cluster, constraints, images))


def first_change(
    config: RunConfig, cluster: Cluster, constraints: Constraints, images: RowImages | None = None
) -> Change | None:
    """The least intrusive alone; None where none of them helps."""
    return next(_found(config, cluster, constraints, images), None)


def _found(config: RunConfig, cluster: Cluster, constraints: Constraints, images: RowImages | None) -> Iterator[Change]:
    for what, changed, other, rules in _tried(config, cluster, constraints):
        plan = _fit(changed, other, rules, images)
        if plan:
            yield Change(what, plan)
    # More CPU devices are no more memory.
    more = None if cluster.is_cpu else fewest_gpus(config, cluster, constraints, images)
    if more:
        yield more


def fewest_gpus(
    config: RunConfig, cluster: Cluster, constraints: Constraints, images: RowImages | None = None
) -> Change | None:
    """The fewest hosts, doubled from the cluster's, over which the configuration fits; the number is then lowered to
    the least that fits as far as whole hosts allow."""
    count, plan = cluster.num_gpus, None
    while plan is None and count < MOST_GPUS:
        count *= 2
        plan = _fit(config, _with(cluster, count), constraints, images)
    if plan is None:
        return None
    low, high = count // 2, count
    while high - low > cluster.gpus_per_host and (low + high) // 2 % cluster.gpus_per_host == 0:
        middle = (low + high) // 2
        between = _fit(config, _with(cluster, middle), constraints, images)
        low, high, plan = (low, middle, between) if between else (middle, high, plan)
    return Change(f"num_gpus={high}", plan)


def _tried(
    config: RunConfig, cluster: Cluster, constraints: Constraints
) -> Iterator[tuple[str, RunConfig, Cluster, Constraints]]:
    for one in constraints.items:
        rest = Constraints(tuple(other for other in constraints.items if other is not one))
        yield f"without {one}", config, cluster, rest
    train = config.train
    if train.global_batch > 1:
        half = dataclasses.replace(config, train=dataclasses.replace(train, global_batch=train.global_batch // 2))
        yield f"train.global_batch={train.global_batch // 2}", half, cluster, constraints
    yield from _fewer_bits(config, cluster, constraints)
    for gpu in sorted(GPUS.values(), key=lambda g: g.hbm_bytes):
        if gpu.generation == cluster.gpu.generation and gpu.hbm_bytes > 1.05 * cluster.gpu.hbm_bytes:
            other = Cluster.of(gpu, cluster.num_gpus, cluster.gpus_per_host, fabric=cluster.fabric)
            yield f"gpu={gpu.name}", config, other, constraints
    shorter = dataclasses.replace(config, train=dataclasses.replace(train, seq_len=max(1, train.seq_len // 2)))
    yield f"train.seq_len={train.seq_len // 2}", shorter, cluster, constraints


def _fewer_bits(
    config: RunConfig, cluster: Cluster, constraints: Constraints
) -> Iterator[tuple[str, RunConfig, Cluster, Constraints]]:
    """With the optimizer's moments in these, where nothing is said of them."""
    optim = config.optim
    if optim.name == "adafactor" or optim.moments != "float32" or constraints.names("optim.moments"):
        return
    for kind in get_args(Moments)[1:] if optim.name != "sgd" or optim.b1 else ():
        held = dataclasses.replace(config, optim=dataclasses.replace(optim, moments=kind))
        yield f"optim.moments={kind}", held, cluster, constraints


def _fit(config: RunConfig, cluster: Cluster, constraints: Constraints, images: RowImages | None) -> Plan | None:
    try:
        return first_fit(config, cluster, constraints, images)
    except ShardlmError:
        return None


def _with(cluster: Cluster, num_gpus: int) -> Cluster:
    return dataclasses.replace(cluster, num_gpus=num_gpus, gpus_per_host=max(cluster.gpus_per_host, min(8, num_gpus)))
