"""What a user asks of the planner on a command line, as the planner takes it."""

import os
from collections.abc import Callable
from typing import Any

from shardlm.errors import ShardlmError
from shardlm.hardware_file import SHIPPED, load_hardware
from shardlm.network.profile import load_profile, save_profile
from shardlm.plan.answer import Budget
from shardlm.plan.cluster import Cluster
from shardlm.plan.local import cluster_of_profile, measure_here
from shardlm.prices import PRICES, price_of
from shardlm.train.config import RunConfig

LOCAL = "local"  # --gpu=local


def cluster_of(
    gpu: str | None,
    cluster: str | None,
    num_gpus: int | None,
    gpus_per_host: int = 0,
    file: str | None = None,
    profile: str | os.PathLike | None = None,
    say: Callable[[str], Any] = print,
) -> Cluster:
    """The cluster of a GPU's or a cluster's name; of a measured profile's file (--profile=FILE alone); of the devices
    here (--gpu=local), which are measured, telling `say`, and whose profile is then saved where one is named. The
    number of devices may be left out with a profile. Raises ShardlmError for what is missing, unknown or does not fit.
    """
    known = load_hardware(file) if file else SHIPPED
    if gpu == LOCAL or profile:
        return _measured(gpu, cluster, num_gpus or 0, gpus_per_host, known, profile, say)
    if not num_gpus or bool(gpu) == bool(cluster):
        raise ShardlmError("--num_gpus=N and either --gpu=NAME or --cluster=NAME are needed, for instance --gpu=h100")
    if gpu:
        return Cluster.of(known.gpu(gpu), num_gpus, gpus_per_host)
    kind = known.cluster(cluster)
    host = gpus_per_host or min(kind.gpus_per_host, num_gpus)
    return Cluster.of(known.gpu(kind.gpu), num_gpus, host, kind.nic_bytes_per_second)


def _measured(gpu, cluster, num_gpus, gpus_per_host, known, profile, say) -> Cluster:
    if cluster or gpu not in (LOCAL, None):
        raise ShardlmError(
            f"a profile stands for --gpu and --cluster: leave out {f'--gpu={gpu}' if gpu else f'--cluster={cluster}'}, "
            "or leave out the profile"
        )
    if gpu is None:
        return cluster_of_profile(load_profile(profile), num_gpus, gpus_per_host, known)
    found = measure_here(say)
    if profile:
        save_profile(found, profile)
        say(f"saved to {profile}: --profile={profile} plans with it again")
    return cluster_of_profile(found, num_gpus, gpus_per_host, known)


def budget_of(config: RunConfig, cluster: Cluster, tokens: float, dollars_per_gpu_hour: float) -> Budget:
    """The run's length, by default all its steps, and a GPU's price, by default what the lists typically say."""
    train = config.train
    tokens = tokens or float(train.steps) * train.global_batch * train.seq_len
    if dollars_per_gpu_hour:
        return Budget(tokens, dollars_per_gpu_hour, "as given")
    if not any(price.gpu == cluster.gpu.name for price in PRICES):
        return Budget(tokens)
    prices = price_of(cluster.gpu.name)
    names = ", ".join(sorted({price.provider for price in prices.prices}))
    return Budget(tokens, prices.typical, f"the median of list prices of {names}")
