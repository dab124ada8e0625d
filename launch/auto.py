"""What launch.train asks of the planner, for the devices that are there: `--config.mesh=auto`, where it chooses the
mesh and what goes with it, and what a step is to take, beside a profile."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from shardlm.config import Resolved, leaves

AUTO = "--config.mesh=auto"


def split_auto(argv: Sequence[str]) -> tuple[list[str], bool]:
    """Takes AUTO out of a command line; (the rest, whether it was there)."""
    return [word for word in argv if word != AUTO], AUTO in argv


def given(resolved: Resolved) -> list[tuple[str, str]]:
    """What the command line says of the configuration: (path, value as text)."""
    return [(path, str(v)) for path, v in leaves(resolved.config).items() if resolved.sources[path] == "command line"]


def planned(resolved: Resolved, hardware_profile: str | None = None) -> Any:
    """The configuration on the planner's mesh, with the rates of a measured profile where its file is given. Fields
    given on the command line stay. Raises as `auto_mesh` and `cluster_of_devices` do."""
    import jax

    from shardlm.network.profile import load_profile
    from shardlm.plan.auto import auto_mesh, cluster_of_devices
    from shardlm.plan.local import provenance
    from shardlm.plan.search import settings

    profile = load_profile(hardware_profile) if hardware_profile else None
    config, plan = auto_mesh(resolved.config, cluster_of_devices(jax.devices(), profile), given(resolved))
    if jax.process_index() == 0:
        gib = plan.memory.total / 2**30
        for sentence in provenance(plan.cluster):
            print(f"mesh=auto: {sentence}")
        each = "CPU device" if plan.cluster.is_cpu else "GPU"
        print(f"mesh=auto, estimated: {plan.step_seconds:.3f} s a step, {gib:.1f} GiB a {each}. It stands for")
        print("  " + " ".join(f"--config.{path}={value}" for path, value in settings(config).items()), flush=True)
    return config


def predicted(config: Any, hardware_profile: str | None = None) -> Mapping[str, float] | None:
    """Seconds of a step by row of a profile, estimated with the rates of a measured machine where its file is given;
    None for devices whose figures are not known."""
    import jax

    from shardlm import hardware
    from shardlm.network.profile import load_profile
    from shardlm.plan.auto import cluster_of_devices
    from shardlm.plan.plan import Plan
    from shardlm.plan.predicted import rows

    devices = jax.devices()
    measured = load_profile(hardware_profile) if hardware_profile else None
    if measured is None and hardware.lookup(devices[0].device_kind) is None:
        return None
    laid_out = dataclasses.replace(config, mesh=config.mesh.resolve(len(devices)))
    return rows(Plan.of(laid_out, cluster_of_devices(devices, measured)))
