"""Trains a language model, or resumes the training that run_dir holds.

python -m launch.train --config=configs/tiny.py
python -m launch.train --config=configs/tiny.py --config.train.steps=50 --config.mesh.tensor=4
python -m launch.train --config=configs/llama3_8b.py --config.mesh=auto
python -m launch.train --config=configs/tiny.py --config.mesh=auto --hardware_profile=machine.json
python -m launch.train --config=configs/tiny.py --print_config
python -m launch.train --config=configs/tiny.py --print_shardings
python -m launch.train --config=configs/tiny.py --profile_steps=10:15
"""

import dataclasses
import os
import re
import shlex
import sys

import psutil
from absl import flags

from launch.auto import AUTO, planned, predicted, split_auto
from launch.flags import cluster, run
from launch.other_trainers import OTHER_TRAINERS
from shardlm.config import Resolved
from shardlm.errors import ShardlmError

_PRINT_SHARDINGS = flags.DEFINE_bool("print_shardings", False, "Print where every parameter rests, and stop.")
_PROFILE = flags.DEFINE_string(
    "profile_steps", None, "FIRST:END: trace steps FIRST to END - 1 and say where their time went."
)
_HARDWARE = flags.DEFINE_string(
    "hardware_profile", None, "The machine's profile, by launch.topology, for --config.mesh=auto and --profile_steps."
)


def main(resolved: Resolved, auto: bool) -> int:
    from launch.devices import use_cpu_devices
    from shardlm.distributed import detect, explicit, joined
    from shardlm.host_memory import use_host_memory
    from shardlm.train.loop import train
    from shardlm.train.profile import ProfileSteps
    from shardlm.train.program import Program
    from shardlm.train.report import python
    from shardlm.train.seeing import sight_of_chats
    from shardlm.train.shardings import format_shardings
    from shardlm.train.task import Texts

    if _HARDWARE.value and not auto and _PROFILE.value is None:
        raise ShardlmError(
            "--hardware_profile is read by --config.mesh=auto and --profile_steps: give one, or leave it"
        )
    use_cpu_devices(resolved.config.cpu_devices)
    use_host_memory()  # of which offload and remat="offload" make use
    if _PRINT_SHARDINGS.value:
        config = planned(resolved, _HARDWARE.value) if auto else resolved.config
        program = Program.make(config, config.mesh.build())
        sight = sight_of_chats(config) if config.train.encoder != "frozen" else None
        print(format_shardings(program.that_sees(sight) if sight else program))
        return 0
    profile = ProfileSteps.parse(_PROFILE.value) if _PROFILE.value is not None else None
    with joined(explicit(**cluster()) or detect(os.environ)):
        config = planned(resolved, _HARDWARE.value) if auto else resolved.config
        command = shlex.join(
            [python(), "-m", "launch.train", *without_profile(sys.argv[1:]), *(planning() if auto else [])]
        )
        if profile:
            profile = dataclasses.replace(profile, predicted=predicted(config, _HARDWARE.value))
        started = psutil.Process().create_time()
        if config.grpo.reward:
            from shardlm.reinforce.task import Rewards  # which serves
        learned = Rewards if config.grpo.reward else Texts
        return train(config, command=command, started=started, profile=profile, prepare=learned.prepared)


def planning() -> list[str]:
    """What lets the run that resumes plan as this one."""
    return [AUTO, *([f"--hardware_profile={_HARDWARE.value}"] if _HARDWARE.value else [])]


def without_profile(words: list[str]) -> list[str]:
    """The command line that resumes this run: the steps to profile are over by then, and what they stood beside."""
    flag = re.compile(r"--?(profile_steps|hardware_profile)(=.*)?")
    return [
        word
        for before, word in zip(["", *words], words, strict=False)
        if not flag.fullmatch(word) and not (flag.fullmatch(before) and "=" not in before)
    ]


if __name__ == "__main__":
    sys.argv[:], AUTOMATIC = split_auto(sys.argv)
    run(lambda resolved: main(resolved, AUTOMATIC), processes=True, other_names=OTHER_TRAINERS)
