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
from shardlm.mesh import MeshSpec

IMG = 10
ASKS = [([1, 20, IMG, 21, 22], [noise(40, 64)]), ([1, IMG, 23, IMG, 5], [noise(24, 24, 1), noise(90, 50, 2)])]


def served(mesh: MeshSpec, folder: str) -> list[list[int]]:
    """Does not return in process 1."""
    llm = LLM(folder, mesh=mesh, **SIZES)
    found = replies(asked(llm, ASKS))
    llm.engine.runner.followers.end()
    return found


def main(port: str, process: str, output: str, folder: str) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    with joined(explicit(f"localhost:{port}", 2, int(process))):
        try:
            found = served(MeshSpec(tensor=2), folder)
        except SystemExit as error:
            if error.code:
                raise
            found = "followed"
    pathlib.Path(output).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
