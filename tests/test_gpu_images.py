"""Encoders of images compiled for NVIDIA GPUs without one, at the sizes that are published: they attend by cuDNN, and
XLA has kernels for what else they do. Plans foresee their FLOPs. Every figure is read from the program (compiled)."""

import json
import math
import re

import jax
import jax.numpy as jnp
import pytest
from gpu_programs import MARKS
from jax.sharding import NamedSharding

from shardlm.hlo.flops import matmul_flops
from shardlm.mesh import MeshSpec
from shardlm.ops.cudnn_heads import traced_for
from shardlm.plan.serving.encoder import Image, operations
from shardlm.rules import Rules
from shardlm.topology import topology
from shardlm.train.seeing import Seeing
from shardlm.vision import ovis2
from shardlm.vision.encoder import Encoder
from shardlm.vision.registry import sight_of

pytestmark = MARKS

QWEN3 = {"hidden_size": 1024, "depth": 24, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]}
# vision_config of each `model_type` where it is not what transformers has by itself, and patches.
FAMILIES = {
    "qwen2_vl": ({}, 4096),
    "qwen2_5_vl": ({"hidden_size": 1280}, 4096),
    "exaone4_5": ({"hidden_size": 1280}, 4096),
    "qwen3_vl": (QWEN3, 4096),
    "qwen3_5": ({}, 4096),  # heads of 72
    "mistral3": ({}, 4096),
    "gemma3": ({"image_size": 896, "patch_size": 14, "hidden_size": 1152, "intermediate_size": 4304}, 4096),
    "gemma4": ({}, 2520),
    "kimi_k25": ({}, 4096),
    "llama4": ({}, 4096),
    "internvl": ({}, 4096),
    "llava": ({"model_type": "clip_vision_model"}, 4096),
    "llava_next": ({"model_type": "clip_vision_model"}, 4096),
    "llava_onevision": ({}, 4096),  # tiles put together again
    "qwen2_5_omni_thinker": ({"hidden_size": 1280}, 4096),
    "aya_vision": ({"num_attention_heads": 16, "image_size": 364}, 4096),
    "janus": ({}, 576),
    "deepseek_vl": ({"hidden_size": 1024, "image_size": 384, "num_attention_heads": 16}, 576),
    "ovis2": ({"vocab_size": 65_536, "hidden_stride": 2, "image_size": 448}, 3072),
    "paligemma": ({}, 256),
    "cohere2_vision": ({"num_attention_heads": 16}, 4096),
    "lfm2_vl": ({"hidden_size": 1152, "num_attention_heads": 16}, 4096),  # an image in one part
    "glm4v": ({}, 4096),
    "glm_ocr": ({}, 4096),  # norms of queries and keys
    "paddleocr_vl": ({}, 4096),
    "minimax_m3_vl": ({}, 4096),  # heads of 80, of which 78 are turned
}
TOKENS = ["[IMG_BREAK]", "[IMG_END]", "<img>", "</img>", "\n\n", "\n\n\n", "\n\n\n\n"]
TOKENS += [f"<|{name}|>" for name in ("image_start", "image", "image_end", "tile_x_separator", "tile_y_separator")]
TOKENS += ["<image>", "\n", "<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"]
TOKENS += ["<begin_of_image>", "<end_of_image>", "TILE_GLOBAL", *(f"TILE_{n}" for n in range(1, 13))]
TOKENS += ["<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>", "]<]start of image[>[", "]<]end of image[>["]
TOKENS += ["<|img_thumbnail|>", *(f"<|img_row_{r}_col_{c}|>" for r in range(1, 11) for c in range(1, 11))]


def sight(kind: str, folder):
    """(how the family sees, patches)."""
    vision, patches = FAMILIES[kind]
    added = [{"content": content, "id": id} for id, content in enumerate(TOKENS)]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    usual = {"num_hidden_layers": 27, "num_attention_heads": 16} if kind == "gemma3" else {}
    options = {"model_type": kind, "vision_config": usual | vision, "text_config": {"hidden_size": 2560}}
    if kind == "ovis2":
        options["visual_indicator_token_ids"] = [TOKENS.index(name) for name in ovis2.NAMES]
    found = sight_of(folder, options)
    return found, next(size for size in found.sizes if size >= patches or size == found.sizes[-1])


