"""Joins the processes of a job: finds out from Slurm, Open MPI, Kubernetes or flags who coordinates, how many there
are and which this is, then starts jax.distributed. `detect` is a pure function of the environment."""

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Mapping

from shardlm.errors import ShardlmError

# A process that dies is noticed after this long: 98 s at jax's default of 100, measured 8.7 s at 10. Thirty leaves
# room for a host that stalls on a checkpoint.
HEARTBEAT_SECONDS = 30
PORT_BASE, PORT_RANGE = 61_440, 4_096  # ephemeral ports; the job's number picks one, so that jobs don't collide


@dataclasses.dataclass(frozen=True)
class ClusterArgs:
    """Arguments of jax.distributed.initialize. `local_device` is this process's GPU where each process has one."""

    coordinator_address: str
    num_processes: int
    process_id: int
    local_device: int | None = None


def explicit(coordinator_address: str | None, num_processes: int | None, process_id: int | None) -> ClusterArgs | None:
    """The arguments from flags; None when none is given. Raises ShardlmError when some are missing or wrong."""
    given = {
        "--coordinator_address": coordinator_address,
        "--num_processes": num_processes,
        "--process_id": process_id,
    }
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return None
    if missing:
        raise ShardlmError(
            f"{' and '.join(missing)} missing: give --coordinator_address, --num_processes and --process_id"
        )
    if ":" not in coordinator_address:
        raise ShardlmError(f"--coordinator_address={coordinator_address}: give HOST:PORT")
    if not 0 <= process_id < num_processes:
        raise ShardlmError(f"--process_id={process_id} is not one of --num_processes={num_processes}, counted from 0")
    return ClusterArgs(coordinator_address, num_processes, process_id)


def detect(environ: Mapping[str, str]) -> ClusterArgs | None:
    """The job that this process is part of, or None for a process on its own.

    Raises ShardlmError when a scheduler is there but does not say enough.
    """
    for finder in (_slurm, _open_mpi, _kubernetes):
        args = finder(environ)
        if args:
            return args if args.num_processes > 1 else None
    return None


def _slurm(environ: Mapping[str, str]) -> ClusterArgs | None:
    """srun sets these (https://slurm.schedmd.com/srun.html, output environment variables)."""
    if "SLURM_PROCID" not in environ or "SLURM_STEP_NODELIST" not in environ:
        return None  # inside a batch script, before srun
    tasks = int(_needed(environ, "SLURM_STEP_NUM_TASKS", "Slurm"))
    nodes = int(environ.get("SLURM_STEP_NUM_NODES", "1"))
    host = first_host(environ["SLURM_STEP_NODELIST"])
    port = PORT_BASE + int(_needed(environ, "SLURM_JOB_ID", "Slurm")) % PORT_RANGE
    local = int(environ.get("SLURM_LOCALID", "0")) if tasks > nodes else None
    return ClusterArgs(f"{host}:{port}", tasks, int(environ["SLURM_PROCID"]), local)


def first_host(nodelist: str) -> str:
    """The first name in Slurm's notation: "gpu[03-05,9],x1" -> "gpu03"."""
    head = re.match(r"([^,\[]*)(?:\[([^\]]*)\])?", nodelist)
    prefix, ranges = head.group(1), head.group(2)
    return prefix if ranges is None else prefix + re.split(r"[,-]", ranges)[0]


def _open_mpi(environ: Mapping[str, str]) -> ClusterArgs | None:
    """mpirun sets these (https://docs.open-mpi.org, "Environment variables"); who coordinates is in its URI."""
    if "OMPI_COMM_WORLD_SIZE" not in environ:
        return None
    size = int(environ["OMPI_COMM_WORLD_SIZE"])
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
    host = re.search(r"tcp://([^,:/;]+)", uri)
    if size > 1 and not host:
        raise ShardlmError(
            "Open MPI does not say which host coordinates (OMPI_MCA_orte_hnp_uri is not set, as from version 5 on); "
            "give --coordinator_address=HOST:PORT --num_processes=$OMPI_COMM_WORLD_SIZE "
            "--process_id=$OMPI_COMM_WORLD_RANK"
        )
    job = int(re.match(r"\d*", uri).group() or 0)
    address = f"{host.group(1) if host else 'localhost'}:{PORT_BASE + job % PORT_RANGE}"
    rank = int(_needed(environ, "OMPI_COMM_WORLD_RANK", "Open MPI"))
    several = int(environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1")) > 1
    return ClusterArgs(address, size, rank, int(environ["OMPI_COMM_WORLD_LOCAL_RANK"]) if several else None)


def _kubernetes(environ: Mapping[str, str]) -> ClusterArgs | None:
    """An indexed Job sets JOB_COMPLETION_INDEX; the pod template must add the other two
    (https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode)."""
    if "JOB_COMPLETION_INDEX" not in environ:
        return None
    where = "an indexed Kubernetes Job (set it in the pod template)"
    size = int(_needed(environ, "NUM_PROCESSES", where))
    address = _needed(environ, "COORDINATOR_ADDRESS", where)
    return ClusterArgs(address if ":" in address else f"{address}:1234", size, int(environ["JOB_COMPLETION_INDEX"]))


def _needed(environ: Mapping[str, str], name: str, where: str) -> str:
    if name not in environ:
        raise ShardlmError(
            f"{name} is not set in {where}; set it, or give --coordinator_address, --num_processes and --process_id"
        )
    return environ[name]


@contextlib.contextmanager
def joined(args: ClusterArgs | None) -> Iterator[None]:
    """jax.distributed around a block; nothing for a process on its own. Call before jax's backend starts."""
    if args is None:
        yield
        return
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # CPU processes have no other
    jax.distributed.initialize(
        args.coordinator_address,
        args.num_processes,
        args.process_id,
        local_device_ids=None if args.local_device is None else [args.local_device],
        heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
    )
    yield
    jax.distributed.shutdown()
