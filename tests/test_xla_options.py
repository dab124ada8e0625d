"""Profiles of XLA options: known ones are kept, unknown ones reported, and they change the program as they
say."""

import importlib.util
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardlm import xla_options
from shardlm.errors import ShardlmError
from shardlm.hardware import GPUS
from shardlm.mesh import MeshSpec
from shardlm.models.mixtral import MixtralConfig
from shardlm.plan.sketch import Sketch
from shardlm.topology import topology
from shardlm.train.config import RunConfig, TrainConfig
from shardlm.train.program import Program
from shardlm.xla_options import PROFILES, Option, check_options, joined_in_host, profile_of, resolve_profile

HAS_PLUGIN = bool(importlib.util.find_spec("jax_plugins") and importlib.util.find_spec("jax_plugins.xla_cuda13"))
needs_plugin = pytest.mark.skipif(not HAS_PLUGIN, reason="needs jax's CUDA plugin: pip install 'shardlm[cuda13]'")
# A program for a GPU that is not there is written to the persistent cache, but cannot be read back from it.
pytestmark = pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")


def fake(platform="gpu", kind="", **more):
    return types.SimpleNamespace(platform=platform, device_kind=kind, **more)


def mesh_of(*devices, **axes):
    """What profiles ask of a mesh."""
    return types.SimpleNamespace(devices=np.array(devices), shape=axes)


def test_auto_goes_by_the_generation_of_the_device():
    assert profile_of(fake("cpu", "cpu")) == "cpu"
    assert profile_of(fake(kind="NVIDIA A100-SXM4-80GB")) == "ampere"
    assert profile_of(fake(kind="NVIDIA L40S")) == "ampere"
    assert profile_of(fake(kind="NVIDIA H200")) == "hopper"
    assert profile_of(fake(kind="NVIDIA GB200")) == "blackwell"
    assert profile_of(fake(kind="NVIDIA H100 NVL", compute_capability="9.0")) == "hopper"
    assert profile_of(fake(kind="NVIDIA B300", compute_capability="10.3")) == "blackwell"
    assert profile_of(fake(kind="NVIDIA Next", compute_capability="20.0")) == "none"
    assert profile_of(fake(kind="another maker's")) == "none"


def test_auto_on_this_machine_compiles():
    resolved = resolve_profile("auto", mesh_of(jax.devices("cpu")[0]))
    assert resolved.profile == "cpu" and not resolved.options
    several = resolve_profile("auto", MeshSpec(tensor=2).build(jax.devices("cpu")[:2]))
    assert dict(several.options) == {"xla_cpu_enable_concurrency_optimized_scheduler": False} and not several.left_out
    assert resolved.report() == ""
    jax.jit(lambda x: x + 1).lower(1.0).compile(compiler_options=dict(resolved.options))


def test_an_unknown_profile_is_refused():
    with pytest.raises(ShardlmError, match="unknown XLA profile 'volta'; choose one of auto, none, cpu, ampere"):
        resolve_profile("volta", mesh_of(jax.devices("cpu")[0]))


def test_options_that_jaxlib_refuses_are_reported_and_left_out():
    options = (
        Option((("xla_cpu_enable_fast_math", False),), "kept"),
        Option((("xla_no_such_option", True),), "speed"),
        Option((("xla_cpu_enable_fast_min_max", "perhaps"),), "a wrong value"),
        Option((("xla_its_new_name", 1), ("xla_llvm_disable_expensive_passes", False)), "renamed"),
    )
    resolved = check_options("mine", options, jax.devices("cpu")[0])
    assert dict(resolved.options) == {
        "xla_cpu_enable_fast_math": False,
        "xla_llvm_disable_expensive_passes": False,
    }
    assert [out.name for out in resolved.left_out] == ["xla_no_such_option", "xla_cpu_enable_fast_min_max"]
    first, second = resolved.report().splitlines()
    assert "XLA option xla_no_such_option=True of profile mine is left out: " in first
    assert "No such compile option: 'xla_no_such_option'" in first
    assert first.endswith("(it was for: speed)")
    assert "is not a valid bool value" in second


