"""The part `decode`: an engine of random weights in this process, decoding at several batches and reading prompts,
against what the memory's bandwidth and the peak allow; what its kernels take in a step; and transformers' generate of
the same shape."""

import functools
import itertools
import json
import pathlib
import statistics
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import jax

from shardlm import hardware
from shardlm.bench.case import Given, missing, said
from shardlm.bench.cases import TRANSFORMERS
from shardlm.bench.decode_trace import traced_prompts, traced_steps
from shardlm.bench.host_pages import moved
from shardlm.bench.sizes import Served, Sizes, named
from shardlm.errors import ShardlmError
from shardlm.flops import attention_pairs, forward_flops
from shardlm.hardware import Gpu
from shardlm.ops.weight_format import DYNAMIC, grouped
from shardlm.plan.cluster import Cluster
from shardlm.plan.serving.case import ServedModel, ServingCase
from shardlm.plan.serving.memory import serving_memory
from shardlm.plan.serving.time import Speed
from shardlm.serve.bench.random_engine import random_engine
from shardlm.serve.bench.workload import prompts
from shardlm.serve.engine import Engine
from shardlm.serve.engine_config import EngineConfig
from shardlm.serve.outputs import whole
from shardlm.serve.pool_size import page_bytes
from shardlm.serve.sampling_params import SamplingParams

PEER = pathlib.Path(__file__).parents[2] / "benchmarks/peers/transformers_generate.py"
SHORT, PROMPTS = 128, 5  # tokens of a short prompt, and how many of them are timed
TARGETS = {1: 0.7, 64: 0.6}  # share of the bandwidth bound to be reached by 16-bit weights and cache, by batch


def measure(name: str, given: Given) -> Iterator[dict[str, Any]]:
    """A row for the engine, one for each batch, two for prompts, two for pages in the host's memory, and three for the
    kernels of the smallest and of the largest batch and of prompts; of these rows those that are still to be
    measured."""
    sizes = named(given.sizes)
    if name == TRANSFORMERS:
        yield from against_transformers(sizes, given)
        return
    served = sizes.served[name]
    engine = random_engine(served.model.transformer(), served.engine)
    gpu = hardware.lookup(engine.runner.mesh.devices.flat[0].device_kind)
    rows = {"engine": lambda: _described(engine)}
    rows |= {f"decode {n}": functools.partial(_against_target, engine, served, n, gpu) for n in served.batches}
    rows |= {"short prompt": lambda: short_prompt(engine, served), "prefill": lambda: prefill(engine, served, gpu)}
    ways = {"pages to the host": True, "pages from the host": False}
    rows |= {way: functools.partial(moved, engine, gpu, saves) for way, saves in ways.items()}
    traces = dict.fromkeys((served.batches[0], served.batches[-1]))
    rows |= {f"trace {n}": functools.partial(traced_steps, engine, served, n) for n in traces}
    rows |= {"trace prefill": functools.partial(traced_prompts, engine, served)}
    for row, measured in given.left(name, rows):
        yield {"name": row, "side": "shardlm", **measured()}


def _against_target(engine: Engine, served: Served, batch: int, gpu: Gpu | None) -> dict[str, Any]:
    plain = served.engine.quantization is None and served.engine.kv_cache_dtype == "auto"
    target = TARGETS.get(batch) if plain and gpu else None
    return decoding(engine, served, batch, gpu) | ({"target": target} if target else {})


def _described(engine: Engine) -> dict[str, Any]:
    runner, stats = engine.runner, jax.devices()[0].memory_stats() or {}
    return {
        "programs": runner.num_programs,
        "compile_seconds": runner.compile_seconds,
        "weight_bytes": weight_bytes(engine),
        "pages": runner.config.layout.num_pages,
        "paged_attention": runner.model.execution.paged_attention,
        "fused_rows": runner.model.execution.fused_rows,
        "bytes_in_use": stats.get("bytes_in_use"),
        "peak_bytes_in_use": stats.get("peak_bytes_in_use"),
    }


def weight_bytes(engine: Engine) -> int:
    """Of all weights that a step reads: not the table of embeddings, unless it is the output head too."""
    read = 0
    tied = engine.runner.model.config.tie_embeddings
    for path, a in jax.tree_util.tree_leaves_with_path(engine.runner.params):
        table = "embedding" in jax.tree_util.keystr(path)
        read += 0 if table and not tied else a.nbytes
    return read


def decoding(engine: Engine, served: Served, batch: int, gpu: Gpu | None) -> dict[str, Any]:
    """Between the first look at which all requests have begun and the last at which none has ended, after a round that
    is not timed."""
    params = SamplingParams(temperature=0, max_tokens=served.output_len, ignore_eos=True)
    for seed in range(2):
        counts = _looks(engine, batch, served.prompt_len, params, seed)
    steady = [(t, n) for t, n in counts if len(n) == batch and max(n.values()) < served.output_len]
    if len(steady) < 2:
        raise ShardlmError(
            f"{batch} requests of {served.output_len} tokens are not long enough: they never all decode between two "
            "looks; ask for more tokens"
        )
    (began, first), (ended, last) = steady[0], steady[-1]
    tokens = (sum(last.values()) - sum(first.values())) / batch
    seconds = (ended - began) / tokens
    context = served.prompt_len + (sum(first.values()) + sum(last.values())) / 2 / batch
    runner = engine.runner
    each = page_bytes(runner.model, runner.config.layout, runner.config.page_size) / runner.config.page_size
    read = weight_bytes(engine) + batch * context * each
    return {
        "batch": batch,
        "context": context,
        "seconds_per_step": seconds,
        "tokens_per_second": batch / seconds,
        "bytes_per_step": read,
        "bytes_per_second": read / seconds,
        "of_bound": read / gpu.hbm_bytes_per_second / seconds if gpu else None,
        "predicted_seconds": _predicted(served, gpu).decode(batch, context).seconds if gpu else None,
    }


