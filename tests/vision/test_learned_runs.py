"""Runs that train an encoder of images: what is trained is what is scored, served, written and gone on with."""

import dataclasses
import json
import pathlib
import shutil

import numpy as np
import pytest
from squares import MESH, SIZES, config_of, documents, learned_loss, made, trained, validation_loss
from test_kept import arrays

from shardlm import LLM
from shardlm.checkpoint import CheckpointConfig
from shardlm.errors import ShardlmError
from shardlm.layers.lora import LoraConfig
from shardlm.mesh import MeshSpec
from shardlm.train.config import OffloadConfig, PipelineConfig, RunConfig
from shardlm.train.convert import to_hf
from shardlm.train.scoring import score
from shardlm.vision.registry import sight_of

CLOSE = 1e-5  # nats a token, float32: engines and rows add the same numbers in another order


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return made(tmp_path_factory.mktemp("squares"))


@pytest.fixture(scope="module")
def asked(home):
    model = home / "model"
    return documents(home, "validation", sight_of(model, json.loads((model / "config.json").read_text())))


def run_of(home, run, part="all", steps=4, **changes) -> RunConfig:
    found = config_of(home, run, **changes)
    return dataclasses.replace(found, train=dataclasses.replace(found.train, encoder=part, steps=steps))


def scored(home, checkpoint, **options) -> float:
    text, own = (
        [str(home / "validation.jsonl")],
        {"chat_template": str(home / "model"), "cache_dir": str(home / "cache")},
    )
    return score(checkpoint, text, mesh=MESH, seq_len=128, global_batch=8, **own, **options)["loss"]


def changed(written: pathlib.Path, home: pathlib.Path) -> set[str]:
    """The tensors of what sees that are others than in the checkpoint."""
    found, before = arrays(written), arrays(home / "model")
    assert found.keys() == before.keys()
    return {name for name, a in before.items() if "visual." in name and not np.array_equal(found[name], a)}


@pytest.fixture(scope="module")
def first(home, tmp_path_factory):
    """A run's configuration, and what it logged."""
    found = run_of(home, tmp_path_factory.mktemp("first") / "run", mesh=MeshSpec(fsdp=4, tensor=2))
    found = dataclasses.replace(found, checkpoint=CheckpointConfig(every_steps=2, keep=9))
    return found, trained(found)


@pytest.mark.wide
def test_a_run_is_scored_served_and_written_as_it_was_trained(first, home, asked, tmp_path):
    run, written = first[0].run_dir, tmp_path / "written"
    loss = validation_loss(first[1])
    assert loss < first[1][0]["loss"] - 0.5
    assert scored(home, run) == pytest.approx(loss, abs=CLOSE)
    assert abs(learned_loss(LLM(run, **SIZES), asked) - loss) < CLOSE
    to_hf(run, written, "float32")
    assert scored(home, written) == pytest.approx(loss, abs=CLOSE)
    assert changed(written, home) == {name for name in arrays(written) if "visual." in name}


def gone_on(first: RunConfig, to: pathlib.Path, **changes) -> float:
    """How far the losses of a run are from the first one's that goes on after its second step."""
    run = shutil.copytree(first.run_dir, to)
    shutil.rmtree(run / "checkpoints" / "4")
    trained(dataclasses.replace(first, run_dir=str(run), **changes))
    found, expected = losses(run), losses(pathlib.Path(first.run_dir))
    assert found.keys() == expected.keys()
    return max(abs(found[step] - loss) for step, loss in expected.items())


