"""How fast a model is served: what `launch.bench serve` reports. Offline, so many requests at once; online, requests
that arrive at a rate, with the times that clients see. Prompts are random tokens, or share their beginning."""

import asyncio
import datetime
import importlib.metadata
import math
import os
import pathlib
import platform
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardlm.layers.param import Execution
from shardlm.models.transformer import TransformerConfig
from shardlm.opened import DTYPES, Opened
from shardlm.rules import Rules
from shardlm.serve.async_llm import AsyncLLM
from shardlm.serve.build import EngineConfig, assemble
from shardlm.serve.engine import Engine
from shardlm.serve.replicas import EngineGroup
from shardlm.serve.sampling_params import SamplingParams
from shardlm.serve.submeshes import of_replica
from shardlm.state import ModelDef
from shardlm.tokenizer import train_bpe

PERCENTILES = (50, 90, 99)
BATCHES = (1, 8, 32)
PACKAGES = ("shardlm", "jax", "jaxlib", "flax")


def random_engine(shape: TransformerConfig, config: EngineConfig, length: int) -> Engine | EngineGroup:
    """An engine of random weights: how fast a model is does not depend on what it says."""
    one = of_replica(config.mesh)
    mesh = one.build(jax.devices()[: one.size(*one.sizes())])
    dtype = DTYPES[config.dtype or ("float32" if mesh.devices.flat[0].platform == "cpu" else "bfloat16")]
    tokenizer = train_bpe(["a model to be timed"], 300)
    with jax.set_mesh(mesh):
        model = ModelDef.make(shape, Execution(Rules.make("zero3", one).for_decoding(), dtype))
        make = jax.jit(lambda seed: jax.tree.map(lambda a: a.astype(dtype), model.init(jax.random.key(seed))))
        opened = Opened(model, make(0), mesh, None, pathlib.Path())
    return assemble(opened, tokenizer, (), length, config)


def bench_serving(engine: Engine, *, prompt_len: int, output_len: int, shared: int, rates: Sequence[float]) -> dict:
    """Offline at each batch, then online at each rate, as JSON."""
    together = [
        offline(engine, n, prompt_len, output_len, shared) for n in BATCHES if n <= engine.runner.config.max_rows
    ]
    llm = AsyncLLM(engine, model_name="bench", template=None)
    work = prompts(64, prompt_len, shared, engine.runner.model.config.vocab_size)
    apart = [asyncio.run(online(llm, rate, work, output_len, seed)) for seed, rate in enumerate(rates)]
    llm.shutdown()
    device = engine.runner.mesh.devices.flat[0]
    params = jax.tree.leaves(engine.runner.params)
    return {
        "benchmark": "serve",
        "offline": together,
        "online": apart,
        "shared_prefix": shared,
        "parameters": sum(math.prod(a.shape) for a in params),
        "weight_bytes": sum(a.nbytes for a in params),
        "dtype": jnp.dtype(engine.runner.model.execution.dtype).name,
        "mesh": {axis: size for axis, size in engine.runner.mesh.shape.items() if size > 1},
        "device_kind": device.device_kind,
        "host_cpus": os.cpu_count(),
        "date": datetime.date.today().isoformat(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES}
        | {"python": platform.python_version()},
    }


def prompts(count: int, length: int, shared: int, vocab: int, seed: int = 0) -> list[list[int]]:
    """`count` prompts of `length` tokens, the first `shared` of which are the same in all."""
    rng = np.random.default_rng(seed)
    beginning = rng.integers(0, vocab, shared).tolist()
    return [beginning + rng.integers(0, vocab, length - shared).tolist() for _ in range(count)]


def offline(engine: Engine, batch: int, prompt_len: int, output_len: int, shared: int = 0) -> dict[str, Any]:
    """`batch` requests together, after a first round that is not counted: seconds to the first and to the last token of
    all, and new tokens a second from then to then and over the whole time."""
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    report: dict[str, Any] = {}
    for round in range(2):
        work = prompts(batch, prompt_len, shared, engine.runner.model.config.vocab_size, seed=round)
        started = time.perf_counter()
        for i, prompt in enumerate(work):
            engine.add(f"bench-{round}-{i}", prompt, params)
        first: dict[str, float] = {}
        while engine.has_unfinished:
            outputs = engine.step()
            now = time.perf_counter() - started
            for output in outputs:
                first.setdefault(output.request_id, now)
        seconds = time.perf_counter() - started
        prefill = max(first.values())
        report = {
            "batch": batch,
            "prompt_len": prompt_len,
            "output_len": output_len,
            "seconds": seconds,
            "prefill_seconds": prefill,
            "decode_tokens_per_second": batch * (output_len - 1) / (seconds - prefill),
            "output_tokens_per_second": batch * output_len / seconds,
        }
    return report


async def online(
    llm: AsyncLLM, rate: float, work: Sequence[Sequence[int]], output_len: int, seed: int = 0
) -> dict[str, Any]:
    """Requests that arrive as a Poisson process of `rate` a second (inf: all at once): percentiles, in seconds, of the
    time to the first token, between tokens, and to the end, and the rate that came out."""
    rng = np.random.default_rng(seed)
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    waits = np.zeros(len(work)) if math.isinf(rate) else rng.exponential(1 / rate, len(work)).cumsum()
    started = time.perf_counter()

    async def one(i: int) -> tuple[float, float, list[float]]:
        await asyncio.sleep(max(0.0, waits[i] - (time.perf_counter() - started)))
        begun = last = time.perf_counter()
        first, gaps, seen = 0.0, [], 0
        async for output in llm.generate(work[i], params, request_id=f"online-{seed}-{i}"):
            now, count = time.perf_counter(), len(output.outputs[0].token_ids)
            if count > seen:
                if not seen:
                    first = now - begun
                else:
                    gaps += [(now - last) / (count - seen)] * (count - seen)
                last, seen = now, count
        return first, time.perf_counter() - begun, gaps

    found = await asyncio.gather(*(one(i) for i in range(len(work))))
    seconds = time.perf_counter() - started
    firsts, ends = np.array([f[0] for f in found]), np.array([f[1] for f in found])
    gaps = np.array([gap for f in found for gap in f[2]])
    each = (ends - firsts) / max(1, output_len - 1)
    return {
        "request_rate": rate,
        "requests": len(work),
        "seconds": seconds,
        "requests_per_second": len(work) / seconds,
        "output_tokens_per_second": len(work) * output_len / seconds,
        "ttft_seconds": _percentiles(firsts),
        "tpot_seconds": _percentiles(each),
        "itl_seconds": _percentiles(gaps),
        "e2e_seconds": _percentiles(ends),
    }


def _percentiles(values: np.ndarray) -> dict[str, float]:
    return {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES} if len(values) else {}
