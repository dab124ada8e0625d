"""One of two processes, each with a device of its own, that serve a small model which sees together: started by
test_served_images.py. Writes the replies, as JSON: gloo prints."""

import json
import pathlib
import sys

import jax
from seeing import noise
from served import SIZES, asked, replies

from shardlm import LLM
from shardlm.distributed import explicit, joined
from shardlm.errors import ShardlmError
from shardlm.mesh import MeshSpec

IMG = 10
ASKS = [([1, 20, IMG, 21, 22], [noise(40, 64)]), ([1, IMG, 23, IMG, 5], [noise(24, 24, 1), noise(90, 50, 2)])]


def served(mesh: MeshSpec, folder: str, other: str) -> list:
    """Replies before and after new weights. Does not return in process 1."""
    llm = LLM(folder, mesh=mesh, **SIZES)
    before = replies(asked(llm, ASKS))
    try:
        llm.update_weights(other)
        after = replies(asked(llm, ASKS))
    except ShardlmError as error:
        after = str(error)
    llm.engine.runner.followers.end()
    return [before, after]


def main(port: str, process: str, output: str, *folders: str) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    with joined(explicit(f"localhost:{port}", 2, int(process))):
        found = []
        for mesh in (MeshSpec(tensor=2), MeshSpec(pipeline=2)):
            try:
                found.append(served(mesh, *folders))
            except SystemExit as error:
                if error.code:
                    raise
                found.append("followed")
    pathlib.Path(output).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
