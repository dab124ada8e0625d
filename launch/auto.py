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


def planned(resolved: Resolved) -> Any:
    """The configuration on the planner's mesh. Fields given on the command line stay. Raises as `auto_mesh` does."""
    import jax

    from shardlm.plan.auto import auto_mesh, cluster_of_devices
    from shardlm.plan.search import settings

    given = [(path, str(v)) for path, v in leaves(resolved.config).items() if resolved.sources[path] == "command line"]
    config, plan = auto_mesh(resolved.config, cluster_of_devices(jax.devices()), given)
    if jax.process_index() == 0:
        gib = plan.memory.total / 2**30
        print(f"mesh=auto, estimated: {plan.step_seconds:.3f} s a step, {gib:.1f} GiB a GPU. It stands for")
        print("  " + " ".join(f"--config.{path}={value}" for path, value in settings(config).items()), flush=True)
    return config


def predicted(config: Any) -> Mapping[str, float] | None:
    """Seconds of a step by row of a profile, estimated; None for devices whose figures are not known."""
    import jax

    from shardlm import hardware
    from shardlm.plan.auto import cluster_of_devices
    from shardlm.plan.plan import Plan
    from shardlm.plan.predicted import rows

    devices = jax.devices()
    if hardware.lookup(devices[0].device_kind) is None:
        return None
    laid_out = dataclasses.replace(config, mesh=config.mesh.resolve(len(devices)))
    return rows(Plan.of(laid_out, cluster_of_devices(devices)))
