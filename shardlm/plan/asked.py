"""What a user asks of the planner on a command line, as the planner takes it."""

import os
from collections.abc import Callable
from typing import Any

from shardlm.clusters import Fabric
from shardlm.errors import ShardlmError
from shardlm.hardware_file import SHIPPED, load_hardware
from shardlm.models.transformer_config import TransformerConfig
from shardlm.network.profile import load_profile, save_profile
from shardlm.plan.budget import Budget
from shardlm.plan.cluster import Cluster
from shardlm.plan.local import cluster_of_profile, measure_here
from shardlm.plan.sketch import active_parameters, parameters_of
from shardlm.plan.target import Size
from shardlm.prices import PRICES, price_of
from shardlm.train.config import RunConfig

LOCAL = "local"  # --gpu=local
Say = Callable[[str], Any]  # is told of work that takes long as it begins


def silent(_: str) -> None:
    """For who wants to hear nothing."""


def check_size(size: Size | None, shape: TransformerConfig) -> None:
    """Raises ShardlmError where a target names a model's size and this one has another, in all its weights and in those
    that a token takes part in; modules that predict further tokens count in neither."""
    if size:
        alone = shape.without_mtp()
        size.check(parameters_of(alone), active_parameters(alone))


def cluster_of(
    gpu: str | None,
    cluster: str | None,
    num_gpus: int | None,
    gpus_per_host: int = 0,
    file: str | None = None,
    profile: str | os.PathLike | None = None,
    say: Say = print,
    fabric: Fabric | None = None,
) -> Cluster:
    """The cluster of a GPU's or a cluster's name; of a measured profile's file (--profile=FILE alone); of the devices
    here (--gpu=local), which are measured, telling `say`, and whose profile is then saved where one is named. The
    number of devices may be left out with a profile. `fabric` joins the hosts in place of the cluster's own, of a GPU's
    name InfiniBand. Raises ShardlmError for what is missing, unknown or does not fit.
    """
    known = load_hardware(file) if file else SHIPPED
    if fabric and (gpu == LOCAL or profile):
        raise ShardlmError(f"--fabric={fabric}: a profile's links were measured; leave out --fabric or the profile")
    if gpu == LOCAL or profile:
        return _measured(gpu, cluster, num_gpus or 0, gpus_per_host, known, profile, say)
    if gpu and cluster:
        own = known.cluster(cluster).gpu
        raise ShardlmError(
            f"--gpu={gpu} and --cluster={cluster} each say which GPUs there are (those of {cluster} are {own}); "
            "leave out one of them"
        )
    if not num_gpus or not (gpu or cluster):
        raise ShardlmError("--num_gpus=N and either --gpu=NAME or --cluster=NAME are needed, for instance --gpu=h100")
    if gpu:
        return Cluster.of(known.gpu(gpu), num_gpus, gpus_per_host, fabric=fabric or "infiniband")
    kind = known.cluster(cluster)
    host = gpus_per_host or min(kind.gpus_per_host, num_gpus)
    return Cluster.of(known.gpu(kind.gpu), num_gpus, host, kind.nic_bytes_per_second, fabric or kind.fabric)


def _measured(gpu, cluster, num_gpus, gpus_per_host, known, profile, say) -> Cluster:
    if cluster or gpu not in (LOCAL, None):
        raise ShardlmError(
            f"a profile{' and --gpu=local stand' if gpu == LOCAL else ' stands'} for --gpu and --cluster: leave out "
            f"{f'--cluster={cluster}' if cluster else f'--gpu={gpu}'}, or what is measured"
        )
    if gpu is None:
        return cluster_of_profile(load_profile(profile), num_gpus, gpus_per_host, known)
    found = measure_here(say)
    if profile:
        save_profile(found, profile)
        say(f"saved to {profile}: --profile={profile} plans with it again")
    return cluster_of_profile(found, num_gpus, gpus_per_host, known)


def budget_of(
    config: RunConfig, cluster: Cluster, tokens: float, dollars_per_gpu_hour: float, at: str | None = None
) -> Budget:
    """The run's length, by default all its steps, and a GPU's price, by default what the lists say: of the provider
    whose kind of cluster `at` is, else of all."""
    train = config.train
    tokens = tokens or float(train.steps) * train.global_batch * train.seq_len
    if dollars_per_gpu_hour:
        return Budget(tokens, dollars_per_gpu_hour, "as given")
    return Budget(tokens, *list_price(cluster.gpu.name, at))


def list_price(gpu: str, cluster: str | None = None) -> tuple[float, str]:
    """Dollars of a GPU-hour and in words where they are from: the middle of what a cluster's provider lists ("aws-p5":
    aws), of what all list where it lists none; 0 where no price is known."""
    known = [price for price in PRICES if price.gpu == gpu]
    provider = cluster.partition("-")[0] if cluster else ""
    own = [price for price in known if price.provider == provider]
    if not known:
        return 0.0, ""
    prices = price_of(gpu, own or known)
    names = ", ".join(sorted({price.provider for price in prices.prices}))
    return prices.typical, f"list price of {names}" if len(prices.prices) == 1 else f"median of list prices of {names}"
