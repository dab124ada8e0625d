"""Writes compiled_memory.json: what XLA says of the memory of training steps compiled for GPUs that are not there.

Variants of shipped configurations, and runs drawn at random: dense, with experts, with latent attention; over all mesh
axes, schedules, remat policies, ZeRO stages and precisions. Compiles what the record lacks, a minute and more each; for
another jaxlib remove the file first.

    JAX_PLATFORMS=cpu PYTHONPATH=. python tests/plan/record_memory.py
"""

import dataclasses
import json
import pathlib
import random

import jaxlib

from shardlm.config import override, resolve
from shardlm.errors import ShardlmError
from shardlm.hardware import GPUS
from shardlm.models.pretrained import Pretrained
from shardlm.models.qwen_hybrid import QwenHybridConfig
from shardlm.plan.sketch import Sketch
from shardlm.plan.state import state
from shardlm.topology import topology
from shardlm.train.config import RunConfig
from shardlm.train.program import Program

RECORD = pathlib.Path(__file__).parent / "compiled_memory.json"
GPU = "h100"
SEEDS = (*range(20), 44, *range(47, 78))
MODELS = {"qwen_hybrid": QwenHybridConfig()}  # without a configuration of their own: in llama3_8b's
FAMILIES = {"dense": "llama3_8b", "experts": "mixtral_8x7b", "latent": "deepseek_v3"}
VARIANTS = (
    "deepseek_v3 mesh.fsdp=8 mesh.expert=4 mesh.context=1 model.num_layers=12 model.num_experts=64 "
    "train.global_batch=32 train.accumulation=1",
    "llama3_8b attention=xla train.seq_len=4096",
    "llama3_8b matmul=FP8_DYNAMIC",
    "llama3_8b matmul=W4A16",
    "llama3_8b matmul=W8A8",
    "llama3_8b matmul=fp8",
    "llama3_8b matmul=int8",
    "llama3_8b matmul=int8 model.num_layers=8",
    "llama3_8b mesh.fsdp=1 mesh.data=8 rules=replicated model.num_layers=16",
    "llama3_8b mesh.fsdp=1 mesh.data=8 rules=zero1 model.num_layers=16",
    "llama3_8b mesh.fsdp=1 mesh.data=8 rules=zero2 model.num_layers=16",
    "llama3_8b mesh.fsdp=1 model.num_layers=8 train.global_batch=4 matmul=fp8",
    "llama3_8b mesh.fsdp=1 model.num_layers=8 train.global_batch=4 matmul=int8",
    "llama3_8b mesh.fsdp=2 mesh.context=4 context_attention=ring train.seq_len=32768",
    "llama3_8b mesh.fsdp=2 mesh.pipeline=4 train.accumulation=16 train.global_batch=32",
    "llama3_8b mesh.fsdp=2 mesh.pipeline=4 train.accumulation=16 train.global_batch=32 pipeline.schedule=1f1b",
    "llama3_8b mesh.fsdp=4 mesh.tensor=2",
    "llama3_8b model.tie_embeddings=True",
    "llama3_8b model.vocab_size=32000",
    "llama3_8b offload.optimizer=True",
    "llama3_8b offload.optimizer=True offload.params=True",
    "llama3_8b optim.ema_decay=0.99",
    "llama3_8b optim.name=adafactor",
    "llama3_8b optim.name=muon",
    "llama3_8b precision=fp32 train.seq_len=4096",
    "llama3_8b remat=dots",
    "llama3_8b remat=names",
    "llama3_8b remat=none",
    "llama3_8b remat=none model.num_layers=12",
    "llama3_8b remat=none model.num_layers=16 mesh.fsdp=2 mesh.context=4 train.global_batch=4 context_attention=ring",
    "llama3_8b remat=none model.num_layers=16 mesh.fsdp=4 mesh.context=2 train.global_batch=4",
    "llama3_8b remat=none model.num_layers=8 mesh.fsdp=1 mesh.pipeline=2 train.accumulation=4 train.global_batch=4 "
    "mesh.context=2",
    "llama3_8b remat=none model.num_layers=8 mesh.fsdp=1 mesh.pipeline=2 train.accumulation=4 train.global_batch=4 "
    "mesh.context=2 mesh.tensor=2 pipeline.rounds=2",
    "llama3_8b remat=none model.num_layers=8 mesh.fsdp=1 mesh.pipeline=2 train.accumulation=4 train.global_batch=4 "
    "mesh.tensor=2 pipeline.rounds=2",
    "llama3_8b remat=none model.num_layers=8 mesh.fsdp=1 mesh.tensor=8 mesh.context=4 train.global_batch=2 "
    "train.seq_len=32768",
    "llama3_8b remat=none model.num_layers=12 mesh.fsdp=2 mesh.context=2 mesh.tensor=2 train.global_batch=2",
    "llama3_8b remat=none model.num_layers=12 mesh.fsdp=2 mesh.context=2 mesh.tensor=2 train.global_batch=4",
    "llama3_70b remat=none mesh.fsdp=8 mesh.context=4 mesh.tensor=8",
    "llama3_8b remat=offload",
    "llama3_8b train.accumulation=4 train.global_batch=32",
    "llama3_8b mesh.fsdp=32 train.accumulation=4 train.global_batch=128",
    "llama3_8b train.global_batch=128 train.seq_len=2048",
    "mixtral_8x7b mesh.fsdp=8 mesh.expert=1 model.num_layers=8 train.global_batch=8",
    "mixtral_8x7b optim.name=muon model.num_layers=8 mesh.fsdp=4 mesh.expert=2",
    "mixtral_8x7b optim.name=muon model.num_layers=8 mesh.fsdp=4 mesh.expert=2 train.global_batch=8",
    "llama3_8b lora.rank=16 lora.base=int4 mesh.fsdp=1 train.global_batch=1 train.seq_len=4096",
    "llama3_8b lora.rank=16 mesh.fsdp=1 train.global_batch=1 train.seq_len=4096",
    "llama3_8b lora.rank=16 lora.base=int4 mesh.fsdp=8 train.seq_len=4096",
    "llama3_8b lora.rank=16 mesh.fsdp=8 train.seq_len=4096",
    "llama3_8b lora.rank=16 lora.base=int4 mesh.fsdp=1 train.global_batch=4 train.seq_len=4096",
    "llama3_8b lora.rank=16 lora.base=int4 mesh.fsdp=1 train.global_batch=4 train.seq_len=4096 train.accumulation=4",
    "llama3_8b lora.rank=16 mesh.fsdp=4 mesh.tensor=2 train.seq_len=4096 train.global_batch=8",
    "llama3_8b lora.rank=16 lora.base=int4 mesh.fsdp=1 train.global_batch=1 train.seq_len=4096 remat=none",
    "llama3_8b lora.rank=16 lora.base=int4 mesh.fsdp=1 train.global_batch=1 train.seq_len=4096 remat=dots",
    "llama3_8b lora.rank=64 lora.base=int8 mesh.fsdp=1 train.global_batch=2 train.seq_len=8192",
    "llama3_70b lora.rank=16 lora.base=int4 mesh.fsdp=8 mesh.context=1 mesh.tensor=1 mesh.data=1 "
    "train.global_batch=8 train.seq_len=4096 train.accumulation=1",
    "mixtral_8x7b lora.rank=16 mesh.fsdp=8 mesh.expert=1 train.global_batch=8 train.seq_len=4096",
    "mixtral_8x7b lora.rank=16 lora.base=int4 mesh.fsdp=2 mesh.expert=4 train.global_batch=8 train.seq_len=4096",
    "llama3_8b lora.rank=16 mesh.fsdp=4 mesh.context=2 train.seq_len=8192 train.global_batch=4",
    "llama3_8b lora.rank=16 mesh.fsdp=1 mesh.data=8 rules=replicated train.seq_len=4096",
    "deepseek_v3 lora.rank=16 lora.base=int8 mesh.fsdp=8 mesh.expert=1 mesh.context=1 mesh.data=1 "
    "mesh.pipeline=1 model.num_layers=12 model.num_experts=32 train.global_batch=8 train.seq_len=4096 "
    "train.accumulation=1",
    "llama3_8b lora.rank=16 lora.base=int4 mesh.fsdp=1 train.global_batch=1 train.seq_len=4096 remat=names",
    "llama3_8b lora.rank=16 mesh.fsdp=8 train.seq_len=4096 model.vocab_size=32000",
    "llama3_8b lora.rank=16 mesh.fsdp=8 train.seq_len=4096 train.accumulation=4 train.global_batch=32",
    "llama3_8b lora.rank=16 mesh.fsdp=8 train.seq_len=4096 remat=dots",
    "llama3_8b lora.rank=16 lora.base=int4 mesh.fsdp=4 mesh.tensor=2 train.seq_len=4096 "
    "train.global_batch=8 remat=none model.num_layers=16",
    "llama3_8b lora.rank=16 lora.base=int4 mesh.fsdp=1 train.global_batch=1 train.seq_len=16384",
    "llama3_70b lora.rank=32 mesh.fsdp=8 mesh.context=1 mesh.tensor=4 mesh.data=1 train.global_batch=8 "
    "train.seq_len=8192 train.accumulation=1",
    "mixtral_8x7b lora.rank=16 mesh.fsdp=4 mesh.expert=2 train.global_batch=8 train.seq_len=2048 model.num_layers=8",
    "mixtral_8x7b lora.rank=16 lora.base=int4 mesh.fsdp=8 mesh.expert=1 train.global_batch=8 "
    "train.seq_len=2048 model.num_layers=8",
    "deepseek_v3 lora.rank=16 mesh.fsdp=8 mesh.expert=1 mesh.context=1 mesh.data=1 mesh.pipeline=1 "
    "model.num_layers=8 model.num_experts=32 train.global_batch=8 train.seq_len=2048 train.accumulation=1",
    "llama3_8b lora.rank=16 lora.base=int4 mesh.fsdp=1 mesh.data=8 rules=replicated train.seq_len=4096",
    "llama3_8b lora.rank=16 mesh.fsdp=4 mesh.data=2 rules=hybrid train.seq_len=4096",
    "llama3_8b lora.rank=16 mesh.fsdp=1 mesh.data=8 rules=replicated train.seq_len=4096 remat=dots",
    "llama3_8b lora.rank=16 lora.base=int4 mesh.fsdp=1 mesh.data=8 rules=replicated train.seq_len=4096 "
    "remat=none model.num_layers=16",
    "llama3_8b lora.rank=16 lora.base=int4 mesh.fsdp=1 mesh.data=8 rules=replicated train.seq_len=2048",
    "llama3_8b lora.rank=16 mesh.fsdp=1 mesh.data=8 rules=replicated train.seq_len=8192",
    "llama3_8b lora.rank=16 mesh.fsdp=1 mesh.data=8 rules=replicated train.seq_len=8192 train.global_batch=16",
    "llama3_8b lora.rank=16 mesh.fsdp=8 train.seq_len=4096 train.global_batch=16",
    "llama3_8b lora.rank=16 mesh.fsdp=8 train.seq_len=8192 train.global_batch=16",
    "llama3_8b lora.rank=16 mesh.fsdp=1 mesh.data=8 rules=replicated train.seq_len=4096 train.global_batch=32 "
    "train.accumulation=4",
    "llama3_8b lora.rank=16 lora.base=int4 mesh.fsdp=1 mesh.context=4 train.seq_len=16384 train.global_batch=1",
    "llama3_8b lora.rank=16 mesh.fsdp=2 mesh.context=4 context_attention=ring train.seq_len=32768 train.global_batch=2",
    "llama3_8b lora.rank=16 mesh.fsdp=4 mesh.context=2 train.seq_len=8192 train.global_batch=4 remat=dots",
    "llama3_8b lora.rank=16 mesh.fsdp=4 mesh.context=2 train.seq_len=8192 train.global_batch=4 remat=none",
    "llama3_8b lora.rank=16 lora.base=int4 mesh.fsdp=4 mesh.context=2 context_attention=ring "
    "train.seq_len=8192 train.global_batch=4 remat=dots",
    "llama3_8b lora.rank=16 lora.base=int4 mesh.fsdp=1 mesh.data=4 mesh.context=2 rules=replicated "
    "train.seq_len=8192 train.global_batch=4",
    "llama3_8b lora.rank=8 lora.base=int4 mesh.data=2 mesh.fsdp=1 mesh.tensor=2 rules=zero1 "
    "train.seq_len=2048 train.global_batch=8 train.accumulation=2 remat=dots model.num_layers=12 "
    "model.embed_dim=3072 model.num_heads=24 model.mlp_dim=12288 model.vocab_size=32000",
    "llama3_8b lora.rank=64 lora.base=int8 mesh.data=4 mesh.fsdp=1 mesh.context=4 rules=replicated "
    "train.seq_len=32768 train.global_batch=16 train.accumulation=2 remat=none model.num_layers=32 "
    "model.embed_dim=3072 model.num_heads=24 model.mlp_dim=9216 model.vocab_size=32000",
    "llama3_8b lora.rank=64 lora.base=int4 mesh.data=8 mesh.fsdp=1 mesh.tensor=2 rules=replicated "
    "train.seq_len=2048 train.global_batch=8 remat=none model.num_layers=12 model.embed_dim=2048 "
    "model.num_heads=16 model.mlp_dim=6144 model.vocab_size=128256",
    "llama3_8b lora.rank=16 lora.base=int4 mesh.data=2 mesh.fsdp=1 mesh.context=2 rules=zero3 "
    "train.seq_len=16384 train.global_batch=2 model.num_layers=20 model.embed_dim=3072 model.num_heads=24 "
    "model.mlp_dim=12288 model.vocab_size=32000",
    "llama3_8b lora.rank=8 lora.base=int8 mesh.data=4 mesh.fsdp=1 mesh.context=4 rules=replicated "
    "train.seq_len=32768 train.global_batch=8 remat=none model.num_layers=12 model.embed_dim=2048 "
    "model.num_heads=16 model.mlp_dim=6144 model.vocab_size=32000",
    "llama3_8b lora.rank=8 mesh.data=8 mesh.fsdp=1 mesh.context=2 rules=zero3 train.seq_len=8192 "
    "train.global_batch=8 remat=names model.num_layers=20 model.embed_dim=4096 model.num_heads=32 "
    "model.mlp_dim=12288 model.vocab_size=128256",
    "llama3_8b lora.rank=8 lora.base=int8 mesh.data=4 mesh.fsdp=2 rules=replicated train.seq_len=2048 "
    "train.global_batch=8 model.num_layers=32 model.embed_dim=2048 model.num_heads=16 model.mlp_dim=8192 "
    "model.vocab_size=128256",
    "llama3_8b lora.rank=16 mesh.data=2 mesh.fsdp=1 mesh.context=2 rules=zero3 train.seq_len=4096 "
    "train.global_batch=2 model.num_layers=12 model.embed_dim=3072 model.num_heads=24 model.mlp_dim=12288 "
    "model.vocab_size=128256",
    "llama3_8b lora.rank=64 mesh.fsdp=2 mesh.context=2 rules=zero3 train.seq_len=8192 train.global_batch=4 "
    "train.accumulation=2 remat=dots model.num_layers=12 model.embed_dim=4096 model.num_heads=32 "
    "model.mlp_dim=12288 model.vocab_size=32000",
    "llama3_8b lora.rank=8 lora.base=int8 mesh.data=4 mesh.fsdp=1 mesh.context=4 rules=hybrid "
    "train.seq_len=8192 train.global_batch=8 remat=dots model.num_layers=12 model.embed_dim=2048 "
    "model.num_heads=16 model.mlp_dim=8192 model.vocab_size=32000",
    "llama3_8b lora.rank=16 mesh.fsdp=1 mesh.context=2 mesh.tensor=2 rules=zero3 train.seq_len=4096 "
    "train.global_batch=2 model.num_layers=12 model.embed_dim=2048 model.num_heads=16 model.mlp_dim=8192 "
    "model.vocab_size=32000",
    "llama3_8b lora.rank=8 lora.base=int4 mesh.fsdp=2 mesh.context=4 rules=replicated train.seq_len=32768 "
    "train.global_batch=4 remat=dots model.num_layers=32 model.embed_dim=2048 model.num_heads=16 "
    "model.mlp_dim=8192 model.vocab_size=32000",
    "llama3_8b lora.rank=8 lora.base=int8 mesh.data=4 mesh.fsdp=1 mesh.tensor=2 rules=replicated "
    "train.seq_len=4096 train.global_batch=4 remat=dots model.num_layers=12 model.embed_dim=3072 "
    "model.num_heads=24 model.mlp_dim=12288 model.vocab_size=32000",
    "llama3_8b lora.rank=16 lora.base=int8 mesh.fsdp=2 mesh.context=4 rules=replicated train.seq_len=8192 "
    "train.global_batch=2 model.num_layers=12 model.embed_dim=4096 model.num_heads=32 model.mlp_dim=12288 "
    "model.vocab_size=32000",
    "llama3_8b lora.rank=8 lora.base=int4 mesh.data=4 mesh.fsdp=1 rules=zero3 train.seq_len=2048 "
    "train.global_batch=8 train.accumulation=2 model.num_layers=32 model.embed_dim=2048 model.num_heads=16 "
    "model.mlp_dim=8192 model.vocab_size=32000",
    "llama3_8b train.seq_len=4096",
    "llama3_8b mesh.fsdp=16 train.global_batch=16",
    "llama3_8b mesh.fsdp=16 train.accumulation=2 train.global_batch=32",
    "llama3_8b train.seq_len=65536",
    "llama3_8b mesh.fsdp=2 mesh.context=4 context_attention=ulysses train.seq_len=65536 train.global_batch=2",
    "llama3_8b mesh.fsdp=4 mesh.tensor=2 train.seq_len=32768 train.global_batch=4",
    "llama3_8b mesh.fsdp=2 mesh.pipeline=4 train.accumulation=8 train.global_batch=16 train.seq_len=32768",
    "llama3_8b remat=dots train.seq_len=32768 model.num_layers=16",
    "mixtral_8x7b mesh.fsdp=8 mesh.expert=1 model.num_layers=8 train.global_batch=8 train.seq_len=32768",
    "llama3_8b lora.rank=16 mesh.fsdp=8 train.seq_len=32768",
    "llama3_8b lora.rank=16 mesh.fsdp=2 mesh.context=4 context_attention=ulysses train.seq_len=65536 "
    "train.global_batch=2",
    "llama3_8b lora.rank=16 mesh.fsdp=8 train.seq_len=4096 remat=names",
    "llama3_8b lora.rank=16 mesh.fsdp=4 mesh.context=2 train.seq_len=8192 train.global_batch=4 remat=names",
    "llama3_8b lora.rank=16 mesh.fsdp=1 mesh.data=8 rules=replicated train.seq_len=4096 remat=names",
    "llama3_8b lora.rank=16 mesh.fsdp=16 train.seq_len=4096 train.global_batch=16",
    "llama3_8b lora.rank=16 mesh.fsdp=16 train.seq_len=4096 train.global_batch=16 remat=names",
    "llama3_8b lora.rank=16 mesh.fsdp=16 train.seq_len=4096 train.global_batch=16 remat=dots",
    "qwen_hybrid",
    "qwen_hybrid model.num_layers=16 mesh.fsdp=4 mesh.tensor=2",
    "qwen_hybrid model.num_layers=16 mesh.fsdp=4 mesh.context=2 train.global_batch=4",
    "qwen_hybrid model.num_layers=16 remat=none train.seq_len=2048",
    "qwen_hybrid model.num_layers=16 remat=dots train.seq_len=4096",
    "qwen_hybrid model.num_layers=16 remat=names train.seq_len=4096",
    "qwen_hybrid model.num_layers=8 mesh.fsdp=1 train.global_batch=1 train.seq_len=4096 "
    "model.vocab_size=32000 model.embed_dim=2048 model.mlp_dim=6144",
    "qwen_hybrid model.num_layers=16 train.seq_len=4096 train.global_batch=16",
    "qwen_hybrid model.num_layers=16 train.seq_len=4096 train.accumulation=4 train.global_batch=32",
    "qwen_hybrid mesh.fsdp=2 mesh.pipeline=4 train.accumulation=8 train.global_batch=16 train.seq_len=4096 "
    "pipeline.schedule=gpipe pipeline.rounds=1",
    "qwen_hybrid train.seq_len=2048",
    "qwen_hybrid model.num_layers=16 mesh.fsdp=4 mesh.tensor=2 train.global_batch=4 train.seq_len=4096",
    "qwen_hybrid model.num_layers=8 remat=none train.seq_len=4096 mesh.fsdp=4 train.global_batch=4 "
    "model.vocab_size=64000",
    "qwen_hybrid model.num_layers=16 mesh.fsdp=2 mesh.context=4 train.global_batch=2 train.seq_len=16384 "
    "model.vocab_size=64000",
    "qwen_hybrid model.embed_dim=2560 model.mlp_dim=9216 model.vocab_size=100000 mesh.fsdp=16 train.global_batch=16",
    "llama3_8b remat=dots model.num_layers=8 unroll=0",
    "llama3_8b remat=dots mesh.fsdp=1 train.global_batch=8 train.seq_len=4096 model.num_layers=16 "
    "model.embed_dim=2048 model.num_heads=32 model.mlp_dim=8192 unroll=0",
    "llama3_8b remat=dots model.num_layers=8 mesh.fsdp=4 mesh.tensor=2 unroll=0",
    "llama3_8b remat=dots model.num_layers=8 mesh.fsdp=4 mesh.context=2 train.global_batch=4 unroll=0",
    "llama3_8b remat=dots unroll=0",
    "mixtral_8x7b lora.rank=16 lora.base=int8 mesh.fsdp=8 mesh.expert=1 train.global_batch=8 "
    "train.seq_len=2048 model.num_layers=8",
    "mixtral_8x7b lora.rank=16 mesh.fsdp=2 mesh.expert=4 train.global_batch=8 train.seq_len=2048 model.num_layers=8",
    "mixtral_8x7b lora.rank=16 lora.base=int8 mesh.fsdp=2 mesh.expert=4 train.global_batch=8 "
    "train.seq_len=4096 model.num_layers=8",
    "deepseek_v3 lora.rank=16 lora.base=int4 mesh.fsdp=8 mesh.expert=1 mesh.context=1 mesh.data=1 "
    "mesh.pipeline=1 model.num_layers=6 model.num_experts=32 train.global_batch=8 train.seq_len=4096 "
    "train.accumulation=1 model.embed_dim=5120 model.mlp_dim=12288",
    "deepseek_v3 lora.rank=16 mesh.fsdp=2 mesh.expert=4 mesh.context=1 mesh.data=1 mesh.pipeline=1 "
    "model.num_layers=6 model.num_experts=32 train.global_batch=8 train.seq_len=4096 train.accumulation=1",
    "mixtral_8x7b lora.rank=16 lora.base=int4 mesh.fsdp=8 mesh.expert=1 train.global_batch=8 "
    "train.seq_len=4096 model.num_layers=8",
    "mixtral_8x7b lora.rank=16 lora.base=int8 mesh.fsdp=8 mesh.expert=1 train.global_batch=8 "
    "train.seq_len=4096 model.num_layers=8",
    "mixtral_8x7b lora.rank=16 mesh.fsdp=4 mesh.expert=2 train.global_batch=8 train.seq_len=8192 model.num_layers=6",
    "llama3_8b mesh.fsdp=1 train.global_batch=1 train.seq_len=4096 offload.optimizer=True offload.params=True",
    "llama3_8b mesh.fsdp=1 train.global_batch=1 train.seq_len=4096 model.num_layers=8 remat=none "
    "offload.optimizer=True offload.params=True",
    "llama3_8b mesh.fsdp=1 train.global_batch=1 train.seq_len=4096 model.num_layers=16 model.vocab_size=32000 "
    "offload.optimizer=True",
    "llama3_8b mesh.fsdp=2 train.global_batch=2 train.seq_len=4096 offload.optimizer=True offload.params=True",
    "llama3_70b mesh.data=1 mesh.fsdp=1 mesh.tensor=1 mesh.context=8 train.global_batch=8 train.accumulation=1 "
    "offload.optimizer=True offload.params=True",
    "llama3_8b mesh.fsdp=1 train.global_batch=1 train.seq_len=4096 model.num_layers=16 optim.name=muon "
    "offload.optimizer=True",
)


