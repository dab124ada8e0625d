"""shardlm plans, trains and serves large language models. Importing it imports no jax and starts no backend."""

import importlib

from shardlm.no_driver import expect_no_driver

__version__ = "0.1.0"


_WHERE = {
    "load": "shardlm.opened",
    "LLM": "shardlm.serve.llm",
    "AsyncLLM": "shardlm.serve.async_llm",
    "BeamSearchParams": "shardlm.serve.beam_search",
    "LoRARequest": "shardlm.serve.adapter_table",
    "SamplingParams": "shardlm.serve.sampling_params",
    "StructuredOutputs": "shardlm.serve.sampling_params",
}


def __getattr__(name: str):
    """`shardlm.load`, `shardlm.LLM` and the like, whose imports need jax."""
    if name not in _WHERE:
        raise AttributeError(f"module 'shardlm' has no attribute {name!r}")
    expect_no_driver()
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    """With what `__getattr__` finds, for who asks a prompt what there is."""
    return sorted([*globals(), *_WHERE])
