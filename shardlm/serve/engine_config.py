"""How a model is served: what an engine is built by."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, get_args

from shardlm.errors import ShardlmError
from shardlm.hf_quantised import METHODS
from shardlm.mesh import MeshSpec
from shardlm.ops.kv_format import KvFormat
from shardlm.ops.weight_format import PUBLISHED, QUANTIZATIONS
from shardlm.serve.adapter_table import Room
from shardlm.serve.adapters import settled_rank
from shardlm.serve.option_types import Fused, check_types
from shardlm.serve.prefill import Wanted
from shardlm.serve.scheduler_config import most_decoded
from shardlm.serve.speculation.config import SpeculativeConfig

PROGRAMS = 0.05  # of what jax has of a GPU's memory


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """How a model is served; names and defaults are vLLM's where it has them.

    mesh                    of the devices: tensor, expert and pipeline split the model, data counts its replicas
    dtype                   that is computed in; None: the checkpoint's, on a CPU float32
    quantization            weights in "fp8", "int8" or "int4" (ops/grouped_weights.py); "fp8_dynamic", "int8_dynamic":
                            projections multiply 8-bit numbers too (ops/dynamic_matmul.py); "checkpoint": those in few
                            bits as its file has them (ops/weight_format.py); "dtype": all in dtype; None: the last but
                            one on GPUs, the last on a CPU
    kv_cache_dtype          of keys and values: "bfloat16", "fp8" or "int8" (ops/kv_format.py); auto: dtype
    decode_context_parallel_size  devices over which the positions of each page are split, of those that would each have
                            a copy of its latents or kv heads (ops/split_pages.py); 1: none
    max_model_len           tokens of prompt and reply together; None: what the model was made for
    block_size              tokens of a page; None: 16, on a CPU 64
    gpu_memory_utilization  share of what jax may take of a GPU (use_memory) for weights, pages and what programs need
    kv_cache_bytes          of all pages, over all devices; None: what is left of a GPU's memory, 1 GiB on a CPU
    max_num_seqs            requests that run at once, of each replica; None: 256, on a CPU 32
    max_num_batched_tokens  of the prompts in one step; None: 2048, on a CPU 512
    decode_steps            tokens that a request decodes between two looks of the host, at most (pace.py)
    enable_prefix_caching   equal beginnings of prompts are computed once
    kv_offloading_size      GiB of the host's memory, over all devices and replicas, for pages that the prefix cache has
                            no room for (host_pages.py); None: none
    prefill_attention       of chunks of many tokens: "auto" (cuDNN on GPUs where it can, prefill.py), "whole" (of these
                            only those that begin a prompt) or "pages", so that a hit and a miss of the prefix cache
                            run the same kernel
    fused_products          kernels of ours for projections of few tokens, with norm and gate, and for what is between
                            them and pages: "on", "off", or "auto", where the GPU is seen to be quicker so (try_out.py)
    deterministic           a reply and its log-probabilities are the same bits whatever else runs (deterministic.py)
    speculative_config      drafts to verify, as a mapping with vLLM's keys (speculation/config.py); None: none
    enable_lora             room for adapters beside the weights, of which each request has one or none (adapters.py)
    max_loras               at once, at least as many as lora_modules
    max_lora_rank           of each; None: the largest of lora_modules, at least 16
    lora_modules            adapters that are loaded at first, by name: folders of PEFT or runs with lora.rank
    limit_mm_per_prompt     images and videos that a prompt may have, {"image": n, "video": n}; None: as many as
                            max_model_len has room for; no image: the encoder of a model that sees is not loaded
    mm_processor_kwargs     how images are prepared otherwise than preprocessor_config.json says, by its names:
                            {"max_pixels": n} of Qwen's models (vision/registry.py); {"fps": n}: and videos
    """

    mesh: MeshSpec = MeshSpec()
    dtype: str | None = None
    quantization: str | None = None
    kv_cache_dtype: KvFormat = "auto"
    decode_context_parallel_size: int = 1
    max_model_len: int | None = None
    block_size: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_bytes: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    decode_steps: int = 8
    enable_prefix_caching: bool = True
    kv_offloading_size: float | None = None
    prefill_attention: Wanted = "auto"
    fused_products: Fused = "auto"
    deterministic: bool = False
    speculative_config: Mapping[str, Any] | SpeculativeConfig | None = None
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int | None = None
    lora_modules: Mapping[str, str | os.PathLike] = dataclasses.field(default_factory=dict)
    limit_mm_per_prompt: Mapping[str, int] | None = None
    mm_processor_kwargs: Mapping[str, Any] | None = None

    def __post_init__(self):
        check_types(self)
        if not isinstance(self.mesh, MeshSpec):
            raise ShardlmError(f"mesh={self.mesh!r} must be a MeshSpec, such as MeshSpec(tensor=2)")
        if self.speculative_config is not None:
            object.__setattr__(self, "speculative_config", SpeculativeConfig.parse(self.speculative_config))
            if self.deterministic:
                raise ShardlmError(
                    "deterministic=True computes each token alone and speculative_config several at once; choose one"
                )
        if self.quantization in METHODS and self.quantization not in QUANTIZATIONS:
            raise ShardlmError(
                f"quantization={self.quantization!r} is what a checkpoint says of itself, and is read without it: "
                f"leave it out, or choose what its weights are to be held in, {', '.join(QUANTIZATIONS)}"
            )
        choices = (*QUANTIZATIONS, PUBLISHED, "dtype")
        if self.quantization not in (None, *choices):
            raise ShardlmError(f"quantization={self.quantization!r}; choose from {', '.join(choices)}, or None")
        if self.kv_cache_dtype == "fp8_e4m3":  # vLLM's other name of it
            object.__setattr__(self, "kv_cache_dtype", "fp8")
        if self.kv_cache_dtype not in get_args(KvFormat):
            raise ShardlmError(f"kv_cache_dtype={self.kv_cache_dtype!r}; choose from {', '.join(get_args(KvFormat))}")
        if self.kv_offloading_size is not None and not self.enable_prefix_caching:
            raise ShardlmError(
                f"kv_offloading_size={self.kv_offloading_size} is where the prefix cache goes on: leave it out, or "
                "enable_prefix_caching on"
            )
        if self.fused_products not in get_args(Fused):
            raise ShardlmError(f"fused_products={self.fused_products!r}; choose from auto, on, off")
        if self.prefill_attention not in get_args(Wanted):
            raise ShardlmError(
                f"prefill_attention={self.prefill_attention!r}; choose from {', '.join(get_args(Wanted))}"
            )
        if not PROGRAMS < self.gpu_memory_utilization <= 1:
            raise ShardlmError(
                f"gpu_memory_utilization={self.gpu_memory_utilization} is a share above {PROGRAMS} (of programs), at "
                "most 1"
            )
        if not (self.enable_lora or self.lora_modules) and (self.max_loras > 1 or self.max_lora_rank):
            raise ShardlmError(
                f"max_loras={self.max_loras}, max_lora_rank={self.max_lora_rank} without room for adapters: give "
                "enable_lora=True or lora_modules"
            )
        split = [axis for axis in ("fsdp", "context") if getattr(self.mesh, axis) > 1]
        if split:
            raise ShardlmError(
                f"mesh {self.mesh}: {', '.join(split)} does not split a model that is served; give its devices to "
                "tensor, expert, pipeline or data"
            )

    @property
    def max_images(self) -> int | None:
        """Of a prompt; None: no limit of their own."""
        return None if self.limit_mm_per_prompt is None else self.limit_mm_per_prompt.get("image")

    @property
    def room(self) -> Room:
        """For adapters."""
        if not (self.enable_lora or self.lora_modules):
            return Room()
        rank = settled_rank(self.lora_modules, self.max_lora_rank)
        return Room(max(self.max_loras, len(self.lora_modules)), rank)

    @property
    def drafts(self) -> int:
        """Tokens that each step drafts."""
        return self.speculative_config.num_speculative_tokens if self.speculative_config else 0

    @property
    def decoded(self) -> int:
        """The most tokens of a row that are decoded and not known."""
        return most_decoded(self.decode_steps, self.drafts)
