"""The rows `images` of `launch.bench gpu`: what they hold an encoder to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_programs import on_gpus

from shardlm.bench.image_kernels import attended, looked, products, square
from shardlm.bench.kernel_cases import FULL, TINY, Looked
from shardlm.bench.kernel_timing import largest_error, programs_of
from shardlm.bench.published_encoders import sight_named
from shardlm.mesh import MeshSpec
from shardlm.topology import topology
from shardlm.vision.encoder import Encoder, parameters_of

PARAMETERS = {  # without those of the text, in millions
    "Qwen2.5-VL 7B": 676.6,
    "Qwen3-VL 8B": 576.4,
    "Gemma 3": 419.8,
    "Mistral Small 3.1": 439.0,
}


def encoder_of(name: str) -> Encoder:
    return Encoder.make(sight_named(name).encoder, jnp.bfloat16, MeshSpec().build(jax.devices()[:1]))


@pytest.mark.parametrize("name", TINY["images"])
def test_an_encoder_equals_its_reference(name):
    with jax.set_mesh(MeshSpec().build(jax.devices()[:1])):
        kernel = looked(TINY["images"][name], on_gpu=False)
        inputs = jax.jit(kernel.inputs)(jax.random.key(0))
        assert inputs[1]["pixels"].std() > 1 and 0 < largest_error(kernel, inputs) <= kernel.allowed
        wrong = inputs[1] | {"pixels": inputs[1]["pixels"] // 2}
        run, reference = jax.jit(kernel.run), jax.jit(kernel.reference)
        off = run(*inputs).astype(jnp.float32) - reference(inputs[0], wrong, inputs[2])
        assert jnp.abs(off).max() > 10 * kernel.allowed  # of vectors of about 1: the image is seen


@pytest.mark.parametrize("name", PARAMETERS)
def test_encoders_are_those_that_are_published(name):
    assert parameters_of(sight_named(name).encoder) / 1e6 == pytest.approx(PARAMETERS[name], abs=0.05)


def test_flops_by_hand():
    """Of 4 layers, of which 2 have windows of 4 x 4 patches; D = 48, 3 heads of 16, F = 56."""
    sight, encoder = sight_named("windows"), encoder_of("windows")
    picture = square(sight, 256)
    assert np.bincount(picture.inputs["windows"]).tolist() == [16] * 16
    assert attended(sight, picture) == 4 * 3 * 16 * (2 * 256**2 + 2 * 16 * 16**2)
    weights = 2 * 4 * 4 * 3 * 48 + 4 * (4 * 48 * 48 + 3 * 48 * 56)
    after = 192 * 192 + 192 * 32
    expected = 2 * (weights * 256 + after * 64)
    assert expected < products(encoder, picture, sight.merged) < 1.03 * expected  # norms and biases


def test_learned_positions_are_read_and_not_multiplied():
    sight, encoder = sight_named("Gemma 3"), encoder_of("Gemma 3")
    total, read = parameters_of(sight.encoder), 4096 * 1152
    found = products(encoder, square(sight, 4096), sight.merged)
    assert found == 2.0 * ((total - read - 1152 * 2560 - 1152 * 3) * 4096 + (1152 * 2560 + 1152 * 3) * 256)


def test_more_patches_than_an_encoder_reads_are_refused():
    with pytest.raises(ValueError, match="a square of 448 pixels makes 4096 patches, not 1024"):
        looked(Looked("Gemma 3", 1024), on_gpu=False)


@on_gpus
@pytest.mark.parametrize("name", ["Qwen2.5-VL 7B, 1,024 patches", "Gemma 3, 4,096 patches"])
def test_attention_is_what_a_server_chooses(name):
    """And its scores are never written: all patches by all would be a GiB of float32 in Gemma 3."""
    mesh, shape = MeshSpec().build(topology("h100", 1, 1)), FULL["images"][name]
    kernel = looked(shape, on_gpu=True)
    chosen = Encoder.make(sight_named(shape.encoder).encoder, jnp.bfloat16, mesh).execution.attention
    program = programs_of(kernel, mesh)["run"]()()
    assert kernel.what.startswith(chosen) and "__cudnn$fmhaSoftmax" in program.as_text()
    assert program.memory_analysis().temp_size_in_bytes < 2**27  # 38 and 70 MiB, compiled
