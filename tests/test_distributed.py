"""Joining a job: the rarer forms in which launchers describe it, and processes that really meet."""

import json
import re
import types

import hypothesis.strategies as st
import jax
import pytest
from hypothesis import given
from job import SLURM, two_processes
from ports import free_port

from shardlm import distributed
from shardlm.distributed import ClusterArgs, detect, explicit, first_host, joined
from shardlm.errors import ShardlmError

OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "16",
    "OMPI_COMM_WORLD_RANK": "9",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_MCA_orte_hnp_uri": f"{5 * 4096}.0;tcp://10.96.0.1:34911",
}
OPEN_MPI_5 = {name: value for name, value in OPEN_MPI.items() if "uri" not in name}
KUBERNETES = {"JOB_COMPLETION_INDEX": "3", "NUM_PROCESSES": "4", "COORDINATOR_ADDRESS": "job-0.jax"}

LEADER_WORKER_SET = {"LWS_LEADER_ADDRESS": "r-0.r.ns", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}


def refused(environ):
    with pytest.raises(ShardlmError) as error:
        detect(environ)
    return str(error.value)


# ---- what launchers say ----


@given(
    st.from_regex(r"[a-z]{1,5}", fullmatch=True),
    st.lists(st.tuples(st.integers(0, 99), st.integers(0, 9)), min_size=1, max_size=4),
    st.sampled_from(["", "-ib", ".cluster"]),
)
def test_the_first_host_is_the_first_of_the_expanded_list(prefix, ranges, suffix):
    text = ",".join(f"{low:02d}-{low + more:02d}" if more else f"{low:02d}" for low, more in ranges)
    assert first_host(f"{prefix}[{text}]{suffix},other[1-2]") == f"{prefix}{ranges[0][0]:02d}{suffix}"


def test_a_slurm_name_with_several_brackets():
    assert first_host("rack[1-2]node[0,4-7],x") == "rack1node0"
    assert first_host("a100,node[01-03]") == "a100"


def test_a_launcher_that_shows_a_process_one_gpu_has_chosen_it():
    assert detect(SLURM).local_device == 3
    assert detect(SLURM | {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}).local_device == 3
    assert detect(SLURM | {"CUDA_VISIBLE_DEVICES": "3"}).local_device is None  # srun --gpus-per-task=1
    assert detect(OPEN_MPI | {"CUDA_VISIBLE_DEVICES": "1"}).local_device is None


def test_jobs_of_open_mpi_take_different_ports():
    other = OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": f"{6 * 4096}.0;tcp://10.96.0.1:34911"}
    assert detect(OPEN_MPI).coordinator_address == "10.96.0.1:61445"
    assert detect(other).coordinator_address == "10.96.0.1:61446"


