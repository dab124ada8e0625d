"""What XLA makes of the real training step for NVIDIA GPUs, compiled without one: memory, collectives, kernels. Every
figure here is read from the optimised program (compiled), none is measured."""

import functools
import re

import pytest

from shardlm.errors import ShardlmError
from shardlm.mesh import MeshSpec
from shardlm.models.llama import LlamaConfig
from shardlm.topology import topology
from shardlm.train.config import RunConfig, TrainConfig
from shardlm.train.program import Program

GIB = 2**30
LLAMA_8B = LlamaConfig()
LLAMA_70B = LlamaConfig(embed_dim=8192, num_layers=80, num_heads=64, mlp_dim=28_672)


def plugin_missing() -> str:
    try:
        topology("h100", 1, 1)
    except ShardlmError as error:
        return str(error)
    return ""


REASON = plugin_missing()
pytestmark = [pytest.mark.gpu_program, pytest.mark.skipif(bool(REASON), reason=REASON or "the plugin is installed")]


@functools.cache
def compiled(spec, rules="zero3", gpu="h100", model=LLAMA_8B, rows=8):
    """(memory analysis, text) of the step on hosts of eight GPUs, with the GPU's own option profile."""
    devices = spec.size(*spec.sizes())
    mesh = spec.build(topology(gpu, max(1, devices // 8), min(8, devices)))
    train = TrainConfig(global_batch=rows, seq_len=8192)
    program = Program.make(RunConfig(model=model, rules=rules, precision="bf16", remat="full", train=train), mesh)
    options = program.xla_options()
    assert options.profile in ("hopper", "ampere") and not options.left_out
    step = program.lower_step().compile(dict(options.options))
    return step.memory_analysis(), step.as_text()


def count(text: str, kind: str) -> int:
    return len(re.findall(rf" {kind}(?:-start)?\(", text))


def test_fsdp_of_8b_on_eight_h100():
    memory, text = compiled(MeshSpec(fsdp=8))
    assert memory.argument_size_in_bytes == pytest.approx(11.22 * GIB, rel=0.01)  # 12 bytes x 8.03e9 / 8
    assert memory.temp_size_in_bytes < 14 * GIB
    assert count(text, "all-gather") and count(text, "reduce-scatter")
    assert not count(text, "all-to-all") and not count(text, "collective-permute")
    assert "__cudnn$fmha" in text
    # The whole logits of a device would be [1, 8192, 128256].
    assert not re.search(r"(?:f32|bf16)\[(?:1,)?8192,128256\]", text)
    assert re.search(r"all-gather-start\(", text)


def test_tensor_parallel_scatters_and_gathers_the_sequence():
    memory, text = compiled(MeshSpec(fsdp=4, tensor=2))
    assert memory.temp_size_in_bytes < 14 * GIB
    # The stream between blocks: half the sequence of this device's two rows.
    assert re.search(r"bf16\[2,4096,4096\]", text)
    assert count(text, "all-gather") and count(text, "reduce-scatter") and not count(text, "all-to-all")


def test_70b_on_64_h100_fits_with_a_margin():
    memory, _ = compiled(MeshSpec(fsdp=16, tensor=4), model=LLAMA_70B, rows=16)
    assert memory.argument_size_in_bytes + memory.temp_size_in_bytes < 40 * GIB


def test_a100_is_a_target_too():
    memory, text = compiled(MeshSpec(fsdp=8), gpu="a100")
    assert memory.argument_size_in_bytes + memory.temp_size_in_bytes < 40 * GIB and "__cudnn$fmha" in text
