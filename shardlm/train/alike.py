"""What the processes of a job must have alike. Each does what it is told and trains on what it finds: where those
differ, one waits in a collective for what another never sends, or both make one model of two runs, and nothing says so.
"""

import json
from collections.abc import Mapping
from typing import Any

import jax

from shardlm.config import ABSENT, leaves
from shardlm.distributed import texts_of_all
from shardlm.errors import ShardlmError
from shardlm.train.config import RunConfig

# Names of places on a host, of which what is there is compared, and what concerns one process alone.
OF_HOST = (
    "run_dir",
    "cpu_devices",
    "trackers",
    "model.folder",
    "distill.teacher",
    "grpo.reward",
    *(f"data.{name}" for name in ("train", "validation", "tokenizer", "chat_template", "cache_dir")),
)
SHOWN = 4  # differences that a message names


def check_configs(config: RunConfig) -> None:
    """Refuses a job whose processes are to do different things. All must call it."""
    own = {path: value for path, value in leaves(config).items() if path not in OF_HOST}
    check_same(own | {"jax": jax.__version__}, "start all of them by one command, with the same packages")


def check_same(own: Mapping[str, Any], remedy: str) -> None:
    """Raises ShardlmError, in every process, where one has another value than process 0 of what is named. All must call
    it."""
    said = [json.loads(one) for one in texts_of_all(json.dumps(own, default=repr).encode())]
    for process, other in enumerate(said):
        names = [name for name in said[0] | other if said[0].get(name, ABSENT) != other.get(name, ABSENT)]
        if names:
            each = [f"{n} is {other.get(n, ABSENT)!r}, not {said[0].get(n, ABSENT)!r}" for n in names[:SHOWN]]
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            raise ShardlmError(
                f"process {process} of {len(said)} differs from process 0: {'; '.join(each)}{more}; {remedy}"
            )
