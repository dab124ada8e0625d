"""One of two processes, each with a device of its own, that serve small models together; test_processes.py starts it.
Writes what it gets, as JSON: gloo prints."""

import json
import pathlib
import sys

import jax

from shardlm import LLM, SamplingParams
from shardlm.distributed import explicit, joined
from shardlm.errors import ShardlmError
from shardlm.mesh import MeshSpec

SIZES = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "block_size": 4, "decode_steps": 2}
# Of pages there are those of the longest request, and more in the host's memory.
SIZES |= {"kv_cache_bytes": 17 * 1024, "kv_offloading_size": 0.001}
PROMPTS = [[1, 2, 3, 4, 5], list(range(40)), [7, 8], list(range(60, 98))]


def replies(llm: LLM) -> dict:
    """Greedy and sampled replies, a score and an embedding."""
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    sampled = SamplingParams(seed=3, max_tokens=6, ignore_eos=True, repetition_penalty=1.5)
    outputs = [llm.generate(PROMPTS, params, use_tqdm=False) for params in (greedy, sampled)]
    tokens = [[output.outputs[0].token_ids for output in found] for found in outputs]
    assert llm.engine.stats().pages_loaded > 0
    return {"tokens": tokens, "score": llm.score([PROMPTS[1]])[0], "embedding": llm.embed([PROMPTS[0]])[0]}


def served(mesh: MeshSpec, first: str, second: str) -> dict:
    """What an engine over the two processes says, before and after new weights. Does not return in process 1."""
    llm = LLM(first, mesh=mesh, **SIZES)
    before = replies(llm)
    try:
        llm.update_weights(second)
        after = replies(llm)
    except ShardlmError as error:
        after = str(error)
    llm.engine.runner.followers.end()
    return {"before": before, "after": after}


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
