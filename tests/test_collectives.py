"""The bill of a program's collectives tells what communicates more than it did, and why. Compiled for CPU devices; what
the shipped configurations send is test_shipped_programs.py's."""

import dataclasses
import re

import jax
import pytest
from small import LLAMA, mesh_of

from shardlm.hlo.bill import Bill, compare
from shardlm.hlo.collectives import collectives
from shardlm.mesh import MeshSpec
from shardlm.optim import OptimConfig
from shardlm.rules import Rules
from shardlm.train import settled
from shardlm.train.config import RunConfig, TrainConfig
from shardlm.train.program import Program


def small_bill(spec: MeshSpec) -> Bill:
    config = RunConfig(
        model=LLAMA,
        precision="fp32",
        optim=OptimConfig(warmup_steps=2),
        train=TrainConfig(steps=10, global_batch=8, seq_len=32),
    )
    step = Program.make(config, mesh_of(spec)).lower_step().compile()
    return Bill.of(collectives(step.as_text(), spec.sizes()))


@pytest.fixture(scope="module", autouse=True)
def lines_of_this_text():
    """The persistent cache would give back a program with the line numbers of an older text."""
    before = jax.config.jax_compilation_cache_include_metadata_in_key
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    yield
    jax.config.update("jax_compilation_cache_include_metadata_in_key", before)


SPEC = MeshSpec(data=2, fsdp=2, tensor=2)


@pytest.fixture(scope="module")
def right() -> Bill:
    return small_bill(SPEC)


def plant(monkeypatch, role: str, **wrong: tuple[str, ...]) -> None:
    """Rules whose table `role` has other mesh axes for these dimensions."""
    make = Rules.make

    def planted(preset, mesh):
        rules = make(preset, mesh)
        table = getattr(rules, role)
        entries = tuple((name, wrong.get(name, axes)) for name, axes in table.entries)
        return dataclasses.replace(rules, **{role: dataclasses.replace(table, entries=entries)})

    monkeypatch.setattr(Rules, "make", planted)
    monkeypatch.setattr(settled, "_rules", settled._rules.__wrapped__)  # which keeps those that it made


def test_the_same_program_has_the_same_bill(right):
    assert compare(Bill.from_json(right.to_json()), small_bill(SPEC)) == []


def test_a_weight_that_is_gathered_too_far_is_named_forward_and_backward(right, monkeypatch):
    plant(monkeypatch, "use", mlp=())
    messages = compare(right, small_bill(SPEC))
    found = {message.partition(" of")[0]: message for message in messages if "over tensor" in message}
    for phase in ("forward", "backward"):
        message = found[f"more: {phase} all-gather"]
        for weight in ("gate", "up", "down"):
            assert f"state.params.segments.0.blocks.0.mlp.{weight} at " in message
        assert "attention" not in message and re.search(r"layers/\w+\.py:\d+", message)


def test_a_gradient_that_rests_in_the_wrong_place_is_named(right, monkeypatch):
    plant(monkeypatch, "grads", mlp=())
    (message,) = compare(right, small_bill(SPEC))
    # XLA tells it of the gradients' place, or of the loop that makes them.
    assert re.match(r"(new: other|more: backward) all-gather of f32 over tensor", message)
    assert re.search(r"train/step\.py:\d+", message)
