"""Serving plans whose pages' positions are split over devices (ops/split_pages.py)."""

import dataclasses
import types

import pytest
from served_cases import on

from shardlm.errors import ShardlmError
from shardlm.mesh import MeshSpec
from shardlm.models.deepseek import DeepseekConfig
from shardlm.plan.serving.search import ServingPlan, best_on

V3 = dataclasses.replace(DeepseekConfig(), num_layers=4)


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
