"""Joins the processes of a job: finds out from Slurm, Open MPI, Kubernetes or flags who coordinates, how many there
are and which this is, then starts jax.distributed. `detect` is a pure function of the environment."""

import atexit
import contextlib
import dataclasses
import os
import re
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from shardlm.errors import ShardlmError

# A process that dies is noticed after this long: 98 s at jax's default of 100, measured 8.7 s at 10. Thirty leaves
# room for a host that stalls on a checkpoint.
HEARTBEAT_SECONDS = 30
MEETING_SECONDS = 300.0  # that a process waits for process 0; as long as jax does for all
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
        raise ShardlmError(f"{' and '.join(missing)} missing: give {', '.join(given)} together, or none of them")
    if not re.fullmatch(r".+:\d+", coordinator_address):
        raise ShardlmError(f"--coordinator_address={coordinator_address}: give HOST:PORT")
    if not 0 <= process_id < num_processes:
        raise ShardlmError(f"--process_id={process_id} is not one of --num_processes={num_processes}, counted from 0")
    return ClusterArgs(coordinator_address, num_processes, process_id)


def detect(environ: Mapping[str, str]) -> ClusterArgs | None:
    """The job that this process is part of, or None for a process on its own.

    Raises ShardlmError when a launcher is there but does not say enough.
    """
    # mpirun first: inside a Slurm job it starts its daemons with srun, whose variables its processes inherit
    for finder in (_open_mpi, _slurm, _leader_worker_set, _kubernetes):
        args = finder(environ)
        if args:
            return args if args.num_processes > 1 else None
    return None


def _slurm(environ: Mapping[str, str]) -> ClusterArgs | None:
    """srun sets these (https://slurm.schedmd.com/srun.html, output environment variables)."""
    if "SLURM_PROCID" not in environ or "SLURM_STEP_NODELIST" not in environ:
        return None  # inside a batch script, before srun
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS", "Slurm")
    rank = _number(environ, "SLURM_PROCID", "Slurm")
    port = _port(_number(environ, "SLURM_JOB_ID", "Slurm"))
    per_host = tasks / _number(environ, "SLURM_STEP_NUM_NODES", "Slurm")
    local = _local_device(environ, "SLURM_LOCALID", "Slurm") if per_host > 1 else None
    return ClusterArgs(f"{first_host(environ['SLURM_STEP_NODELIST'])}:{port}", tasks, rank, local)


