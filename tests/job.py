"""Two processes of one job under Slurm, each a module of its own."""

import concurrent.futures
import os
import random
import subprocess

import commands

SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_PROCID": "11",
    "SLURM_LOCALID": "3",
}


def two_processes(module: str, *words: str) -> list[subprocess.CompletedProcess]:
    """Of one job under Slurm, with two devices each."""
    job = {
        "SLURM_JOB_ID": str(random.randrange(10**6)),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_NUM_TASKS": "2",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    environs = [os.environ | SLURM | job | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": "0"} for rank in range(2)]
    with concurrent.futures.ThreadPoolExecutor() as threads:
        return list(threads.map(lambda environ: commands.run(module, *words, env=environ), environs))
