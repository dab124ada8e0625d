"""A forward pass beside the model that is trained, of a teacher or of the checkpoint that preferences are compared
with: bytes, FLOPs and seconds by formulas against those of steps compiled for 8 H100s (jax 0.10.2, bill.py)."""

import dataclasses
import json

import pytest
from record_memory import Run

from shardlm.config import override
from shardlm.hardware import GPUS
from shardlm.models.pretrained import Pretrained
from shardlm.plan.cluster import Cluster
from shardlm.plan.compute import executed_flops, operations
from shardlm.plan.cost import step_cost
from shardlm.plan.memory import memory
from shardlm.plan.plan import Plan
from shardlm.plan.sketch import Sketch
from shardlm.plan.state import state

H100 = GPUS["h100"]
SHAPES = {"8b": (4096, 32, 128, 14336, False), "1b": (2048, 16, 64, 8192, True)}
"""Of Llama 3 8B and Llama 3.2 1B: width, layers, width of a head, of the MLP, and whether the head is the embedding."""
COMPILED = {
    "1b teacher=8b mesh.fsdp=8 train.seq_len=8192": (3862626324, 4955518432, 232628582088704, 0.5031),
    "1b teacher=8b mesh.fsdp=4 mesh.tensor=2 train.seq_len=8192": (3862790164, 2985938912, 232628582088704, 0.5546),
    "1b teacher=8b mesh.fsdp=4 mesh.context=2 train.seq_len=8192": (3862626324, 4688194784, 232628582088704, 0.5287),
    "1b teacher=8b mesh.fsdp=8 train.global_batch=32 train.seq_len=4096 train.accumulation=4": (
        *(3862790164, 5819604704, 427873768833024, 0.9997),
    ),
    "1b vocab=32000 teacher=8b mesh.fsdp=8 train.seq_len=8192": (3369795604, 3196437216, 216479505055744, 0.4520),
    "8b preference.beta=0.1 data.packing=pairs mesh.fsdp=8 train.seq_len=4096": (
        *(14056300564, 9910179336, 316192807976960, 0.6737),
    ),
    "8b preference.beta=0.1 data.packing=pairs lora.rank=16 mesh.fsdp=8 train.seq_len=4096": (
        *(2357288980, 3802687800, 256071855767552, 0.5829),
    ),
}
"""Bytes of arguments and of temporaries, FLOPs, seconds."""


def folder(home, name: str, vocab: int) -> str:
    width, layers, head, mlp, tied = SHAPES[name]
    options = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab, "hidden_size": width}
    options |= {"num_hidden_layers": layers, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": head}
    options |= {"intermediate_size": mlp, "tie_word_embeddings": tied, "rope_theta": 500000.0, "rms_norm_eps": 1e-5}
    options |= {"max_position_embeddings": 8192, "hidden_act": "silu"}
    (home / name).mkdir(exist_ok=True)
    (home / name / "config.json").write_text(json.dumps(options))
    return str(home / name)


def config_of(home, words: str):
    name, *settings = words.split()
    given = dict(word.split("=", 1) for word in settings)
    vocab = int(given.pop("vocab", 128256))
    if "teacher" in given:
        given["distill.teacher"] = folder(home, given.pop("teacher"), vocab)
    config = dataclasses.replace(Run("llama3_8b").config(), model=Pretrained(folder(home, name, vocab)))
    return override(config, list(({"train.global_batch": "8"} | given).items()))


@pytest.mark.parametrize("words", COMPILED)
def test_a_step_is_what_its_program_is(words, tmp_path):
    arguments, temporaries, flops, seconds = COMPILED[words]
    sketch = Sketch.of(config_of(tmp_path, words), H100)
    assert state(sketch).total == pytest.approx(arguments, abs=100)  # scalars
    found = memory(sketch)
    assert found.without_gpu == pytest.approx(arguments + temporaries, rel=0.05)
    assert "beside" not in found.doubt
    assert executed_flops(operations(sketch)) == pytest.approx(flops, rel=1e-3)
    within = 0.07 if "accumulation" in words else 0.05  # more of the gathers are not covered there
    assert step_cost(sketch, Cluster.of(H100, 8)).step_seconds == pytest.approx(seconds, rel=within)


def test_what_compares_with_nothing_has_nothing_beside_it(tmp_path):
    words = "8b preference.beta=2 preference.loss=simpo data.packing=pairs mesh.fsdp=8 train.seq_len=4096"
    config = config_of(tmp_path, words)
    sketch = Sketch.of(config, H100)
    dpo = Sketch.of(config_of(tmp_path, words.replace(" preference.loss=simpo", "")), H100)
    assert sketch.beside is None and state(sketch).frozen == 0 < state(dpo).frozen
    costs = [step_cost(one, Cluster.of(H100, 8)) for one in (sketch, dpo)]
    assert costs[0].step_seconds < 0.85 * costs[1].step_seconds and costs[0].model_flops < costs[1].model_flops


def test_a_reference_of_adapters_is_what_they_stand_on(tmp_path):
    words = "8b preference.beta=0.1 data.packing=pairs lora.rank=16 mesh.fsdp=8 train.seq_len=4096"
    sketch = Sketch.of(config_of(tmp_path, words), H100)
    alone = Sketch.of(config_of(tmp_path, "8b lora.rank=16 mesh.fsdp=8 train.seq_len=4096"), H100)
    assert state(sketch).frozen == state(alone).frozen
    plans = [Plan.of(one.config, Cluster.of(H100, 8)) for one in (alone, sketch)]
    assert 1.2 < plans[1].cost.step_seconds / plans[0].cost.step_seconds < 1.5  # a third forward pass
