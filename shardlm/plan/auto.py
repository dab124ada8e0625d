"""The mesh of a run on the devices that are there: what `--config.mesh=auto` means."""

from collections.abc import Sequence

import jax

from shardlm import hardware
from shardlm.config import override
from shardlm.errors import ShardlmError
from shardlm.network.profile import Profile
from shardlm.plan.cluster import Cluster
from shardlm.plan.constraints import FIELDS, Constraints
from shardlm.plan.local import check_machine, cluster_of_profile
from shardlm.plan.plan import Plan
from shardlm.plan.search import search, settings
from shardlm.train.config import RunConfig


def cluster_of_devices(devices: Sequence[jax.Device], profile: Profile | None = None) -> Cluster:
    """The cluster that these devices are, with the rates of a profile where one is given. Raises ShardlmError for
    devices whose figures are not known, and for a profile of others."""
    if profile:
        check_machine(profile, devices)
        hosts = len({device.process_index for device in devices})
        return cluster_of_profile(profile, len(devices), len(devices) // hosts)
    gpu = hardware.lookup(devices[0].device_kind)
    if gpu is None:
        raise ShardlmError(
            f"mesh=auto plans with the figures of a GPU, and none are known of {devices[0].device_kind!r}; set the "
            "mesh's sizes, or measure them (python -m launch.topology --profile=FILE) and give --hardware_profile=FILE "
            f"(known GPUs: {', '.join(hardware.GPUS)})"
        )
    hosts = len({device.process_index for device in devices})
    return Cluster.of(gpu, len(devices), len(devices) // hosts)


def fixed_fields(given: Sequence[tuple[str, str]]) -> list[str]:
    """The constraints that overrides of searched fields mean; a mesh's -1 leaves its axis free."""
    return [f"{path}={text}" for path, text in given if path in FIELDS and text != "-1"]


def auto_mesh(config: RunConfig, cluster: Cluster, given: Sequence[tuple[str, str]]) -> tuple[RunConfig, Plan]:
    """The configuration with the fastest mesh that fits and what goes with it (rules, remat, microbatches, schedule),
    and its plan. What was `given` as overrides of these fields stays.

    Raises ShardlmError where nothing fits or can run.
    """
    found = search(config, cluster, Constraints.parse(fixed_fields(given)))
    if not found.plans:
        least = found.smallest
        raise ShardlmError(
            f"mesh=auto: nothing fits on {cluster.num_gpus} x {cluster.gpu.name}; the least is "
            f"{least.memory.total / 2**30:.1f} GiB a GPU of {cluster.gpu.hbm_bytes / 2**30:.1f} (estimated), with "
            f"{least.config.mesh}. See python -m launch.plan for what would make it fit"
        )
    best = found.plans[0]
    return override(config, [(path, str(value)) for path, value in settings(best.config).items()]), best
