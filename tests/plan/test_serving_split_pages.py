"""Serving plans whose pages' positions are split over devices (ops/split_pages.py): over how many, what chunks of
prompts gather of them, and what that takes of memory."""

import dataclasses
import types

import pytest
from served_cases import LLAMA, on

from shardlm.errors import ShardlmError
from shardlm.mesh import MeshSpec
from shardlm.models.deepseek import DeepseekConfig
from shardlm.models.transformer_config import Segment, TransformerConfig
from shardlm.plan.serving.memory import serving_memory
from shardlm.plan.serving.ops import Pass
from shardlm.plan.serving.search import ServingPlan, best_on
from shardlm.plan.serving.time import Speed

V3 = dataclasses.replace(DeepseekConfig(), num_layers=4)
FEW_KV = dataclasses.replace(LLAMA, num_layers=2, num_kv_heads=4)
NARROW = {"embed_dim": 512, "vocab_size": 2048, "num_layers": 2, "mlp_dim": 512}
LATENTS = dataclasses.replace(V3, dense_layers=2, **NARROW)
FEW_OF_64 = dataclasses.replace(FEW_KV, num_heads=64, **NARROW)
LONG = 131_072


class Windowed:
    """Of FEW_OF_64 with four layers, every other one with a window."""

    def transformer(self) -> TransformerConfig:
        shape = dataclasses.replace(FEW_OF_64, num_layers=4).transformer()
        [block] = shape.segments[0].pattern
        first = dataclasses.replace(block, attention=dataclasses.replace(block.attention, window=4096))
        return dataclasses.replace(shape, segments=(Segment((first, block), 2),))


WINDOWED = Windowed()


@pytest.mark.parametrize(
    ("mesh", "enough", "tried", "best"),
    [
        ({"expert": 4, "tensor": 2}, 1, [1], 1),
        ({"expert": 4, "tensor": 2}, 2, [1, 2], 2),
        ({"expert": 4, "tensor": 2}, 4, [1, 2, 4], 4),
        ({"expert": 4, "tensor": 2}, 99, [1, 2, 4, 8], 8),
        ({"expert": 8}, 4, [1, 8], 8),
        ({"pipeline": 2, "expert": 4}, 99, [1, 4], 4),
        ({}, 99, [1], 1),
    ],
)
def test_pages_are_split_over_the_fewest_devices_that_leave_room(mesh, enough, tried, best, monkeypatch):
    """Where pages do not limit a plan any more, more devices send each other more and serve no more."""
    seen = []

    def of(case):
        ways = case.engine.decode_context_parallel_size
        seen.append(ways)
        if ways == 1 < enough == 99:
            raise ShardlmError("no room")
        most = types.SimpleNamespace(limit="pages" if ways < enough else "prompts")
        served = {"most": most, "num_gpus": 8, "gpus_per_replica": 8}
        return types.SimpleNamespace(case=case, tokens_per_second_per_gpu=min(ways, enough), **served)

    monkeypatch.setattr(ServingPlan, "of", of)
    case = dataclasses.replace(on("h100", 8, V3), splits=True).on(mesh=MeshSpec(**mesh))
    if best == 1 and enough == 99:
        with pytest.raises(ShardlmError, match="no room"):
            best_on(case)
    else:
        assert best_on(case).case.engine.decode_context_parallel_size == best
    assert seen == tried


def test_prompts_that_attend_to_what_is_at_hand_gather_no_pages():
    """Of kv heads, those that begin a text: cuDNN attends to their own keys and values (serve/prefill.py). Others
    gather what is before them and themselves, in blocks."""
    case = on("h100", 8, FEW_KV, mesh=MeshSpec(tensor=8), decode_context_parallel_size=8)
    speed = Speed.of(case, memory := serving_memory(case))
    [own] = [key for key in memory.sizes.chunk_programs if key == ("whole", (1, 2048))]
    assert own and speed.chunk(2048, 0) < speed.chunk(2048, 1)
    sums = speed.sent(0, Pass(2048, 1, 0, 2, prompts="whole"))["tensor"]
    more = speed.sent(0, Pass(2048, 1, 512, 2, prompts="pages"))["tensor"]
    position = 2 * 4 * 128 * 2  # bytes of keys and values in a layer
    assert more["all-gather"] - sums["all-gather"] == FEW_KV.num_layers * 7 / 8 * 4096 * position  # 8 MiB
    assert more["all-reduce"] == sums["all-reduce"] and more.keys() == sums.keys()


@pytest.mark.parametrize(
    ("shape", "ways", "longest", "size", "what", "compiled"),
    [
        (LATENTS, 8, LONG, (1, 2048), "prefill", 145.9),
        (LATENTS, 8, LONG, (1, 512), "prefill", 44.7),
        (LATENTS, 8, LONG, (256, 2048), "prefill", 361.3),  # 64 rows of 32 tokens, or others of 2,048 in all
        (LATENTS, 8, LONG, (256, 2048), "decode", 336.0),
        (LATENTS, 8, 8192, (256, 2048), "decode", 75.7),  # of shorter texts fewer parts
        (LATENTS, 1, LONG, (256, 2048), "decode", 276.4),
        (LATENTS, 1, 8192, (256, 2048), "decode", 140.4),
        (LATENTS, 1, 8192, (256, 2048), "prefill", 87.2),
        (FEW_OF_64, 8, LONG, (1, 2048), "prefill", 41.4),
        (WINDOWED, 8, 8192, (256, 2048), "prefill", 217.6),
    ],
)
def test_what_pages_are_attended_to_by_is_in_memory(shape, ways, longest, size, what, compiled):
    """Queries, parts of results, gathered blocks; of narrow models, so that little else is, MiB (compiled for eight
    H100)."""
    rows, tokens = size
    options = {"max_num_seqs": rows, "max_num_batched_tokens": tokens, "prefill_attention": "pages"}
    case = on("h100", 8, shape, mesh=MeshSpec(tensor=8), decode_context_parallel_size=ways, **options)
    case = dataclasses.replace(case, model=dataclasses.replace(case.model, longest=longest))
    [stage] = serving_memory(case).stages
    assert getattr(stage, what) / 2**20 == pytest.approx(compiled, rel=0.09)
