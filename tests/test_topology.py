"""Devices that are not there: programs compile for them and report what that GPU would need."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardlm import hardware
from shardlm.errors import ShardlmError
from shardlm.topology import CHIPS, chip_of, target_config, topology

HAS_PLUGIN = bool(importlib.util.find_spec("jax_plugins") and importlib.util.find_spec("jax_plugins.xla_cuda13"))
needs_plugin = pytest.mark.skipif(not HAS_PLUGIN, reason="needs jax's CUDA plugin: pip install 'shardlm[cuda13]'")
# A program for a GPU that is not there is written to the persistent cache, but cannot be read back from it.
pytestmark = pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")


@pytest.mark.gpu_program
@needs_plugin
@pytest.mark.parametrize("name", CHIPS)
def test_a_sharded_program_compiles_for_the_gpu(name):
    devices = topology(name, num_hosts=2, gpus_per_host=4)
    assert [device.id for device in devices] == list(range(8))
    assert [device.process_index for device in devices] == [0] * 4 + [1] * 4
    assert hardware.lookup(devices[0].device_kind).name == name

    mesh = Mesh(np.array(devices), ("x",))
    rows, columns = NamedSharding(mesh, P("x", None)), NamedSharding(mesh, P(None, "x"))
    a = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=columns)
    b = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=rows)
    whole = NamedSharding(mesh, P())
    compiled = jax.jit(lambda a, b: jnp.tanh(a @ b), out_shardings=whole).lower(a, b).compile()
    assert "all-reduce" in compiled.as_text()  # each device holds a part of the contraction
    assert compiled.memory_analysis().argument_size_in_bytes == 2 * 1024 * 1024 * 2 / 8


@pytest.mark.gpu_program
@needs_plugin
def test_an_attention_kernel_of_cudnn_is_chosen_for_hopper():
    sharding = jax.sharding.SingleDeviceSharding(topology("h100", 1, 1)[0])
    q = jax.ShapeDtypeStruct((2, 1024, 8, 128), jnp.bfloat16, sharding=sharding)
    attend = lambda q: jax.nn.dot_product_attention(q, q, q, is_causal=True, implementation="cudnn")  # noqa: E731
    assert "__cudnn$fmha" in jax.jit(attend).lower(q).compile().as_text()


def test_the_description_states_the_figures_of_the_table():
    text = target_config("h200")
    assert 'name: "NVIDIA H200"' in text
    assert f"device_memory_size: {hardware.GPUS['h200'].hbm_bytes}\n" in text
    assert "memory_bandwidth: 4800000000000\n" in text


def test_every_gpu_of_the_table_can_be_compiled_for_and_makes_its_peak():
    assert set(CHIPS) == set(hardware.GPUS)
    for name, chip in CHIPS.items():
        peak = chip.cores * chip.fpus_per_core * 2 * chip.clock_ghz * 1e9
        assert peak == pytest.approx(hardware.GPUS[name].peak.fp32, rel=0.08), name  # 0.1% but for clocks of Blackwell


def test_a_gpu_of_a_file_is_the_chip_that_it_is_based_on_with_its_own_memory():
    own = dataclasses.replace(hardware.GPUS["l40s"], name="l40s-20", hbm_bytes=20 * 2**30)
    assert chip_of(own) == CHIPS["l40s"]
    assert f"device_memory_size: {20 * 2**30}\n" in target_config(own)


def test_a_gpu_without_description_is_refused():
    other = dataclasses.replace(hardware.GPUS["h100"], name="h800", device_kinds=("NVIDIA H800",))
    with pytest.raises(
        ShardlmError, match=r"compiled for h800 .* 'NVIDIA H800' is the device kind of none of a100, a100-40gb"
    ):
        topology(other, 1, 8)
    with pytest.raises(ShardlmError, match="no figures are known for a GPU 'h1000'; did you mean h100"):
        topology("h1000", 1, 8)


def test_sizes_must_be_positive():
    with pytest.raises(ShardlmError, match="0 hosts of 8 GPUs: both must be positive"):
        topology("h100", 0, 8)


def test_a_missing_plugin_says_what_to_install(monkeypatch):
    def missing(*args, **kwargs):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(topologies, "get_topology_desc", missing)
    with pytest.raises(ShardlmError, match=r"pip install 'shardlm\[cuda13\]'"):
        topology("h100", 1, 8)
