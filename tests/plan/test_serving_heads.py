"""Serving plans of models whose layers differ in what they keep: heads of two sizes in one pool of pages, layers that
read what others keep, and inputs of each layer's own. That the engine allocates as planned is
test_serving_memory.py's."""

import pathlib

import pytest

from shardlm.hardware import GPUS
from shardlm.mesh import MeshSpec
from shardlm.plan.cluster import Cluster
from shardlm.plan.serving.case import ServedModel, ServingCase
from shardlm.plan.serving.ops import Pass
from shardlm.plan.serving.search import ServingPlan
from shardlm.plan.serving.time import Speed
from shardlm.plan.serving.weights import cache_bytes, one_layer
from shardlm.serve.engine_config import EngineConfig

REFERENCES = pathlib.Path(__file__).parent.parent / "hf" / "references"
SIZES = {"max_model_len": 48, "block_size": 4, "max_num_seqs": 3, "max_num_batched_tokens": 8, "decode_steps": 4}


@pytest.mark.parametrize("family", ["gemma4", "gemma4_moe"])
def test_a_layer_reads_its_part_of_a_place(family):
    """Keys and values of its own heads in float32, however many like it share one; a page is of the largest."""
    shape = ServedModel.of_folder(REFERENCES / family, 48).shape
    model = one_layer(shape, MeshSpec(), "float32", "auto")
    found = {(a.num_kv_heads, a.head_dim): cache_bytes(model, a) for a in shape.attention_kinds}
    assert len(found) > 1 and found == {(heads, width): 2 * 4 * heads * width for heads, width in found}
    assert max(found.values()) <= cache_bytes(model)


def test_inputs_of_layers_are_made_once_and_what_others_keep_is_read():
    served = ServedModel.of_folder(REFERENCES / "gemma4", 48)
    engine = EngineConfig(mesh=MeshSpec(tensor=2), dtype="float32", kv_cache_bytes=2**19, **SIZES)
    case = ServingCase(served, Cluster.of(GPUS["h100"], 2), engine, 20, 9)
    plan, shape, one = ServingPlan.of(case), served.shape, Pass(2, 2, 20, 4)
    works = Speed.of(case, plan.memory)._works(0, one)
    ops = [(op, count) for work, count in works for op in work.ops]
    (made,) = (op for op, _ in ops if op.what == "from_embedding")
    assert made.flops == 2 * one.tokens * shape.embed_dim * shape.num_layers * shape.inputs.dim
    attending = [(op, count) for op, count in ops if op.layer == "attention" and op.unit == "attention"]
    assert sum(count for _, count in attending) == shape.num_layers  # readers too
    assert len(set(shape.sources)) < shape.num_layers and plan.at_once >= 1
