"""What is compiled to verify a plan, by the time it is foreseen to take."""

import dataclasses
import pathlib

import pytest
from more_families import SERVED

from shardlm.config import load
from shardlm.hardware import GPUS
from shardlm.mesh import MeshSpec
from shardlm.plan import answer as answers
from shardlm.plan.answer import answer
from shardlm.plan.asked import cluster_of
from shardlm.plan.bill import CompiledStep
from shardlm.plan.compile_time import EXPERTS, LAYER, PATIENCE, PROGRAM, WITH_EXPERTS, compile_seconds
from shardlm.plan.constraints import Constraints
from shardlm.plan.report.data import to_json
from shardlm.plan.report.text import to_text
from shardlm.plan.sketch import Sketch
from shardlm.plan.verify import Verified
from shardlm.train.config import RunConfig

CONFIGS = pathlib.Path(__file__).parent.parent.parent / "configs"
DENSE, H100 = load(str(CONFIGS / "llama3_8b.py")), cluster_of("h100", None, 8)
# https://huggingface.co/LiquidAI/LFM2-8B-A1B
LFM2 = {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 65_536}
LFM2 |= {"kinds": "CC" + "FCCC" * 4 + "FCC" * 2, "intermediate_size": 7168, "moe_intermediate_size": 1792}
LFM2 |= {"num_experts": 32, "num_experts_per_tok": 4, "num_dense_layers": 2, "conv_L_cache": 3}


def lfm2() -> RunConfig:
    train = dataclasses.replace(DENSE.train, global_batch=8, seq_len=4096)
    return dataclasses.replace(DENSE, model=SERVED["convolved experts"](**LFM2), train=train)


def seconds(config: RunConfig, **fields) -> float:
    mesh = MeshSpec(fsdp=8)
    return compile_seconds(Sketch.of(dataclasses.replace(config, mesh=mesh, rules="zero3", **fields), GPUS["h100"]))


@pytest.mark.parametrize("name", ["llama3_8b", "llama3_70b", "mixtral_8x7b", "deepseek_v3", "diloco_two_sites"])
def test_programs_of_shipped_configurations_are_compiled_unasked(name):
    config = load(str(CONFIGS / f"{name}.py"))
    assert compile_seconds(Sketch.of(config, GPUS["h100"])) < PATIENCE


def test_code_is_made_for_layers_that_no_loop_repeats():
    assert seconds(DENSE) == PROGRAM + LAYER
    assert seconds(DENSE, unroll=0) == pytest.approx(PROGRAM + 32 * LAYER)
    assert seconds(lfm2()) == pytest.approx(PROGRAM + LAYER + EXPERTS + 7 * WITH_EXPERTS)


def test_what_is_foreseen_to_take_long_is_compiled_where_it_is_asked_for(monkeypatch):
    monkeypatch.setattr(answers, "impossible", lambda cluster: "")
    asked = []

    def shown(plans):
        asked.extend(plans)
        return [Verified(2**30, 2**30, CompiledStep(1.0, (), None, {})) for _ in plans]

    monkeypatch.setattr(answers, "verify", shown)
    held = Constraints.parse(["mesh.pipeline=1", "mesh.tensor=1", "remat=full"])
    told = answer(lfm2(), H100, held, compiled=2, patience=PATIENCE)
    assert not asked and "a program of 8 layers that no loop repeats is foreseen to take 92 s" in told.unverified
    text = to_text(to_json(told, "LFM2"))
    assert "--verify=1 compiles the best anyway" in " ".join(text.split())
    assert text.count("verified") == 1 and all(one.verified is None for one in told.ranked)
    insisted = answer(lfm2(), H100, held, compiled=1)
    assert len(asked) == 1 and insisted.best.program and not insisted.unverified
    answer(DENSE, H100, held, compiled=2, patience=PATIENCE)
    assert len(asked) == 3
