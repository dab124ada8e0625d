"""Conversations in turns, in an engine of this process: what the prefix cache saves of them, on the devices and in the
host's memory (serve/host_pages.py)."""

import time
from collections.abc import Iterator
from typing import Any

from shardlm.serve.bench.workload import prompts
from shardlm.serve.engine import Engine
from shardlm.serve.outputs import whole
from shardlm.serve.replicas import EngineGroup
from shardlm.serve.sampling_params import SamplingParams

SAID = 32  # tokens that each turn adds to what was said before
SEED = 100  # beside those of what is measured before (engine.py), of which nothing may be found


def in_turns(
    engine: Engine | EngineGroup, conversations: int, turns: int, prompt_len: int, output_len: int, shared: int = 0
) -> Iterator[dict[str, Any]]:
    """A row a turn: all conversations go on at once, each from all that was said in it before. The first turn has
    prompts of `prompt_len` tokens, of which `shared` are the same in all. Pages are counted in the turn."""
    params, vocab = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True), _vocab(engine)
    talks = prompts(conversations, prompt_len, shared, vocab, SEED)
    for turn in range(turns):
        if turn:
            more = prompts(conversations, SAID, 0, vocab, SEED + turn)
            talks = [[*talk, *said] for talk, said in zip(talks, more, strict=True)]
        before, started, done = engine.stats(), time.perf_counter(), {}
        for i, talk in enumerate(talks):
            engine.add(f"turn-{turn}-{i}", talk, params)
        while engine.has_unfinished:
            done |= {output.request_id: output for output in whole(engine.step()) if output.finished}
        seconds, after = time.perf_counter() - started, engine.stats()
        outputs = [done[f"turn-{turn}-{i}"] for i in range(conversations)]
        yield {
            "turn": turn + 1,
            "seconds": seconds,
            "prompt_tokens": sum(map(len, talks)),
            "cached_tokens": sum(output.num_cached_tokens for output in outputs),
            "output_tokens_per_second": conversations * output_len / seconds,
            "pages_saved": after.pages_saved - before.pages_saved,
            "pages_loaded": after.pages_loaded - before.pages_loaded,
        }
        talks = [[*talk, *output.outputs[0].token_ids] for talk, output in zip(talks, outputs, strict=True)]


def longest(turns: int, prompt_len: int, output_len: int) -> int:
    """Tokens of a conversation at its end."""
    return prompt_len + (turns - 1) * SAID + turns * output_len


def _vocab(engine: Engine | EngineGroup) -> int:
    return engine.runner.model.config.vocab_size