def test_a_profile_of_known_options_takes_one_trial_compile(monkeypatch):
    tried = []
    monkeypatch.setattr(xla_options, "_error", lambda options, device: tried.append(options))
    hosts = [fake(kind="NVIDIA H200", process_index=i) for i in range(2)]
    resolved = resolve_profile("hopper", mesh_of(*hosts))
    assert tried == [resolved.options]
    assert len(resolved.options) == len(PROFILES["hopper"]) - 3  # but what is for hundreds of devices, experts or PCIe


def test_small_gathers_are_made_together_over_hundreds_of_devices(monkeypatch):
    monkeypatch.setattr(xla_options, "_error", lambda options, device: None)
    one, other = (fake(kind="NVIDIA H100 80GB HBM3", process_index=i) for i in range(2))

    def combined(**axes):
        devices = [one, other] * (math.prod(axes.values()) // 2)
        return (
            "xla_gpu_all_gather_combine_threshold_bytes" in resolve_profile("auto", mesh_of(*devices, **axes)).options
        )

    assert combined(fsdp=64, expert=4, context=2)
    assert not combined(fsdp=64, expert=4) and not combined(fsdp=64, tensor=8)


def test_where_gathers_are_pipelined(monkeypatch):
    monkeypatch.setattr(xla_options, "_error", lambda options, device: None)
    one, other = (fake(kind="NVIDIA H100 80GB HBM3", process_index=i) for i in range(2))
    pipelined, limit = "xla_gpu_pipeline_all_gather", "xla_gpu_experimental_parallel_collective_overlap_limit"
    memory = "xla_gpu_memory_limit_slop_factor"

    def chosen(*devices, **axes):
        options = resolve_profile("auto", mesh_of(*devices, **axes)).options
        return {name for name in (pipelined, limit, memory) if name in options}

    inside = {memory, pipelined} if jax.__version_info__ >= (0, 11) else {memory}
    assert chosen(one, one, fsdp=2) == chosen(one, one, fsdp=1, tensor=2) == inside
    assert chosen(one, one, pipeline=2) == {memory} and not chosen(one, one, fsdp=1, expert=2)
    assert chosen(one, other, fsdp=2, tensor=1) == {pipelined, limit, memory}
    assert chosen(one, other, fsdp=1, tensor=2) == {pipelined, limit, memory}
    assert chosen(one, other, fsdp=1, pipeline=2) == {pipelined, limit, memory}
    assert chosen(one, one, other, other, pipeline=2, tensor=2) == {limit, memory}
    assert chosen(one, other, fsdp=1, expert=2) == {pipelined}
    assert chosen(*[one] * 4, *[other] * 4, fsdp=4, expert=2) == {pipelined, limit}


def test_several_collectives_are_under_way_where_a_host_has_no_nvlink(monkeypatch):
    monkeypatch.setattr(xla_options, "_error", lambda options, device: None)
    limit = "xla_gpu_experimental_parallel_collective_overlap_limit"

    def under_way(kind, count, ragged=False, **axes):
        mesh = mesh_of(*[fake(kind=kind, process_index=0)] * count, **axes)
        return resolve_profile("auto", mesh, ragged).options.get(limit)

    for kind in ("NVIDIA L40S", "NVIDIA A40", "NVIDIA GeForce RTX 4090", "NVIDIA H100 PCIe"):
        assert under_way(kind, 8, fsdp=8) == under_way(kind, 8, fsdp=4, tensor=2) == 4
        assert under_way(kind, 8, fsdp=4, pipeline=2) == under_way(kind, 8, fsdp=4, expert=2) == 4
        assert under_way(kind, 8, fsdp=2, expert=4) is None
        assert under_way(kind, 8, ragged=True, fsdp=8) == 1
    assert under_way("NVIDIA A40", 2, fsdp=2) is None  # a bridge joins two
    assert under_way("NVIDIA L40S", 2, fsdp=2) == 4
    for kind in ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA GB200", "another maker's"):
        assert under_way(kind, 8, fsdp=8) is None


def test_tokens_are_sent_to_experts_by_nccl_and_alone(monkeypatch):
    monkeypatch.setattr(xla_options, "_error", lambda options, device: None)
    one, other = (fake(kind="NVIDIA H100 80GB HBM3", process_index=i) for i in range(2))
    mesh = mesh_of(*[one] * 4, *[other] * 4, fsdp=4, expert=2)
    limit = "xla_gpu_experimental_parallel_collective_overlap_limit"
    own_kernel = "xla_gpu_unsupported_use_ragged_all_to_all_one_shot_kernel"
    allowed = "xla_gpu_allow_ragged_all_to_all_nccl_send_recv_fallback"
    whole, sent = (resolve_profile("auto", mesh, ragged).options for ragged in (False, True))
    assert whole[limit] > 1 and own_kernel not in whole
    assert (sent[limit], sent[own_kernel]) == (1, False)
    assert (allowed in sent) == (jax.__version_info__ >= (0, 11))
    assert not resolve_profile("none", mesh, True).options


@pytest.mark.gpu_program
@needs_plugin
@pytest.mark.parametrize("devices", [8, 32])
def test_programs_that_send_tokens_say_so(devices):
    """Of 8 experts two are chosen: over the 8 devices of one host tokens are sent, over two they are gathered, and
    over a host's of several, as plans have it."""
    mixture = MixtralConfig(
        vocab_size=512, embed_dim=256, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=64, expert_dim=256
    )

    def options(expert: int):
        mesh = MeshSpec(fsdp=devices // expert, expert=expert)
        train = TrainConfig(global_batch=devices, seq_len=256, accumulation=1)
        config = RunConfig(model=mixture, mesh=mesh, train=train)
        program = Program.make(config, mesh.build(topology("h100", devices // 8, 8)))
        found = program.xla_options()
        assert not found.left_out
        sketch = Sketch.of(config, GPUS["h100"])
        assert sketch.execution.gathers_tokens == program.model.execution.gathers_tokens == (devices > 8)
        return found.options, "ragged_all_to_all" in program.lower_step().as_text()

    for expert, ragged in ((8, devices == 8), (2, False)):
        found, there = options(expert)
        assert there == ragged
        assert (found.get("xla_gpu_unsupported_use_ragged_all_to_all_one_shot_kernel", True) is False) == ragged


def test_nvlink_joins_all_of_a_host_or_none():
    def joined(kind, hosts, each):
        return joined_in_host(mesh_of(*(fake(kind=kind, process_index=i) for i in range(hosts) for _ in range(each))))

    assert joined("NVIDIA H100 80GB HBM3", 2, 8) == joined("NVIDIA A100-SXM4-80GB", 1, 8) == 8
    assert joined("NVIDIA GB200", 4, 4) == 4
    assert joined("NVIDIA A40", 1, 2) == 2  # by a bridge
    assert joined("NVIDIA A40", 1, 4) == joined("NVIDIA L40S", 2, 8) == joined("another maker's", 2, 8) == 1


def test_every_option_has_a_reason():
    assert all(option.reason for options in PROFILES.values() for option in options)


@pytest.mark.gpu_program
@needs_plugin
@pytest.mark.parametrize(("gpu", "profile"), [("a100", "ampere"), ("h100", "hopper"), ("b200", "blackwell")])
def test_the_installed_jaxlib_knows_every_option(gpu, profile):
    devices = topology(gpu, 2, 1)
    assert resolve_profile("auto", mesh_of(*devices)).profile == profile
    checked = check_options(profile, PROFILES[profile], devices[0])
    assert checked.report() == ""
    assert len(checked.options) == len({option.spellings[0][0] for option in PROFILES[profile]})


@pytest.mark.gpu_program
@needs_plugin
def test_the_profile_gathers_the_next_layer_while_this_one_computes():
    mesh = Mesh(np.array(topology("h100", 2, 8)), ("fsdp",))
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P(None, "fsdp", None))

    def forward(weights, x):
        def layer(x, w):
            w = jax.lax.with_sharding_constraint(w.astype(jnp.bfloat16), whole)
            return jnp.tanh(x @ w), None

        return jax.lax.scan(layer, x, weights)[0]

    weights = jax.ShapeDtypeStruct((16, 2048, 2048), jnp.float32, sharding=split)
    x = jax.ShapeDtypeStruct((8192, 2048), jnp.bfloat16, sharding=NamedSharding(mesh, P("fsdp")))
    lowered = jax.jit(forward).lower(weights, x)

    def gathers_before_the_loop(options):
        entry = lowered.compile(compiler_options=dict(options)).as_text().partition("\nENTRY ")[2]
        return entry.partition(" while(")[0].count("all-gather-start(")

    assert gathers_before_the_loop({}) == 0
    assert gathers_before_the_loop(resolve_profile("hopper", mesh).options) > 0
