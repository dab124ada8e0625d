"""Any mesh, same numbers, for rows split over the context axis: loss and gradients equal those of one device, by ring
and by Ulysses, for packed documents, sliding windows, soft caps and sinks."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import LLAMA, init, mesh_of, model_on, on_devices, packed_batch, relative_error

from shardlm.errors import ShardlmError
from shardlm.mesh import MeshSpec
from shardlm.models.llama import LlamaConfig
from shardlm.rules import Rules
from shardlm.train.check import check_length, check_model
from shardlm.train.step import NextToken, StepConfig, gradients

FP32 = 1e-5  # only the order of sums differs, as in test_parallel_parity


@dataclasses.dataclass(frozen=True)
class Windowed(LlamaConfig):
    """Layers that see 5 positions, by soft-capped scores and with sinks."""

    def transformer(self):
        whole = super().transformer()
        (segment,) = whole.segments
        (block,) = segment.pattern
        narrow = dataclasses.replace(
            block, attention=dataclasses.replace(block.attention, window=5, softcap=0.5, sinks=True)
        )
        return dataclasses.replace(whole, segments=(dataclasses.replace(segment, pattern=(narrow,)),))


WINDOWED = Windowed(**dataclasses.asdict(LLAMA))


def loss_and_gradients(spec, context, config=LLAMA, preset="zero3", accumulation=1, one_f_one_b=False):
    with jax.set_mesh(mesh_of(spec)):
        options = {"context_attention": context, "microbatches": accumulation, "remat": "full"}
        model = model_on(spec, preset, config, **options)
        step = StepConfig(accumulation=accumulation, objective=NextToken(1e-3), one_f_one_b=one_f_one_b)
        run = jax.jit(lambda p, b: gradients(model, p, b, jnp.float32(1), step))
        return jax.tree.map(np.asarray, run(init(model), on_devices(packed_batch(), model)))


@functools.cache
def one_device(config=LLAMA):
    return loss_and_gradients(MeshSpec(), "ring", config, "replicated")


def assert_same(got, config=LLAMA):
    grads, losses = one_device(config)
    assert relative_error(got[1], losses) < FP32
    assert relative_error(got[0], grads) < FP32


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "spec,context",
    [
        (MeshSpec(context=8), "ring"),
        (MeshSpec(context=8), "ulysses"),
        (MeshSpec(context=2, fsdp=2, tensor=2), "ring"),
        (MeshSpec(context=2, fsdp=2, tensor=2), "ulysses"),
        (MeshSpec(context=2, tensor=4), "ring"),  # fewer kv heads than tensor shards
        (MeshSpec(data=2, context=4), "ring"),
    ],
    ids=str,
)
def test_ring_and_ulysses(spec, context):
    assert_same(loss_and_gradients(spec, context))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("context", ["ring", "ulysses"])
def test_windows_soft_caps_and_sinks_across_shards(context):
    assert_same(loss_and_gradients(MeshSpec(context=4, tensor=2), context, WINDOWED), WINDOWED)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("one_f_one_b", [False, True], ids=["circular", "1f1b"])
def test_inside_pipeline_stages(one_f_one_b):
    spec = MeshSpec(pipeline=2, context=2, tensor=2)
    options = {"accumulation": 4, "one_f_one_b": one_f_one_b}
    assert_same(loss_and_gradients(spec, "ring", WINDOWED, **options), WINDOWED)


def test_refusals():
    with pytest.raises(ShardlmError, match=r"seq_len=100 cannot be split over context=4 x tensor=2.*choose 96 or 112"):
        check_length(100, MeshSpec(context=4, tensor=2))
    with pytest.raises(ShardlmError, match=r"heads=4 and kv_heads=1 of each device.*choose context from 1, 2, 4, or"):
        check_model(LLAMA.transformer(), Rules.make("zero1", MeshSpec(context=8, tensor=2)), "ulysses")