def _looks(engine: Engine, batch: int, length: int, params: SamplingParams, seed: int):
    """[(seconds, {request: tokens so far})] after each step of the engine."""
    started, found, counts = time.perf_counter(), [], {}
    for i, prompt in enumerate(prompts(batch, length, 0, engine.runner.model.config.vocab_size, seed)):
        engine.add(f"{seed}-{i}", prompt, params)
    while engine.has_unfinished:
        for output in whole(engine.step()):
            counts[output.request_id] = len(output.outputs[0].token_ids)
        found.append((time.perf_counter() - started, dict(counts)))
    return found


def short_prompt(engine: Engine, served: Served) -> dict[str, Any]:
    """From a request, alone in the engine, to its first token: the median of several, after one that is not timed."""
    length, params = min(SHORT, served.prompt_len), SamplingParams(temperature=0, max_tokens=1)
    first, *seconds = (_looks(engine, 1, length, params, 20 + seed)[-1][0] for seed in range(1 + PROMPTS))
    seconds_to_token = statistics.median(seconds)
    rate = length / seconds_to_token
    return {"prompt_len": length, "seconds": seconds_to_token, "first_seconds": first, "tokens_per_second": rate}


def prefill(engine: Engine, served: Served, gpu: Gpu | None) -> dict[str, Any]:
    """Prompts to their first token, the second round; FLOPs without the output head of all but the last token."""
    rows, length = served.prefill
    for seed in (10, 11):
        *_, (seconds, _) = _looks(engine, rows, length, SamplingParams(temperature=0, max_tokens=1), seed)
    model, tokens = served.model.transformer(), rows * length
    head = model.vocab_size * model.embed_dim
    flops = forward_flops(
        model.parameters_per_token() - head, tokens, model.attention_macs(rows * attention_pairs([length]), tokens)
    ) + forward_flops(head, rows)
    return {
        "rows": rows,
        "prompt_len": length,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "flops_per_second": flops / seconds,
        "of_bound": flops / _peak(served.engine, gpu) / seconds if gpu else None,
    }


def _peak(engine: EngineConfig, gpu: Gpu) -> float:
    """FLOP/s of what its projections multiply."""
    return gpu.peak.of(grouped(engine.quantization) if engine.quantization in DYNAMIC else "bf16") or gpu.peak.bf16


def _predicted(served: Served, gpu: Gpu) -> Speed:
    """The planner's view, by the table of GPUs."""
    length = served.engine.max_model_len
    model = ServedModel("bench", served.model.transformer(), "bfloat16", length)
    case = ServingCase(model, Cluster.of(gpu, 1, 1), served.engine, served.prompt_len, served.output_len)
    return Speed.of(case, serving_memory(case))


def against_transformers(sizes: Sizes, given: Given) -> Iterator[dict[str, Any]]:
    """Greedy generation by transformers at the same batches."""
    why = missing(given.torch_python, ("torch", "transformers"), cuda=sizes.gpu)
    if not PEER.exists():
        why = f"{PEER} is not there: the comparison needs the source tree"
    if why:
        yield {"name": TRANSFORMERS, "side": "transformers", "not_compared": why}
        return
    served = next(iter(sizes.served.values()))
    where = ["--device=cuda", "--dtype=bfloat16"] if sizes.gpu else []
    lengths = [f"--prompt_len={served.prompt_len}", f"--output_len={served.output_len}"]
    batches = f"--batches={','.join(map(str, served.batches))}"
    shape = f"--sizes_json={json.dumps(transformers_sizes(served))}"
    done = subprocess.run(
        [given.torch_python, str(PEER), shape, batches, *lengths, *where], capture_output=True, text=True
    )
    if done.returncode:
        yield {"name": TRANSFORMERS, "side": "transformers", "error": said(done.stderr)}
        return
    report = json.loads(done.stdout.strip().splitlines()[-1])
    for row in report["offline"]:
        rate = {"tokens_per_second": row["decode_tokens_per_second"], "versions": report["versions"]}
        yield {"name": f"decode {row['batch']}", "side": "transformers", **row, **rate}


def transformers_sizes(served: Served) -> dict[str, Any]:
    """As transformers.LlamaConfig takes them."""
    keys = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    keys += ("intermediate_size", "max_position_embeddings", "rope_theta", "rms_norm_eps", "tie_word_embeddings")
    published = served.model.to_hf()
    return {key: published[key] for key in itertools.chain(keys) if key in published}
