"""The planner's estimate of memory against what XLA says of the same steps, compiled for H100s that are not there: of
shipped configurations (configs/*.collectives.json) and of the runs in compiled_memory.json (record_memory.py)."""

import dataclasses
import json
import pathlib

import jaxlib
import pytest
from gpu_programs import on_gpus
from random_runs import recorded, run_of
from record_memory import RECORD, SEEDS, Run, compiled, random_run

from shardlm.config import resolve
from shardlm.hardware import GPUS
from shardlm.models.pretrained import Pretrained
from shardlm.plan.cluster import Cluster
from shardlm.plan.cost import step_cost
from shardlm.plan.memory import RESERVE, Memory, at_least, memory
from shardlm.plan.sketch import Sketch
from shardlm.plan.state import state
from shardlm.plan.temporaries import Throughout

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
SHIPPED = sorted(path.name.split(".")[0] for path in CONFIGS.glob("*.collectives.json"))
RECORDED = json.loads(RECORD.read_text())
WHOLE = [run for run in recorded() if "seconds" in run]
TOLERANCE = 0.05  # of arguments and temporaries together
# 37% more where XLA unrolls the loop over microbatches.
ON_INT4 = "llama3_8b lora.rank=16 lora.base=int4 mesh.fsdp=1 train.global_batch=1 train.seq_len=4096 remat=none"
ACCUMULATED = "llama3_8b mesh.fsdp=32 train.accumulation=4 train.global_batch=128"


def estimated(run: Run) -> Memory:
    return memory(Sketch.of(run.config(), GPUS["h100"]))


def error(found: Memory, record: dict) -> float:
    """Of the estimate without its reserve, as a part of the compiled program's memory."""
    return found.without_gpu / (record["argument_bytes"] + record["temporary_bytes"]) - 1


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_configuration_needs_what_is_estimated(name):
    found = estimated(Run(name))
    record = json.loads((CONFIGS / f"{name}.collectives.json").read_text())
    assert error(found, record) == pytest.approx(0, abs=TOLERANCE)
    assert not found.doubt
    assert found.total == pytest.approx(sum(found.kinds.values()) + RESERVE * GPUS["h100"].hbm_bytes)
    assert all(nbytes > 0 for nbytes in found.kinds.values())


@pytest.mark.parametrize("name", RECORDED["runs"])
def test_a_recorded_run_needs_what_is_estimated_or_is_in_doubt(name):
    record = RECORDED["runs"][name]
    found = estimated(Run.parse(record["run"]))
    assert abs(error(found, record)) < TOLERANCE or found.doubt, (error(found, record), found.kinds)


@pytest.mark.parametrize("run", WHOLE, ids=lambda run: run["name"])
def test_a_step_with_linear_attention_or_chosen_tokens_needs_what_is_estimated(run):
    """In memory, but for Mamba 2 and decays by channel as is told, and in seconds as the program has them: less where
    rows are sent to experts, where all is kept and with XLA's attention, more in stages and in long rows."""
    sketch = Sketch.of(run_of(run["settings"]), GPUS["h100"])
    found = memory(sketch)
    doubted = {"Mamba 2": 0.2, "decays by channel": 0.06, "not mixed": 0.06, "choose blocks for themselves": 0.06}
    doubted |= {"chosen pools": 0.09, "added a layer later": 0.085}
    room = max((part for words, part in doubted.items() if words in found.doubt), default=TOLERANCE)
    assert error(found, run) == pytest.approx(0, abs=room)
    kinds = {"sent": 0.22, "stages": 0.25, "none": 0.15, "long": 0.12, "inputs-tensor": 0.16, "reads-tensor": 0.16}
    within = kinds.get(run["name"], kinds.get(run["name"].rpartition("-")[2], 0.1))
    assert step_cost(sketch, Cluster.of(GPUS["h100"], sketch.num_gpus)).step_seconds == pytest.approx(
        run["seconds"], rel=within
    )


def test_what_is_there_throughout_is_no_more_than_the_fullest_moment():
    """A search takes a run for too large by that alone."""
    shares = []
    for record in RECORDED["runs"].values():
        one = Sketch.of(Run.parse(record["run"]).config(), GPUS["h100"])
        shares.append(at_least(one, state(one), Throughout.of(one)) / memory(one).total)
    assert 0.9 < max(shares) < 1


SMALL = "XLA splits the sums of small products and keeps their parts"


@pytest.mark.parametrize("name", ["tiny_hybrid", "tiny", "bench_strategies", "bench_experts"])
def test_small_runs_whose_products_are_split_are_in_doubt(name):
    """Their programs were compiled for H100s: 10.7 and 8.1% more than estimated, 27 and 17% less."""
    assert SMALL in estimated(Run(name)).doubt