def compiled(kind: str, gpu: str, folder):
    """(the program, what a plan takes it for)."""
    own, patches = sight(kind, folder)
    mesh = MeshSpec().build(topology(gpu, 1, 1))
    encoder = Encoder.make(own.encoder, jnp.bfloat16, mesh)
    whole = NamedSharding(mesh, jax.P())
    here = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole)  # noqa: E731
    count = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
    with jax.set_mesh(mesh), traced_for(mesh.devices.flat[0]):
        lowered = jax.jit(encoder).lower(encoder.shapes, jax.tree.map(here, encoder.inputs(patches)), count)
    return lowered.compile(), Image(own.encoder, patches, patches, own.merged)


# Of each width of heads (80, 64, 72, 128, 48) one, and those that pad patches or turn a part of heads: a GPU makes no
# other difference.
ON_A100 = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v", "llama4", "gemma4", "minimax_m3_vl")


@pytest.mark.parametrize(
    ("kind", "gpu"), [*((kind, "h100") for kind in FAMILIES), *((kind, "a100") for kind in ON_A100)]
)
def test_attends_by_cudnn(kind, gpu, tmp_path):
    program, image = compiled(kind, gpu, tmp_path)
    assert program.as_text().count('custom_call_target="__cudnn$fmhaSoftmax"') == 1
    shown = matmul_flops(program.as_text()).flops
    assert foreseen(image) == pytest.approx(shown, rel=0.01)


def foreseen(image: Image) -> float:
    """FLOPs as a compiled program shows them: of layers with windows, the branch that sees all."""
    found = list(operations(image, 2, fused=True))
    everywhere = [op for op in found if op.unit == "attention"]
    products = sum(op.flops * op.count for op in found if op.layer != "attention")
    return products + image.config.tower.layers * sum(op.flops for op in everywhere)


def seeing_of(kind: str, folder, part: str):
    """(what reads, and trains, an encoder over fsdp=2 x tensor=2, patches, what a plan takes an image for)."""
    own, patches = sight(kind, folder)
    spec, width = MeshSpec(fsdp=2, tensor=2), own.encoder.width
    rules = Rules.make("zero3", spec)
    rows = NamedSharding(spec.build(topology("h100", 1, 4)), rules.act.spec("batch", "whole_seq"))
    seeing = Seeing.make(own, rows, (8, 8192), width, jnp.bfloat16, part, rules)
    return seeing, patches, Image(own.encoder, patches, patches, own.merged)


def test_devices_that_share_rows_read_images_of_a_batch_in_turn(tmp_path):
    """By cuDNN, inside of one program, whose only collective is of vectors between those devices, into the batch's."""
    seeing, patches, _ = seeing_of("qwen3_vl", tmp_path, "frozen")
    program = seeing.lower(patches).compile()
    text = program.as_text()
    vectors = 4 * 8192 * seeing.width * 2  # of a device
    assert text.count('custom_call_target="__cudnn$fmhaSoftmax"') == 1
    assert re.findall(r"(all-\w+|reduce-scatter|collective-permute)-start\(", text) == ["all-gather"]
    assert program.memory_analysis().alias_size_in_bytes == vectors
    assert program.memory_analysis().temp_size_in_bytes < 256 * 2**20


@pytest.mark.parametrize("part", ["projector", "all"])
def test_the_way_back_to_an_encoder_that_is_trained(part, tmp_path):
    """By cuDNN both ways, each layer made anew; between devices gradients of vectors alone, into sums in their place.
    Nearly four times the FLOPs of reading (forward, again, and back; not to the pixels), and the tower once where only
    what comes after it learns."""
    seeing, patches, image = seeing_of("qwen3_vl", tmp_path, part)
    program = seeing.lower_gradients(patches).compile()
    text, forward, back = program.as_text(), "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"
    calls = [text.count(f'custom_call_target="{name}"') for name in (forward, back)]
    assert calls == ([2, 1] if part == "all" else [1, 0])
    assert re.findall(r"(all-\w+|reduce-scatter|collective-permute)-start\(", text) == ["reduce-scatter"]
    sums = 4 * sum(math.prod(s.shape) for s in jax.tree.leaves(seeing.learned.shapes))
    assert program.memory_analysis().alias_size_in_bytes == sums
    assert program.memory_analysis().temp_size_in_bytes < (1600 if part == "all" else 700) * 2**20
    times = matmul_flops(text).flops / foreseen(image)
    assert times == pytest.approx(3.9 if part == "all" else 1.1, abs=0.1)
