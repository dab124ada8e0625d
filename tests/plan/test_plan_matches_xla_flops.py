"""FLOPs by formulas are those of the compiled program, within 2%: of the shipped configurations and of runs drawn at
random, as recorded. What the program executes counts: recomputation, idle stages, the masked parts of blocks."""

import json
import pathlib

import jax
import jax.numpy as jnp
import pytest
from random_runs import recorded, run_of

from shardlm.config import resolve
from shardlm.hardware import GPUS
from shardlm.hlo.flops import matmul_flops
from shardlm.plan.compute import executed_flops, operations
from shardlm.plan.sketch import Sketch

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
RECORDS = {path.name.split(".")[0]: json.loads(path.read_text()) for path in CONFIGS.glob("*.collectives.json")}


@pytest.mark.parametrize("name", sorted(name for name, record in RECORDS.items() if "flops" in record))
def test_shipped_configurations(name):
    sketch = Sketch.of(resolve(str(CONFIGS / f"{name}.py"), []).config, GPUS["h100"])
    assert executed_flops(operations(sketch)) == pytest.approx(RECORDS[name]["flops"], rel=0.02)


def test_random_runs():
    found = {}
    for run in (run for run in recorded() if "flops" in run):
        sketch = Sketch.of(run_of(run["settings"]), GPUS["h100"])
        found[run["name"]] = executed_flops(operations(sketch)) / run["flops"]
    assert all(ratio == pytest.approx(1, abs=0.02) for ratio in found.values()), found


def test_what_is_counted_is_what_xla_counts():
    """XLA counts elementwise work too, and a loop's body once; a program of large matmuls without loops tells."""

    def run(x, w, v):
        return jnp.tanh(x @ w) @ v

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((512, 768), (768, 1024), (1024, 640))]
    compiled = jax.jit(jax.grad(lambda *a: run(*a).sum(), argnums=(0, 1, 2))).lower(*shapes).compile()
    assert matmul_flops(compiled.as_text()).flops == pytest.approx(compiled.cost_analysis()["flops"], rel=0.02)
