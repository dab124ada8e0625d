"""Finding the other processes of a job, from nothing but environment variables and flags."""

import pytest

from shardlm.distributed import ClusterArgs, detect, explicit, first_host
from shardlm.errors import ShardlmError

SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NODELIST": "gpu[03-04,9]",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_JOB_ID": "70001",
    "SLURM_LOCALID": "1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}
KUBERNETES = {"JOB_COMPLETION_INDEX": "2", "NUM_PROCESSES": "4", "COORDINATOR_ADDRESS": "train-0.train"}


@pytest.mark.parametrize(
    "environ,expected",
    [
        ({}, None),
        (SLURM, ClusterArgs(f"gpu03:{61_440 + 70_001 % 4_096}", 8, 5, local_device=1)),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "2"}, ClusterArgs(f"gpu03:{61_440 + 70_001 % 4_096}", 2, 5)),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, None),
        ({"SLURM_JOB_ID": "7", "SLURM_NODELIST": "a"}, None),  # in a batch script, not under srun
        (OPEN_MPI, ClusterArgs(f"10.96.0.1:{61_440 + 1_531_576_320 // 4_096 % 4_096}", 4, 3, local_device=1)),
        (KUBERNETES, ClusterArgs("train-0.train:1234", 4, 2)),
        (KUBERNETES | {"COORDINATOR_ADDRESS": "train-0.train:99"}, ClusterArgs("train-0.train:99", 4, 2)),
    ],
)
def test_detects(environ, expected):
    assert detect(environ) == expected


@pytest.mark.parametrize(
    "nodes,first",
    [("gpu[03-05,9],x1", "gpu03"), ("a1,b2", "a1"), ("solo", "solo"), ("n[7,9-10]", "n7"), ("r1n[001-128]", "r1n001")],
)
def test_first_host_of_slurm_notation(nodes, first):
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    "environ,message",
    [
        ({k: v for k, v in SLURM.items() if k != "SLURM_STEP_NUM_TASKS"}, "SLURM_STEP_NUM_TASKS is not set in Slurm"),
        ({k: v for k, v in OPEN_MPI.items() if "uri" not in k}, r"Open MPI does not say .* --coordinator_address=HOST"),
        ({"JOB_COMPLETION_INDEX": "0"}, r"NUM_PROCESSES is not set in an indexed Kubernetes Job \(set it in the pod"),
        ({"JOB_COMPLETION_INDEX": "0", "NUM_PROCESSES": "2"}, "COORDINATOR_ADDRESS is not set"),
    ],
)
def test_says_what_is_missing(environ, message):
    with pytest.raises(ShardlmError, match=message):
        detect(environ)


def test_flags_win_and_must_be_complete():
    assert explicit(None, None, None) is None
    assert explicit("h:1", 2, 1) == ClusterArgs("h:1", 2, 1)
    with pytest.raises(ShardlmError, match="--num_processes and --process_id missing"):
        explicit("h:1", None, None)
    with pytest.raises(ShardlmError, match="--process_id=2 is not one of --num_processes=2"):
        explicit("h:1", 2, 2)
    with pytest.raises(ShardlmError, match="--coordinator_address=h: give HOST:PORT"):
        explicit("h", 2, 0)