def first_host(nodelist: str) -> str:
    """The first name in Slurm's notation: "gpu[03-05,9]-ib,x1" -> "gpu03-ib"; "r[1-2]n[0,4]" -> "r1n0"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodelist).group()
    return re.sub(r"\[([^-,\]]*)[^\]]*\]", r"\1", first)


def _open_mpi(environ: Mapping[str, str]) -> ClusterArgs | None:
    """mpirun sets these (https://docs.open-mpi.org). Where it runs is in its URI, until version 4, in the form
    "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911" or "1314521088.0;tcp6://[fe80::b9b]:43370"."""
    if "OMPI_COMM_WORLD_SIZE" not in environ:
        return None
    size = _number(environ, "OMPI_COMM_WORLD_SIZE", "Open MPI")
    rank = _number(environ, "OMPI_COMM_WORLD_RANK", "Open MPI")
    here = _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", "Open MPI")
    local = _local_device(environ, "OMPI_COMM_WORLD_LOCAL_RANK", "Open MPI") if here > 1 else None
    uri = re.match(r"(\d+)\.\d+;tcp6?://\[?([^,\]/]+?)(?:,|\]|:\d+$)", environ.get("OMPI_MCA_orte_hnp_uri", ""))
    if uri:
        host = f"[{uri[2]}]" if ":" in uri[2] else uri[2]
        return ClusterArgs(f"{host}:{_port(int(uri[1]) // 2**12)}", size, rank, local)  # a multiple of 2**12
    if here == size:
        job = zlib.crc32(environ.get("PMIX_NAMESPACE", "").encode())
        return ClusterArgs(f"127.0.0.1:{_port(job)}", size, rank, local)
    raise ShardlmError(
        "Open MPI does not say which host coordinates (from version 5 on it no longer does); give "
        "--coordinator_address=HOST:PORT --num_processes=$OMPI_COMM_WORLD_SIZE --process_id=$OMPI_COMM_WORLD_RANK, "
        "with the host of rank 0"
    )


def _kubernetes(environ: Mapping[str, str]) -> ClusterArgs | None:
    """An indexed Job, or a JobSet of one, sets JOB_COMPLETION_INDEX and names its pods JOB-INDEX; the pod template must
    add the rest (https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode)."""
    if "JOB_COMPLETION_INDEX" not in environ:
        return None
    where = (
        "an indexed Kubernetes Job (set it in the pod template: NUM_PROCESSES is spec.completions, or 1 for pods that "
        "work alone; COORDINATOR_ADDRESS is JOB-0.SUBDOMAIN, by a headless service)"
    )
    size, rank = _number(environ, "NUM_PROCESSES", where), _number(environ, "JOB_COMPLETION_INDEX", where)
    if size > 1 and rank >= size:
        raise ShardlmError(
            f"JOB_COMPLETION_INDEX={rank} is not below NUM_PROCESSES={size}; set the latter to spec.completions"
        )
    address = _needed(environ, "COORDINATOR_ADDRESS", where) if size > 1 else ""
    return ClusterArgs(address if ":" in address else f"{address}:1234", size, rank)


def _leader_worker_set(environ: Mapping[str, str]) -> ClusterArgs | None:
    """Kubernetes' LeaderWorkerSet, from 0.6 on, sets these (https://lws.sigs.k8s.io/docs/reference)."""
    if "LWS_LEADER_ADDRESS" not in environ:
        return None
    where = "a LeaderWorkerSet (before 0.6 it said less)"
    size, rank = (_number(environ, name, where) for name in ("LWS_GROUP_SIZE", "LWS_WORKER_INDEX"))
    return ClusterArgs(f"{environ['LWS_LEADER_ADDRESS']}:1234", size, rank)


def _port(job: int) -> int:
    return PORT_BASE + job % PORT_RANGE


def _local_device(environ: Mapping[str, str], name: str, where: str) -> int | None:
    """Of several processes on a host each takes the GPU of its number, unless the launcher shows it just one."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    return None if visible and "," not in visible else _number(environ, name, where)


def _number(environ: Mapping[str, str], name: str, where: str) -> int:
    text = _needed(environ, name, where)
    if not text.isdecimal():
        raise ShardlmError(f"{name}={text} is not a number, in {where}")
    return int(text)


def _needed(environ: Mapping[str, str], name: str, where: str) -> str:
    if name not in environ:
        raise ShardlmError(
            f"{name} is not set in {where}; set it, or give --coordinator_address, --num_processes and --process_id"
        )
    return environ[name]


def coordinator() -> Any:
    """The job's keys and values, once jax.distributed runs: what one process sets, others may wait for."""
    from jax._src.distributed import global_state  # they have no public name

    return global_state.client


def coordinator_host() -> str:
    """Where process 0 is, as jax was told."""
    from jax._src.distributed import global_state

    return global_state.coordinator_address.rpartition(":")[0].strip("[]")


def of_all(value: int) -> list[int]:
    """What each process of the job says, below 2**63, in their order. All must call it."""
    import jax
    from jax.experimental import multihost_utils

    if jax.process_count() == 1:
        return [value]
    rows = multihost_utils.process_allgather(np.array([value]).view(np.uint8))  # jax would make 32 bits of 64
    return rows.reshape(-1, 8).view(np.int64)[:, 0].tolist()


def texts_of_all(own: bytes) -> list[bytes]:
    """What each process of the job says, in their order. All must call it."""
    import jax
    from jax.experimental import multihost_utils

    if jax.process_count() == 1:
        return [own]
    sizes = of_all(len(own))
    room = 1 << (max(sizes) - 1).bit_length() if max(sizes) else 1  # of few sizes, each of which is compiled for
    said = np.frombuffer(own.ljust(room, b"\0"), np.uint8)
    rows = multihost_utils.process_allgather(said)
    return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]


def least_of_all(values: Iterable[int]) -> int:
    """The least of what all processes of the job say, below 2**63; none may have nothing to say. All must call it."""
    return min(of_all(min(values, default=2**63 - 1)))