def test_adapters_preferences_and_chats_of_a_small_model_are_in_doubt():
    """Of configs/sft.py, lora.py, dpo.py and grpo.py, on configs/tiny.py's model: 6.6 to 8.9% more, compiled."""
    tiny = Pretrained("unread", config=json.dumps(Run("tiny").config().model.to_hf()))
    for name in ("sft", "lora", "dpo", "grpo"):
        run = dataclasses.replace(resolve(f"configs/{name}.py", []).config, model=tiny)
        assert SMALL in memory(Sketch.of(run, GPUS["h100"])).doubt


def test_what_is_not_known_is_said():
    for overrides, words in (
        ("optim.name=muon train.seq_len=16384", ""),
        ("train.seq_len=4096", "zeros of gradients behind the output head, for up to 6% less"),
        ("train.seq_len=4096 remat=names", ""),
        ("remat=none train.global_batch=16", "more than the GPU has"),
        ("attention=xla train.seq_len=16384 train.global_batch=8", "XLA's attention"),
        ("remat=none model.num_layers=8 mesh.fsdp=1 mesh.tensor=8 mesh.context=4", "one array at a time or two"),
        ("remat=none model.num_layers=8 mesh.fsdp=1 mesh.tensor=8 mesh.context=4 train.global_batch=1", ""),
        (
            "unroll=2 xla_profile=none",
            "and needed 7% more with 32 layers; xla_profile=none was not compared",
        ),
        ("unroll=0", "unroll=0 was compared with remat=dots"),
        ("unroll=0 remat=dots", "needed 7% more with 32 layers"),
        ("unroll=0 remat=dots model.num_layers=8", ""),
        (
            "unroll=0 remat=dots model.num_layers=8 train.accumulation=2 train.global_batch=16",
            "unroll=0 was compared with remat=dots",
        ),
        ("lora.rank=16 lora.base=int4", ""),
        ("lora.rank=16 train.seq_len=16384", ""),
        ("remat=dots mesh.fsdp=1 mesh.data=2 mesh.context=4 train.seq_len=16384", ""),
        ("lora.rank=16 mesh.fsdp=4 mesh.data=2", ""),
        (
            "lora.rank=16 lora.base=int4 mesh.fsdp=4 mesh.data=2 train.seq_len=2048",
            "no more than 2,048 tokens at a time",
        ),
        (
            "lora.rank=16 mesh.fsdp=1 mesh.data=8 rules=zero1 train.seq_len=12288",
            "data with 12,288 tokens",
        ),
        ("", ""),
    ):
        found = estimated(Run.parse(f"llama3_8b {overrides}")).doubt
        assert words in found and bool(words) == bool(found)
    assert "more than the GPU has room for" in estimated(Run.parse("deepseek_v3 train.accumulation=2")).doubt
    latent = Run.parse("deepseek_v3 optim.name=muon pipeline.schedule=circular")
    assert "muon was not compared with latent attention" in estimated(latent).doubt
    muon = "mixtral_8x7b optim.name=muon model.num_layers=8"
    assert "experts see the tokens of all devices" in estimated(Run.parse(muon)).doubt
    assert not estimated(Run.parse(f"{muon} mesh.fsdp=2 train.global_batch=16")).doubt  # which are sent
    gathered = Run.parse("deepseek_v3 mesh.fsdp=4 mesh.context=1 model.top_k=4 train.global_batch=256")
    assert "more GPUs of a host than they have experts, beside latent attention" in estimated(gathered).doubt
    sent = "mixtral_8x7b lora.rank=16 mesh.fsdp=2 mesh.expert=4 train.global_batch=8 train.seq_len=4096"
    assert not estimated(Run.parse(sent)).doubt
    assert "adapters beside experts whose rows are sent" in estimated(Run.parse(f"{sent} remat=names")).doubt
    moved = estimated(Run.parse("llama3_8b offload.optimizer=True"))
    assert moved.host == pytest.approx(2 * 4 * 8_030_261_248 / 8, rel=0.01) and "optimizer" not in moved.kinds


def test_all_runs_drawn_at_random_are_within_the_tolerance_but_two_in_doubt():
    """Scores of XLA's attention, of which it holds more in one of them (6%) and less in one (7%)."""
    errors = {}
    for name, record in RECORDED["runs"].items():
        if name.startswith("random"):
            errors[name] = error(estimated(Run.parse(record["run"])), record)
    assert len(errors) == len(SEEDS)
    beyond = {name: e for name, e in errors.items() if abs(e) >= TOLERANCE}
    assert set(beyond) == {"random 65", "random 71"}, beyond


def test_a_run_of_a_seed_is_the_recorded_one():
    assert str(random_run(0)) == RECORDED["runs"]["random 0"]["run"]


@on_gpus
@pytest.mark.skipif(RECORDED["jaxlib"] != jaxlib.__version__, reason="recorded with another jaxlib")
@pytest.mark.parametrize("name", ["random 0", "llama3_8b remat=names", ACCUMULATED, ON_INT4])
def test_the_record_is_what_compiling_gives(name):
    record = RECORDED["runs"][name]
    found = compiled(Run.parse(record["run"]))
    assert found == pytest.approx({kind: record[kind] for kind in found}, rel=0.02)
