"""`--config.mesh=auto`: the planner chooses the mesh, and what goes with it, for the devices that are there."""

from collections.abc import Sequence
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
