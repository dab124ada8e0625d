"""Cases that tests of serving plans share: Llama 3 8B and 70B on GPUs of one kind, and what drafts."""

import dataclasses

from shardlm.hardware import GPUS
from shardlm.models.llama import LlamaConfig
from shardlm.plan.cluster import Cluster
from shardlm.plan.serving.case import ServedModel, ServingCase
from shardlm.serve.engine_config import EngineConfig

LLAMA = LlamaConfig()
LLAMA_70B = dataclasses.replace(LLAMA, embed_dim=8192, num_layers=80, num_heads=64, mlp_dim=28_672)
OF_CASE = ("request_rate", "ttft_seconds", "itl_seconds", "acceptance_rate", "draft")
DRAFTED = {"num_speculative_tokens": 2}
NGRAM, MTP = ({"method": method} | DRAFTED for method in ("ngram", "mtp"))


def served(shape: LlamaConfig, name: str = "llama") -> ServedModel:
    return ServedModel(name, shape.transformer(), "bfloat16", 8192)


def on(gpu: str, count: int, shape: LlamaConfig = LLAMA, lengths=(1024, 256), **options) -> ServingCase:
    asked = {name: options.pop(name) for name in OF_CASE if name in options}
    return ServingCase(served(shape), Cluster.of(GPUS[gpu], count), EngineConfig(**options), *lengths, **asked)


def drafted(rate: float, count: int = 4, longest: int = 8192, shape: LlamaConfig = LLAMA, **changed) -> ServingCase:
    """A smaller model drafts, and this share of its tokens is accepted."""
    small = LlamaConfig(embed_dim=2048, num_layers=16, num_heads=32, mlp_dim=8192)
    small = ServedModel("small", dataclasses.replace(small, **changed).transformer(), "bfloat16", longest)
    wanted = {"model": "small", "num_speculative_tokens": count}
    return on("h100", 1, shape, speculative_config=wanted, acceptance_rate=rate, draft=small)