def test_open_mpi_over_ip_version_6():
    uri = "4096.0;tcp6://[fe80::b9b:ac5d,2620:10d:c083::2]:43370"
    assert detect(OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": uri}).coordinator_address == "[fe80::b9b:ac5d]:61441"


def test_open_mpi_5_needs_to_be_told_the_coordinator_unless_all_are_on_one_host():
    assert "from version 5 on it no longer does" in refused(OPEN_MPI_5)
    here = OPEN_MPI_5 | {"OMPI_COMM_WORLD_LOCAL_SIZE": "16", "PMIX_NAMESPACE": "prterun-host-42@1"}
    host, port = detect(here).coordinator_address.split(":")
    assert host == "127.0.0.1"
    assert 61_440 <= int(port) < 65_536
    assert detect(here | {"OMPI_COMM_WORLD_RANK": "2"}).coordinator_address == f"{host}:{port}"


def test_a_leader_worker_set_says_all():
    assert detect(LEADER_WORKER_SET) == ClusterArgs("r-0.r.ns:1234", 2, 1)
    assert detect(LEADER_WORKER_SET | {"LWS_GROUP_SIZE": "1"}) is None
    assert "LWS_WORKER_INDEX is not set in a LeaderWorkerSet" in refused(
        {name: value for name, value in LEADER_WORKER_SET.items() if name != "LWS_WORKER_INDEX"}
    )


def test_mpirun_inside_a_slurm_job_counts_its_own_processes():
    assert detect(OPEN_MPI | SLURM) == detect(OPEN_MPI)  # srun started mpirun's daemons, one a host


def test_kubernetes_pods_that_work_alone_need_no_coordinator():
    assert detect({"JOB_COMPLETION_INDEX": "3", "NUM_PROCESSES": "1"}) is None


def test_numbers_that_cannot_be_are_refused():
    assert refused(SLURM | {"SLURM_PROCID": "x"}) == "SLURM_PROCID=x is not a number, in Slurm"
    assert "JOB_COMPLETION_INDEX=3 is not below NUM_PROCESSES=2" in refused(KUBERNETES | {"NUM_PROCESSES": "2"})
    with pytest.raises(ShardlmError, match="--coordinator_address=host:http: give HOST:PORT"):
        explicit("host:http", 4, 0)


# ---- joining ----


def test_alone_a_process_says_what_it_says_itself():
    assert distributed.texts_of_all(b"") == [b""] and distributed.of_all(2**62) == [2**62]


def test_a_process_on_its_own_starts_nothing(monkeypatch):
    def started(*args, **kwargs):
        raise AssertionError("jax.distributed was started")

    monkeypatch.setattr(jax.distributed, "initialize", started)
    with joined(None), joined(ClusterArgs("host:1", 1, 0)):
        pass


def test_gpus_are_not_narrowed_by_the_detection_of_jax(monkeypatch):
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **kwargs: calls.append((args, kwargs)))
    nobody = types.SimpleNamespace(leave=lambda: None, shut_down=lambda: None)
    monkeypatch.setattr(distributed, "_Failures", lambda *_: nobody)
    with joined(ClusterArgs("host:1", 2, 0)), joined(ClusterArgs("host:1", 2, 0, local_device=0)):
        pass
    assert [args for args, _ in calls] == [("host:1", 2, 0)] * 2
    assert [kwargs["local_device_ids"] for _, kwargs in calls] == [None, [0]]
    assert all(kwargs["cluster_detection_method"] == "deactivate" for _, kwargs in calls)


def test_a_process_that_meets_nobody_is_told_where_it_looked(monkeypatch, capsys):
    def alone(*_, **__):
        raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: Deadline Exceeded\n\nmore")

    monkeypatch.setattr(jax.distributed, "initialize", alone)
    monkeypatch.setattr(distributed, "MEETING_SECONDS", 0.2)
    place = f"127.0.0.1:{free_port()}"
    for process, why in ((0, "DEADLINE_EXCEEDED: Deadline Exceeded"), (1, "Connection refused")):
        told = f"process {process} of 2 did not meet the others by {place}, where process 0 listens: {why}. Start all"
        with pytest.raises(ShardlmError, match=re.escape(told)), joined(ClusterArgs(place, 2, process)):
            raise AssertionError
    assert capsys.readouterr().err == f"process 1 of 2 waits for the others, by {place}\n"


def test_two_processes_under_slurm_meet():
    both = two_processes("meeting")
    lines = [line for one in both for line in one.stdout.splitlines() if line.startswith("RESULT ")]  # gloo prints too
    assert [json.loads(line.removeprefix("RESULT ")) for line in lines] == [[0, 4, [0, 1]], [1, 4, [0, 1]]]
    assert [one.returncode for one in both] == [0, 0], both


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_in_one_process_ends_the_others_with_it(failing):
    """The one that coordinates or another, while the rest waits in a collective. jax alone gives up after 300 s."""
    both = two_processes("meeting", str(failing))
    assert [one.returncode for one in both] == [1, 1], both
    failed, other = both[failing], both[1 - failing]
    assert failed.stderr.rstrip().endswith("shardlm.errors.ShardlmError: there is no such corpus")
    told = (
        f"error: process {failing} of 2 failed: ShardlmError: there is no such corpus; process {1 - failing} of 2 ends"
    )
    assert told in other.stderr and "Traceback" not in other.stderr