@dataclasses.dataclass(frozen=True)
class Run:
    """A shipped configuration, or one of MODELS, with `overrides`, as a command line gives them; adapters stand on a
    checkpoint of it."""

    name: str
    overrides: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, words: str) -> "Run":
        """Of "llama3_8b remat=dots mesh.fsdp=4"."""
        name, *rest = words.split()
        return cls(name, tuple(tuple(word.split("=", 1)) for word in rest))

    def __str__(self) -> str:
        return " ".join([self.name, *map("=".join, self.overrides)])

    def config(self) -> RunConfig:
        if self.name in MODELS:
            config = dataclasses.replace(resolve("configs/llama3_8b.py", []).config, model=MODELS[self.name])
            config = override(config, self.overrides)
        else:
            config = resolve(f"configs/{self.name}.py", self.overrides).config
        if not config.lora.rank:
            return config
        return dataclasses.replace(config, model=Pretrained("unread", config=json.dumps(config.model.to_hf())))


def compiled(run: Run) -> dict[str, int]:
    """Bytes of one device: the step's arguments and its temporaries."""
    config = run.config()
    size = config.mesh.size(*config.mesh.sizes())
    program = Program.make(config, config.mesh.build(topology(GPU, max(1, size // 8), min(8, size))))
    found = program.compile("step", dict(program.xla_options().options)).memory_analysis()
    return {"argument_bytes": found.argument_size_in_bytes, "temporary_bytes": found.temp_size_in_bytes}


def main() -> None:
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {"jaxlib": jaxlib.__version__, "runs": {}}
    drawn = {f"random {seed}": random_run(seed) for seed in SEEDS if f"random {seed}" not in record["runs"]}
    for name, run in ({words: Run.parse(words) for words in VARIANTS if words not in record["runs"]} | drawn).items():
        record["runs"][name] = {"run": str(run)} | compiled(run)
        RECORD.write_text(json.dumps(record, indent=1) + "\n")


def random_run(seed: int) -> Run:
    """The run of a seed."""
    draw = random.Random(seed)
    while True:
        run = _drawn(draw, ("dense", "experts", "latent")[seed % 3])
        try:
            sketch = Sketch.of(run.config(), GPUS["h100"])
        except ShardlmError:
            continue
        layers = sketch.shape.num_layers if sketch.config.remat == "full" else 8 * sketch.shape.num_layers
        saved = sketch.tokens * sketch.shape.embed_dim * 2 * layers / sketch.mesh.pipeline / sketch.mesh.tensor
        saved *= sketch.passes if sketch.mesh.pipeline > 1 and sketch.config.pipeline.schedule != "1f1b" else 1
        logits = 6 * sketch.shape.vocab_size * sketch.shape.embed_dim / sketch.mesh.tensor
        if 4e9 < state(sketch).total + saved + logits < 30e9 and sketch.rows >= 1:
            return run


def _drawn(draw: random.Random, family: str) -> Run:
    dim = draw.choice((2048, 3072, 4096, 5120))
    axes = {"data": 2, "fsdp": 8, "context": 4, "pipeline": 4, "expert": 8 if family != "dense" else 1, "tensor": 4}
    # Not all axes at once: a run has two or three.
    used = draw.sample(sorted(axes), draw.choice((2, 3)))
    mesh = {axis: draw.choice([n for n in (2, 4, 8) if n <= axes[axis]] or [1]) if axis in used else 1 for axis in axes}
    ways = mesh["data"] * mesh["fsdp"] * mesh["expert"]
    microbatches = draw.choice((1, 1, 1, 4)) if mesh["pipeline"] == 1 else draw.choice((8, 16))
    pipelined = mesh["pipeline"] > 1
    layers = draw.choice((16, 24, 32))
    chosen = {
        **{f"mesh.{axis}": size for axis, size in mesh.items()},
        "rules": draw.choice(("zero3", "zero3", "zero3", "hybrid", "zero1")),
        "remat": draw.choice(("full", "full", "full", "names", "dots")),
        "precision": draw.choice(("bf16", "bf16", "bf16", "bf16", "fp32")),
        "train.global_batch": ways * microbatches * draw.choice((1, 1, 2)),
        "train.seq_len": draw.choice((2048, 4096, 8192)) * mesh["context"],
        "train.accumulation": microbatches,
        "pipeline.schedule": draw.choice(("circular", "gpipe", "1f1b")) if pipelined else "circular",
        "model.embed_dim": dim,
        "model.num_layers": layers + (3 if family == "latent" else 0),
        "model.vocab_size": draw.choice((32_000, 64_000, 128_256)),
        "model.num_heads": dim // 128,
    }
    return Run(
        FAMILIES[family], tuple((name, str(value)) for name, value in (chosen | _sizes(draw, family, dim)).items())
    )


def _sizes(draw: random.Random, family: str, dim: int) -> dict:
    if family == "dense":
        return {"model.num_kv_heads": draw.choice((4, 8)), "model.mlp_dim": draw.choice((3, 4)) * dim}
    if family == "experts":
        experts, top_k = draw.choice(((8, 2), (16, 2), (32, 4)))
        width = draw.choice((1024, 2048))
        return {
            "model.num_kv_heads": draw.choice((4, 8)),
            "model.num_experts": experts,
            "model.top_k": top_k,
            "model.expert_dim": width,
            "model.capacity_factor": draw.choice((0, 1.25)),
        }
    return {
        "model.mlp_dim": 3 * dim,
        "model.q_latent_dim": 1536,
        "model.num_experts": draw.choice((16, 32)),
        "model.groups": 4,
        "model.top_groups": 2,
        "model.top_k": 4,
        "model.expert_dim": draw.choice((512, 1024)),
        "model.capacity_factor": draw.choice((1.25, 2)),
    }


if __name__ == "__main__":
    main()