@contextlib.contextmanager
def joined(args: ClusterArgs | None) -> Iterator[None]:
    """jax.distributed around a block, with what is to be done `at_end` before it ends; nothing for a process on its
    own. Call before jax's backend starts.

    A process whose block raises tells the others, which end with status 1 and its error; they would wait for it in a
    collective, and it for them in jax's shutdown, until that gives up after 300 s.
    """
    if args is None or args.num_processes == 1:
        yield
        return
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # CPU processes have no other
    _meet(args)
    failures = _Failures(coordinator(), f"process {args.process_id} of {args.num_processes}")
    try:
        yield
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:  # the end of what it had to do
            _leave(failures)
            raise
        failures.tell(error)
        failures.shut_down()
        raise
    _leave(failures)


def _meet(args: ClusterArgs) -> None:
    """Raises ShardlmError where the one that coordinates is not there; where others are not, jaxlib aborts after as
    long, and does not say for whom it waited."""
    import jax

    who = f"process {args.process_id} of {args.num_processes}"
    waits = threading.Timer(
        MEETING_SECONDS / 10,
        lambda: print(f"{who} waits for the others, by {args.coordinator_address}", file=sys.stderr, flush=True),
    )
    waits.start()
    try:
        if args.process_id:
            _reach(args)
        jax.distributed.initialize(
            args.coordinator_address,
            args.num_processes,
            args.process_id,
            local_device_ids=None if args.local_device is None else [args.local_device],
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            cluster_detection_method="deactivate",  # its own would show a process under Slurm one GPU of its host
        )
    except jax.errors.JaxRuntimeError as error:
        raise _alone(args, str(error).splitlines()[0]) from error
    finally:
        waits.cancel()


def _reach(args: ClusterArgs) -> None:
    """Waits for process 0 to listen."""
    host, _, port = args.coordinator_address.rpartition(":")
    until = time.monotonic() + MEETING_SECONDS
    while True:
        try:
            return socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
        except OSError as error:  # a name that is not known yet, too
            if time.monotonic() > until:
                raise _alone(args, error.strerror or str(error)) from error
        time.sleep(min(1.0, MEETING_SECONDS / 10))


def _alone(args: ClusterArgs, why: str) -> ShardlmError:
    return ShardlmError(
        f"process {args.process_id} of {args.num_processes} did not meet the others by {args.coordinator_address}, "
        f"where process 0 listens: {why}. Start all processes, each with its own number, and let that address be "
        "reached from their hosts"
    )


def _leave(failures: "_Failures") -> None:
    while _at_end:
        _at_end.pop()()
    failures.leave()
    failures.shut_down()


def at_end(function: Callable[[], None]) -> None:
    """Is called when the block of `joined` is over, or Python ends: before jax.distributed, which waits for the other
    processes."""
    _at_end.append(function)
    atexit.register(function)


_at_end: list[Callable[[], None]] = []


class _Failures:
    """What the processes of a job say of errors that end them, by a key of jax's coordinator. A thread waits for it."""

    KEY = "shardlm/failed"
    WAIT_MS = 600_000  # of one call; then it is called again

    def __init__(self, client: Any, name: str):
        self.client, self.name = client, name
        self.here = threading.Lock()  # held by who decides how this process ends: its block, or another's error
        self.watch = threading.Thread(target=self._watch, daemon=True)
        self.watch.start()

    def leave(self) -> None:
        """The block is over: errors of others do not end this process any more. Does not return where one just did."""
        self.here.acquire()

    def tell(self, error: BaseException) -> None:
        import jax

        self.leave()
        said = f"{self.name} failed: {type(error).__name__}: {error}"
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # without a coordinator; the error itself is raised
            self.client.key_value_set(self.KEY, said, allow_overwrite=True)

    def shut_down(self) -> None:
        """jax.distributed, which ends the wait of the thread. Python must not end while that comes back out of C++: the
        process would abort."""
        import jax

        jax.distributed.shutdown()
        self.watch.join(10)  # s; where the coordinator is gone, jax may not end that wait

    def _watch(self) -> None:
        import jax

        while True:
            try:
                said = self.client.blocking_key_value_get(self.KEY, self.WAIT_MS)
                break
            except jax.errors.JaxRuntimeError as error:  # jaxlib tells them apart by their text
                if "DEADLINE_EXCEEDED" not in str(error):
                    return  # shut down
        if not self.here.acquire(blocking=False):
            return
        print(f"error: {said}; {self.name} ends with it", file=sys.stderr, flush=True)
        sys.stdout.flush()
        # The one that failed waits there. The main thread may be inside a collective, which no exception reaches.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            jax.distributed.shutdown()
        os._exit(1)
