"""What a user asks of the planner on a command line, as the planner takes it."""

from shardlm.errors import ShardlmError
from shardlm.hardware_file import SHIPPED, load_hardware
from shardlm.plan.answer import Budget
from shardlm.plan.cluster import Cluster
from shardlm.prices import PRICES, price_of
from shardlm.train.config import RunConfig


def cluster_of(
    gpu: str | None, cluster: str | None, num_gpus: int | None, gpus_per_host: int = 0, file: str | None = None
) -> Cluster:
    """The cluster of a GPU's or a cluster's name. Raises ShardlmError for what is missing, unknown or does not fit."""
    known = load_hardware(file) if file else SHIPPED
    if not num_gpus or bool(gpu) == bool(cluster):
        raise ShardlmError("--num_gpus=N and either --gpu=NAME or --cluster=NAME are needed, for instance --gpu=h100")
    if gpu:
        return Cluster.of(known.gpu(gpu), num_gpus, gpus_per_host)
    kind = known.cluster(cluster)
    host = gpus_per_host or min(kind.gpus_per_host, num_gpus)
    return Cluster.of(known.gpu(kind.gpu), num_gpus, host, kind.nic_bytes_per_second)


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
