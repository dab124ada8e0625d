"""Which points their own system has since surpassed beyond what a prediction could be right about."""

import dataclasses
from types import MappingProxyType

import pytest

from shardlm.plan.superseded import superseded
from shardlm.plan.validate import FAR


@pytest.fixture(scope="module")
def early(published):
    return published.points["bridge-llama3.1-8b-h100x8-fp8-25.11"]


def found(published, early, times=2.0, **changes):
    """Of this point and of one a month later, so many times as fast, with changes: what supersedes it."""
    faster = dataclasses.replace(early.measured, tokens_per_s_per_gpu=times * early.measured.tokens_per_s_per_gpu)
    late = dataclasses.replace(early, **{"name": "late", "released": "25.12", "measured": faster} | changes)
    points = MappingProxyType({early.name: early, "late": late})
    return superseded(dataclasses.replace(published, points=points), FAR).get(early.name)


def test_a_later_run_of_the_same_supersedes_whatever_its_mesh_and_batch(published, early):
    assert found(published, early) == "late"
    assert found(published, early, global_batch=256, microbatches=32, precision="bf16") == "late"


@pytest.mark.parametrize(
    "changes",
    [
        {"released": "25.11"},
        {"released": ""},
        {"framework": "NeMo"},
        {"model": "llama2-7b"},
        {"gpu": "b200"},
        {"num_gpus": 16},
        {"seq_len": 4096},
    ],
)
def test_anything_else_does_not(published, early, changes):
    assert found(published, early, **changes) is None


def test_neither_do_fewer_bits_nor_a_little_more_speed(published, early):
    wide = dataclasses.replace(early, precision="bf16")
    assert found(published, wide) == "late" and found(published, wide, precision="fp8") is None
    # A prediction that is right for a run of 1.32 times the speed is 24% too fast for this one.
    assert found(published, early, times=1.32) is None and found(published, early, times=1.35) == "late"
