"""Compares encoders of images with transformers' on the same weights: one image of 1,024 patches, on the CPU in
float32, separate processes in turns.

python benchmarks/compare_images.py --torch_python=.venv-torch/bin/python --threads=1,2

The sides are benchmarks/peers/transformers_images.py, which writes the checkpoints, and this file with --folder.
"""

import argparse
import json
import os
import pathlib
import sys
import tempfile
import time

from compare_training import run

EYES = ("gemma3", "qwen2_5_vl")  # layers of 768 x 12: SigLIP's, all to all; Qwen2.5-VL's, 8 of 12 in windows
PATCHES = 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--torch_python")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--folder", help="time our own side of this checkpoint, and nothing else")
    args = parser.parse_args()
    if args.folder:
        print(json.dumps(ours(args.folder, int(args.threads), args.calls)))
        return
    rows, calls = [], f"--calls={args.calls}"
    with tempfile.TemporaryDirectory() as folder:
        for eyes in EYES:
            own = f"--folder={folder}/{eyes}"
            pathlib.Path(folder, eyes).mkdir()
            for threads in args.threads.split(","):
                given = [own, f"--threads={threads}", calls]
                peer = [args.torch_python, "benchmarks/peers/transformers_images.py", f"--eyes={eyes}", *given]
                theirs, mine = (
                    run(command, dict(os.environ)) for command in (peer, [sys.executable, __file__, *given])
                )
                both = {"transformers_seconds": theirs["seconds"], "shardlm_seconds": mine["seconds"]}
                rows.append(
                    {"eyes": eyes, "threads": int(threads), **both, "ratio": theirs["seconds"] / mine["seconds"]}
                )
                print(json.dumps(rows[-1]), file=sys.stderr)
    print(json.dumps({"rows": rows, "versions": theirs["versions"] | mine["versions"]}, indent=2))


def ours(folder: str, threads: int, calls: int) -> dict:
    """The quickest of so many calls, on so many of the cores that this process may use."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])  # before XLA counts them
    import jax
    import jax.numpy as jnp
    import numpy as np

    from shardlm.hf_files import Folder
    from shardlm.mesh import MeshSpec
    from shardlm.versions import versions
    from shardlm.vision.encoder import Encoder
    from shardlm.vision.registry import sight_of

    opened = Folder.open(pathlib.Path(folder))
    sight = sight_of(pathlib.Path(folder), opened.config)
    mesh = MeshSpec().build(jax.devices()[:1])
    encoder = Encoder.make(sight.encoder, jnp.float32, mesh)
    pixels = np.random.default_rng(0).integers(0, 256, (448, 448, 3), np.uint8)
    picture = sight.prepare(pixels)
    assert picture.patches == PATCHES
    look, params = jax.jit(encoder), encoder.load(opened)
    given = params, dict(picture.inputs), jnp.int32(PATCHES)
    seconds = []
    for _ in range(calls + 1):
        started = time.perf_counter()
        with jax.set_mesh(mesh):
            jax.block_until_ready(look(*given))
        seconds.append(time.perf_counter() - started)
    return {"seconds": min(seconds[1:]), "versions": versions(("shardlm", "jax"))}


if __name__ == "__main__":
    main()
