"""What the kernels of a decode step and of prompts take, by name, from the profiler's trace: for the part `decode`."""

import collections
from collections.abc import Sequence
from typing import Any

from shardlm.bench.sizes import Served
from shardlm.bench.traces import traced
from shardlm.profile import trace
from shardlm.serve.bench.workload import prompts
from shardlm.serve.engine import Engine
from shardlm.serve.outputs import whole
from shardlm.serve.sampling_params import SamplingParams

LONGEST = 12
NAME = 80  # letters of a kernel's name that are kept
GAPS = 0.0, 5e-6, 50e-6, 500e-6  # seconds


def traced_steps(engine: Engine, served: Served, batch: int) -> dict[str, Any]:
    """Of one decode step of `batch` requests, from those that the engine starts before it waits for the first (16 by
    default: a trace of 25 steps of one row was 37 MB). What the profiler raises is the row's `error`, and the engine is
    left without requests."""
    params = SamplingParams(temperature=0, max_tokens=served.output_len, ignore_eos=True)
    names = [f"traced-{i}" for i in range(batch)]
    vocab, length = engine.runner.model.config.vocab_size, served.prompt_len
    for name, prompt in zip(names, prompts(batch, length, 0, vocab, batch), strict=True):
        engine.add(name, prompt, params)
    try:
        said: dict[str, int] = {}
        while len(said) < batch:
            said |= _said(engine.step())
        while engine.waits:  # nothing is under way when the trace begins
            said |= _said(engine.collect())
        after, events = traced(lambda: _in_trace(engine))
        return {"batch": batch, **_summed(events, after[names[0]] - said[names[0]])}
    except Exception as error:  # the other rows are still wanted, and are there
        return {"batch": batch, "error": f"{type(error).__name__}: {error}"[:2000]}
    finally:
        _without(engine, names)


def traced_prompts(engine: Engine, served: Served) -> dict[str, Any]:
    """Of prompts to their first token, `served.prefill` of them together, after a round that is not traced."""
    rows, length = served.prefill
    params, vocab = SamplingParams(temperature=0, max_tokens=1), engine.runner.model.config.vocab_size
    names = {seed: [f"traced-{seed}-{i}" for i in range(rows)] for seed in (30, 31)}

    def run(seed: int) -> None:
        for name, prompt in zip(names[seed], prompts(rows, length, 0, vocab, seed), strict=True):
            engine.add(name, prompt, params)
        while engine.has_unfinished:
            engine.step()

    try:
        run(30)
        _, events = traced(lambda: run(31))
        return {"rows": rows, "prompt_len": length, **_summed(events, 1)}
    except Exception as error:  # the other rows are still wanted
        return {"rows": rows, "error": f"{type(error).__name__}: {error}"[:2000]}
    finally:
        _without(engine, [*names[30], *names[31]])


def _without(engine: Engine, names: Sequence[str]) -> None:
    """Ends these requests, if they are there."""
    for name in names:
        engine.abort(name)
    while engine.has_unfinished:
        engine.step()


def _in_trace(engine: Engine) -> dict[str, int]:
    """Tokens of each request after what the engine starts at once has ended."""
    said: dict[str, int] = {}
    engine.dispatch()
    while engine.waits:
        said |= _said(engine.collect())
    return said


def _said(outputs) -> dict[str, int]:
    """Tokens so far of those requests that moved on."""
    return {output.request_id: len(output.outputs[0].token_ids) for output in whole(outputs)}


def _summed(events: list[trace.Event], steps: int) -> dict[str, Any]:
    """Of one of so many steps. `busy_seconds`: all kernels and copies, one after the other; on a CPU loops and what is
    in them."""
    nanoseconds: collections.Counter[str] = collections.Counter()
    counts: collections.Counter[str] = collections.Counter()
    for event in events:
        nanoseconds[event.name[:NAME]] += event.end - event.start
        counts[event.name[:NAME]] += 1
    busy, first = sum(nanoseconds.values()), min((event.start for event in events), default=0)
    longest = nanoseconds.most_common(LONGEST)
    each = [
        {"kernel": name, "seconds": ns / 1e9 / steps, "count": counts[name] / steps, "share": ns / busy}
        for name, ns in longest
        if busy
    ]
    return {
        "steps": steps,
        "window_seconds": (max((event.end for event in events), default=0) - first) / 1e9 / steps,
        "busy_seconds": busy / 1e9 / steps,
        "kernels": len(events) / steps,
        "of_longest": sum(ns for _, ns in longest) / busy if busy else None,
        "longest": each,
        "idle": _idle(events, steps),
    }


def _idle(events: list[trace.Event], steps: int) -> list[dict[str, Any]]:
    """When nothing ran on the devices, by how long that was: seconds and times of a step, and what the longest of each
    lies between. A trace adds to it: decode steps of 4.43 and 6.85 ms took 5.93 and 8.26 in one (H200, measured)."""
    gaps: dict[float, list[tuple[int, str, str]]] = {bound: [] for bound in GAPS}
    end, before = events[0].end if events else 0, events[0].name if events else ""
    for event in events[1:]:
        if event.start > end:
            bound = max(bound for bound in GAPS if event.start - end >= bound * 1e9)
            gaps[bound].append((event.start - end, before[:NAME], event.name[:NAME]))
        end, before = max((end, before), (event.end, event.name))
    return [
        {
            "of_at_least": bound,
            "seconds": sum(gap for gap, *_ in found) / 1e9 / steps,
            "count": len(found) / steps,
            "longest": max(found),
        }
        for bound, found in gaps.items()
        if found
    ]
