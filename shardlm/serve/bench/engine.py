"""How fast a model is served: what `launch.bench serve` reports of an engine in this process. Offline, so many requests
at once; online, its HTTP server under the load of another process."""

import asyncio
import datetime
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardlm.chat import ChatTemplate
from shardlm.errors import ShardlmError
from shardlm.serve.api.app import make_app
from shardlm.serve.api.server import Listen, Server, listening
from shardlm.serve.api.settings import Settings
from shardlm.serve.async_llm import AsyncLLM
from shardlm.serve.bench.image_work import Size, noise
from shardlm.serve.bench.workload import prompts
from shardlm.serve.engine import Engine
from shardlm.serve.outputs import SpeculationStats, whole
from shardlm.serve.replicas import EngineGroup
from shardlm.serve.sampling_params import SamplingParams
from shardlm.versions import versions

BATCHES = (1, 8, 32)
PACKAGES = ("shardlm", "jax", "jaxlib", "flax")


def bench_serving(
    engine: Engine | EngineGroup,
    *,
    prompt_len: int,
    output_len: int,
    shared: int,
    images: int = 0,
    image_size: Size = (0, 0),
    tell: Callable[[str], None] = lambda text: None,
) -> dict:
    """Offline at each batch, as JSON, each prompt with so many random images. `tell` is called with what each gave."""
    replicas = len(engine.engines) if isinstance(engine, EngineGroup) else 1
    rows = replicas * engine.runner.config.max_rows
    together = []
    for n in BATCHES:
        if n <= rows:
            together.append(offline(engine, n, prompt_len, output_len, shared, images, image_size))
            tell(f"offline, {n} at once: {together[-1]['decode_tokens_per_second']:,.0f} tokens/s while decoding")
    device = engine.runner.mesh.devices.flat[0]
    params, execution = jax.tree.leaves(engine.runner.params), engine.runner.model.execution
    return {
        "benchmark": "serve",
        "offline": together,
        "shared_prefix": shared,
        "compile_seconds": engine.runner.compile_seconds,
        "num_programs": engine.runner.num_programs,
        "parameters": sum(math.prod(a.shape) for a in params),
        "weight_bytes": sum(a.nbytes for a in params),
        "dtype": jnp.dtype(execution.dtype).name,
        "quantization": None if execution.weights == "dtype" else str(execution.weights),
        "kv_cache_dtype": execution.kv_cache,
        "mesh": {axis: size for axis, size in (engine.runner.spec.sizes() | {"data": replicas}).items() if size > 1},
        "device_kind": device.device_kind,
        "host_cpus": os.cpu_count(),
        "date": datetime.date.today().isoformat(),
        "versions": versions(PACKAGES),
    }


def offline(
    engine: Engine,
    batch: int,
    prompt_len: int,
    output_len: int,
    shared: int = 0,
    images: int = 0,
    image_size: Size = (0, 0),
) -> dict[str, Any]:
    """`batch` requests together, in three rounds: one that is not counted, one of a single token each, of which is said
    how long all of them took, and one of `output_len`: seconds to the last token of all, and new tokens a second of the
    whole and of what it took more than the round before. (Requests decode while the prompts of others are read, and
    the first may end before the last one begins, so that no moment parts the two.) Of drafts: how many were right, and
    how many tokens a step with drafts brought. Of images, of which each prompt has so many before its `prompt_len`
    tokens: seconds that one thread prepared them in before, and images a second until all first tokens are there."""
    report: dict[str, Any] = {}
    prefill = 0.0
    for round, most in enumerate((output_len, 1, output_len)):
        params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
        number = 3 * batch + round  # others at each batch, of which the prefix cache has none
        work = prompts(batch, prompt_len, shared, engine.runner.model.config.vocab_size, seed=number)
        seen = [[noise(image_size, number, i, k) for k in range(images)] for i in range(batch)]
        begun = time.perf_counter()
        asks = [_placed(engine, *ask) if images else (ask[0], ()) for ask in zip(work, seen, strict=True)]
        before = engine.stats().speculation
        started = time.perf_counter()
        for i, (prompt, pictures) in enumerate(asks):
            engine.add(f"bench-{round}-{i}", prompt, params, pictures=pictures)
        while engine.has_unfinished:
            whole(engine.step())
        seconds = time.perf_counter() - started
        if round < 2:
            prefill = seconds
            continue
        report = {
            "batch": batch,
            "prompt_len": prompt_len,
            "output_len": output_len,
            "seconds": seconds,
            "prefill_seconds": prefill,
            "decode_tokens_per_second": batch * (output_len - 1) / max(seconds - prefill, 1e-9),
            "output_tokens_per_second": batch * output_len / seconds,
        }
        if images:
            report |= {
                "images_per_prompt": images,
                "image_size": list(image_size),
                "image_tokens": sum(len(prompt) for prompt, _ in asks) - batch * prompt_len,
                "prepare_seconds": started - begun,
                "images_per_second": batch * images / prefill,
            }
        if before is not None:
            report |= _drafts(before, engine.stats().speculation)
    return report


def _placed(engine: Engine, prompt: Sequence[int], images: Sequence[np.ndarray]) -> tuple[list[int], tuple]:
    """(a prompt with its images before it, where they are)."""
    sight = engine.sight
    words = [0 if id in (sight.token, sight.vector) else id for id in prompt]  # else it is a place of an image
    pictures = [sight.prepare(image) for image in images]
    return sight.expanded([sight.token] * len(images) + words, pictures)


def _drafts(before: SpeculationStats, after: SpeculationStats) -> dict[str, float]:
    """What came of drafts between two looks at the engine."""
    found = after.since(before)
    return {
        "draft_acceptance_rate": sum(found.accepted) / max(1, found.drafted),
        "mean_acceptance_length": found.mean_length,
    }


async def serve_to(engine: Engine, command: Sequence[str], template: ChatTemplate | None = None) -> None:
    """Serves the engine over HTTP on a free port while a command runs, to which `--url` is added; what it prints is not
    shown.

    Raises ShardlmError where it fails.
    """
    llm = AsyncLLM(engine, model_name="bench", template=template)
    listen = Listen(port=0)
    server = Server(make_app(llm), listen)
    sock = listening(listen, Settings().write_seconds)
    serving = asyncio.create_task(server.serve([sock]))
    try:
        url = f"--url=http://127.0.0.1:{sock.getsockname()[1]}"
        client = await asyncio.create_subprocess_exec(*command, url, stdout=asyncio.subprocess.DEVNULL)
        if await client.wait():
            raise ShardlmError(f"the client that measures ended with status {client.returncode}: {' '.join(command)}")
    finally:
        server.should_exit = True
        await serving
        llm.shutdown()