def losses(run: pathlib.Path) -> dict[int, float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.mark.wide  # of runs by test_resume.py, of the step with an encoder by test_learned_encoder.py
def test_a_run_goes_on_bit_for_bit(first, tmp_path):
    assert gone_on(first[0], tmp_path / "again") == 0
    other = dataclasses.replace(first[0].train, encoder="projector")
    with pytest.raises(ShardlmError, match=r"train\.encoder was 'all', is 'projector'"):
        trained(dataclasses.replace(first[0], train=other, run_dir=str(tmp_path / "again")))


@pytest.mark.wide
def test_another_mesh_takes_over(first, tmp_path):
    assert gone_on(first[0], tmp_path / "other", mesh=MeshSpec(data=2, fsdp=4)) < 1e-3  # test_resume.py's


@pytest.mark.wide
def test_new_weights_of_a_server_are_those_of_a_run(first, home, asked):
    llm = LLM(home / "model", **SIZES)
    llm.update_weights(first[0].run_dir)
    assert abs(learned_loss(llm, asked) - validation_loss(first[1])) < CLOSE


@pytest.mark.wide
def test_a_projector_beside_adapters(home, asked, tmp_path):
    """LLaVA's usual recipe. The rest of the encoder is the checkpoint's, bit for bit."""
    run, written = tmp_path / "run", tmp_path / "written"
    loss = validation_loss(trained(run_of(home, run, "projector", lora=LoraConfig(4))))
    assert abs(learned_loss(LLM(run, **SIZES), asked) - loss) < CLOSE
    with pytest.raises(ShardlmError, match=r"encoder of images that was trained \(train.encoder=projector\).*--merge"):
        to_hf(run, tmp_path / "adapter")
    with pytest.raises(ShardlmError, match=r"was trained beside an encoder of images \(train.encoder=projector\)"):
        LLM(home / "model", enable_lora=True, lora_modules={"own": str(run)}, **SIZES)
    to_hf(run, written, "float32", merge=True)
    assert scored(home, written) == pytest.approx(loss, abs=CLOSE)
    assert changed(written, home) == {name for name in arrays(written) if "visual.merger" in name}


@pytest.fixture(scope="module")
def plain(home, tmp_path_factory):
    run = tmp_path_factory.mktemp("plain") / "run"
    return [line["loss"] for line in trained(run_of(home, run, **APART)) if "loss" in line]


APART = {"mesh": MeshSpec(data=2, fsdp=4), "rules": "hybrid"}
GPIPE = {"pipeline": PipelineConfig(schedule="gpipe", rounds=1), "train.accumulation": 2, "remat": "full"}


@pytest.mark.wide
@pytest.mark.parametrize(
    ("changes", "close"),
    [
        ({"offload": OffloadConfig(optimizer=True, params=True)}, 1e-5),
        ({"rules": "replicated"}, 1e-5),
        ({"precision": "bf16"}, 0.1),
        ({"precision": "fp16"}, 0.1),
        ({"mesh": MeshSpec(pipeline=2, fsdp=4), "rules": "zero3", **GPIPE}, 1e-4),
    ],
    ids=lambda one: "-".join(map(str, one.values())) if isinstance(one, dict) else "",
)
def test_ways_to_train_see_the_same(changes, close, plain, home, tmp_path):
    assert losses_of(run_of(home, tmp_path / "run", **APART), changes) == pytest.approx(plain, abs=close)


@pytest.mark.wide
@pytest.mark.parametrize("name", ["muon", "adafactor", "sgd"])
def test_optimizers_learn_to_see(name, home, tmp_path):
    changes = {"optim.name": name, "optim.learning_rate": 3e-2 if name == "sgd" else 1e-3}
    found = losses_of(run_of(home, tmp_path / "run", mesh=MeshSpec(fsdp=4, tensor=2), steps=6), changes)
    assert found[-1] < found[0] - 0.2


def losses_of(found: RunConfig, changes: dict) -> list[float]:
    for path, value in changes.items():
        group, _, field = path.rpartition(".")
        own = {field: value} if not group else {group: dataclasses.replace(getattr(found, group), **{field: value})}
        found = dataclasses.replace(found, **own)
    return [line["loss"] for line in trained(found) if "loss" in line]


@pytest.mark.wide
def test_averages_are_of_the_encoder_too(home, tmp_path):
    found = run_of(home, tmp_path / "run")
    logged = trained(dataclasses.replace(found, optim=dataclasses.replace(found.optim, ema_decay=0.5)))
    averaged = next(line["validation_loss_ema"] for line in reversed(logged) if "validation_loss_ema" in line)
    assert averaged != validation_loss(logged)
    assert scored(home, tmp_path / "run", ema=True) == pytest.approx(averaged, abs=1e-6)
    to_hf(tmp_path / "run", tmp_path / "written", "float32", ema=True)
    assert scored(home, tmp_path / "written") == pytest.approx(averaged, abs=1e-6)
