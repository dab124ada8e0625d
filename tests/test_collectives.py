"""What programs send between devices is recorded beside their configurations, and a change has to be meant.

A file configs/NAME.collectives.json holds the collectives and the memory of the step of configs/NAME.py, compiled for
the GPUs it names. It is written, anew or for the first time, by

    SHARDLM_RECORD_COLLECTIVES=NAME,NAME python -m pytest -m gpu_program tests/test_collectives.py
"""

import dataclasses
import json
import os
import pathlib
import re

import jax
import jaxlib
import pytest
from small import LLAMA, mesh_of

from shardlm.config import resolve
from shardlm.errors import ShardlmError
from shardlm.hlo.bill import Bill, compare
from shardlm.hlo.collectives import collectives
from shardlm.mesh import MeshSpec
from shardlm.optim import OptimConfig
from shardlm.rules import Rules
from shardlm.topology import topology
from shardlm.train.config import RunConfig, TrainConfig
from shardlm.train.program import Program

CONFIGS = pathlib.Path(__file__).parent.parent / "configs"
SUFFIX = ".collectives.json"
WANTED = list(filter(None, os.environ.get("SHARDLM_RECORD_COLLECTIVES", "").split(",")))
NAMES = sorted({*WANTED, *(path.name.removesuffix(SUFFIX) for path in CONFIGS.glob(f"*{SUFFIX}"))})
FAMILY = ".".join(jaxlib.__version__.split(".")[:2])
# XLA's layout of temporaries changes a little with every version (jaxlib 0.10.2 and 0.11.2: 2.6% for llama3_8b).
MEMORY = 0.1


def plugin_missing() -> str:
    try:
        topology("h100", 1, 1)
    except ShardlmError as error:
        return str(error)
    return ""


REASON = plugin_missing()


def target(name: str) -> dict:
    """The GPUs that the record names; for a first record, hosts of eight H100."""
    file = CONFIGS / f"{name}{SUFFIX}"
    if file.exists():
        return json.loads(file.read_text())
    config = resolve(str(CONFIGS / f"{name}.py"), []).config
    return {"gpu": "h100", "hosts": config.mesh.size(*config.mesh.sizes()) // 8, "gpus_per_host": 8}


def read(name: str, where: dict) -> tuple[dict, Bill]:
    """The record of the step as it compiles now, and its bill."""
    config = resolve(str(CONFIGS / f"{name}.py"), []).config
    devices = topology(where["gpu"], where["hosts"], where["gpus_per_host"])
    program = Program.make(config, config.mesh.build(devices))
    step = program.compile("step", dict(program.xla_options().options))
    memory = step.memory_analysis()
    bill = Bill.of(collectives(step.as_text(), config.mesh.sizes()))
    record = {key: where[key] for key in ("gpu", "hosts", "gpus_per_host")} | {
        "jaxlib": FAMILY,
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "collectives": bill.to_json(),
    }
    return record, bill


def written(record: dict) -> str:
    """JSON with one collective a line."""
    rows = ",\n".join("    " + json.dumps(row) for row in record["collectives"])
    head = json.dumps(record | {"collectives": []}, indent=2).removesuffix("[]\n}")
    return f"{head}[\n{rows}\n  ]\n}}\n"


@pytest.mark.gpu_program
@pytest.mark.skipif(bool(REASON), reason=REASON or "the plugin is installed")
@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")
@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_configuration_communicates_what_is_recorded(name):
    expected = target(name)
    record, bill = read(name, expected)
    if name in WANTED:
        (CONFIGS / f"{name}{SUFFIX}").write_text(written(record))
        return
    changes = compare(Bill.from_json(expected["collectives"]), bill, counts=expected["jaxlib"] == FAMILY)
    assert not changes, f"{name} (if this is meant, record it: see this file's head):\n" + "\n".join(changes)
    for kind in ("argument_bytes", "temporary_bytes"):
        assert record[kind] == pytest.approx(expected[kind], rel=MEMORY)


# What follows compiles for CPU devices and needs no plugin.


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
