"""Training plans of models like Gemma 4 E2B against steps compiled for H100s: layers that read the keys and values of
others, of heads of two sizes, and inputs of each layer's own, by a table as large as the rest of the model. Four layers
of the published widths. What was counted (jax 0.10.2) is here; made again, a minute and more each, by

    JAX_PLATFORMS=cpu PYTHONPATH=.:tests python tests/plan/test_layer_inputs.py
"""

import json
import pathlib
import tempfile

import pytest

from shardlm.hardware import GPUS
from shardlm.hlo.bill import Bill
from shardlm.hlo.collectives import collectives
from shardlm.hlo.flops import matmul_flops
from shardlm.mesh import MeshSpec
from shardlm.models.pretrained import Pretrained
from shardlm.plan.compute import executed_flops, operations
from shardlm.plan.memory import memory
from shardlm.plan.program_traffic import program_traffic
from shardlm.plan.sketch import Sketch
from shardlm.topology import topology
from shardlm.train.config import RunConfig, TrainConfig
from shardlm.train.program import Program

REFERENCE = pathlib.Path(__file__).parent.parent / "hf" / "references" / "gemma4" / "config.json"
E2B = {
    "hidden_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "per_layer_config": {"1": {"head_dim": 512}, "3": {"head_dim": 512}},
    "intermediate_size": 6144,
    "use_double_wide_mlp": True,
    "vocab_size": 262_144,
    "vocab_size_per_layer_input": 262_144,
    "sliding_window": 512,
    "max_position_embeddings": 8192,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
}
# (fsdp, rows, numbers of a layer's input) -> GiB of arguments and of temporaries, TFLOP, of one GPU.
COMPILED = {
    (8, 8, 0): (0.8562, 4.1546, 8.7874),
    (8, 8, 256): (1.2379, 4.6490, 8.8583),
    (8, 8, 1024): (2.3826, 6.1717, 9.0709),
    (8, 8, 2048): (3.9090, 8.2132, 9.3543),
    (1, 1, 512): (12.9526, 6.2498, 8.9291),
    (2, 2, 512): (6.4765, 6.9207, 8.9291),  # fullest in the update, which turns the table
}


def config(home: pathlib.Path, fsdp: int, rows: int, dim: int) -> RunConfig:
    sizes = json.loads(REFERENCE.read_text()) | E2B | {"hidden_size_per_layer_input": dim}
    (home / "config.json").write_text(json.dumps(sizes))
    train = TrainConfig(global_batch=rows, seq_len=2048)
    return RunConfig(Pretrained(str(home)), mesh=MeshSpec(fsdp=fsdp), rules="zero3", remat="full", train=train)


@pytest.mark.parametrize("run", COMPILED, ids=str)
def test_plans_are_close_to_compiled_steps(run, tmp_path):
    arguments, temporary, tflop = COMPILED[run]
    sketch = Sketch.of(config(tmp_path, *run), GPUS["h100"])
    found = memory(sketch)
    assert found.without_gpu / 2**30 == pytest.approx(arguments + temporary, rel=0.05) and not found.doubt
    assert executed_flops(operations(sketch)) / 1e12 == pytest.approx(tflop, rel=0.02)


def test_another_way_to_train_is_in_doubt(tmp_path):
    one = config(tmp_path, 8, 8, 256)
    changed = RunConfig(one.model, mesh=one.mesh, rules=one.rules, remat="dots", train=one.train)
    assert "inputs of each layer's own were compared" in memory(Sketch.of(changed, GPUS["h100"])).doubt


def main() -> None:
    for run in COMPILED:
        with tempfile.TemporaryDirectory() as home:
            one = config(pathlib.Path(home), *run)
            program = Program.make(one, one.mesh.build(topology("h100", 1, run[0])))
            compiled = program.compile("step", dict(program.xla_options().options))
            sketch = Sketch.of(one, GPUS["h100"])
        held, text = compiled.memory_analysis(), compiled.as_text()
        gib = [n / 2**30 for n in (held.argument_size_in_bytes, held.temp_size_in_bytes)]
        print(run, *(f"{n:.4f}" for n in (*gib, matmul_flops(text).flops / 1e12)))
        sent = sum(
            n for kinds in Bill.of(collectives(text, one.mesh.sizes())).by_axis().values() for n in kinds.values()
        )
        print("  bytes sent:", sent, "foreseen:", sum(each.shown_bytes for each in program_traffic(sketch)))


if __name__ == "__main__":
    main()
