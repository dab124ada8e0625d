"""What is trained with images is what is scored, served and written: of all weights, and of adapters."""

import dataclasses
import json
import math

import numpy as np
import pytest
from squares import MESH, SIZES, config_of, documents, learned_loss, log_probabilities, made, trained, validation_loss

from shardlm import LLM
from shardlm.data.preferences import pair
from shardlm.layers.lora import LoraConfig
from shardlm.mesh import MeshSpec
from shardlm.models.pretrained import Pretrained
from shardlm.train.config import (
    LocalSgdConfig,
    OffloadConfig,
    PipelineConfig,
    PreferenceConfig,
    SlowLinkConfig,
)
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


def scored(home, checkpoint) -> float:
    """By launch.eval's function."""
    text, own = (
        [str(home / "validation.jsonl")],
        {"chat_template": str(home / "model"), "cache_dir": str(home / "cache")},
    )
    return score(checkpoint, text, mesh=MESH, seq_len=128, global_batch=8, **own)["loss"]


@pytest.mark.wide
def test_a_run_is_scored_and_served_as_it_was_trained(home, asked, tmp_path, capsys):
    logged = trained(config_of(home, tmp_path / "run"))
    assert "--chat --image=FILE --prompt='What is in the picture?'" in capsys.readouterr().out
    loss = validation_loss(logged)
    assert loss < logged[0]["loss"] - 0.5  # it learns something
    assert scored(home, tmp_path / "run") == pytest.approx(loss, abs=1e-6)
    assert abs(learned_loss(LLM(tmp_path / "run", **SIZES), asked) - loss) < CLOSE


@pytest.mark.wide
@pytest.mark.parametrize("base", ["dtype", "int8", "int4"])
def test_adapters_are_served_with_their_base_as_they_were_trained(base, home, asked, tmp_path):
    loss = validation_loss(trained(config_of(home, tmp_path / "run", lora=LoraConfig(4, base=base))))
    assert abs(learned_loss(LLM(tmp_path / "run", **SIZES), asked) - loss) < CLOSE


@pytest.mark.wide
@pytest.mark.parametrize("lora", [LoraConfig(), LoraConfig(4), LoraConfig(4, base="int8")], ids=str)
def test_what_is_written_is_what_was_trained(lora, home, asked, tmp_path):
    run, written = tmp_path / "run", tmp_path / "written"
    loss = validation_loss(trained(config_of(home, run, lora=lora)))
    to_hf(run, written, "float32", merge=bool(lora.rank))
    assert scored(home, written) == pytest.approx(loss, abs=CLOSE)
    assert (written / "chat_template.jinja").exists()
    if lora == LoraConfig(4):  # PEFT's base is the checkpoint as it is
        to_hf(run, tmp_path / "adapter")
        assert scored(home, tmp_path / "adapter") == pytest.approx(loss, abs=1e-6)
        assert abs(learned_loss(LLM(tmp_path / "adapter", **SIZES), asked) - loss) < CLOSE


@pytest.mark.wide
def test_transformers_and_peft_compute_the_same(home, asked, tmp_path):
    """Of what is written of adapters, beside the base and merged."""
    torch = pytest.importorskip("torch", reason="a wide test of what transformers computes")
    transformers = pytest.importorskip("transformers", reason="a wide test of what transformers computes")
    peft = pytest.importorskip("peft", reason="a wide test of what PEFT computes")
    run = tmp_path / "run"
    trained(config_of(home, run, lora=LoraConfig(4)))
    expected = log_probabilities(LLM(run, **SIZES), asked[:2])
    to_hf(run, tmp_path / "adapter")
    to_hf(run, tmp_path / "merged", "float32", merge=True)
    auto = transformers.AutoModelForImageTextToText
    base, merged = (auto.from_pretrained(f, dtype=torch.float32).eval() for f in (home / "model", tmp_path / "merged"))
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    for model in (merged, adapted):
        for document, ours in zip(asked, expected, strict=False):
            assert np.abs(by_transformers(model, home, document) - ours).max() < 1e-4


def by_transformers(model, home, document) -> np.ndarray:
    import torch
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    from shardlm.vision.read import pixels_of

    options = json.loads((home / "model" / "preprocessor_config.json").read_text())
    options.pop("image_processor_type")
    images = [pixels_of(image.file) for image in document.images]
    seen = Qwen2VLImageProcessorPil(**options)(images, input_data_format="channels_last", return_tensors="pt")
    ids = torch.tensor([document.ids.tolist()])
    token = json.loads((home / "model" / "config.json").read_text())["image_token_id"]
    with torch.no_grad():
        logits = model(input_ids=ids, mm_token_type_ids=(ids == token).int(), **seen).logits[0].float()
    every = torch.log_softmax(logits, -1)[:-1].gather(1, ids[0, 1:, None])
    return every[:, 0].numpy()


@pytest.mark.wide
@pytest.mark.parametrize("encoder", ["frozen", "projector", "all"])
def test_preferences_with_images_are_the_formula(encoder, home, tmp_path):
    """Of what engines say of both answers, by the run and by the checkpoint that it began with, each by its encoder."""
    lines = [json.loads(line) for line in (home / "validation.jsonl").read_text().splitlines()]
    pairs = [{"prompt": one["messages"][:1], "chosen": one["messages"][1:]} for one in lines]
    wrong = [{"role": "assistant", "content": "A square."}]
    (home / "pairs.jsonl").write_text("".join(json.dumps({**one, "rejected": wrong}) + "\n" for one in pairs))
    found = config_of(home, tmp_path / "run", preference=PreferenceConfig(beta=0.5))
    files = (str(home / "pairs.jsonl"),)
    data = dataclasses.replace(found.data, train=files, validation=files, packing="pairs")
    train = dataclasses.replace(found.train, seq_len=192, encoder=encoder)
    logged = trained(dataclasses.replace(found, data=data, train=train))
    assert logged[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    both = documents(home, "pairs", sight_of(home / "model", Pretrained(str(home / "model")).options), pair)
    gains = np.zeros(len(both))
    for model, sign in ((tmp_path / "run", 1), (home / "model", -1)):
        said = log_probabilities(LLM(model, **SIZES), both)
        gains += sign * np.array([one[d.learned[1:].astype(bool)].sum() for one, d in zip(said, both, strict=True)])
    expected = np.log1p(np.exp(-0.5 * (gains[::2] - gains[1::2]))).mean()
    assert expected < 0.6
    assert validation_loss(logged) == pytest.approx(expected, abs=1e-4)


@pytest.fixture(scope="module")
def plain(home, tmp_path_factory):
    run = tmp_path_factory.mktemp("plain") / "run"
    return [line["loss"] for line in trained(config_of(home, run, **APART)) if "loss" in line]


APART = {"mesh": MeshSpec(data=2, fsdp=4), "rules": "hybrid"}
GPIPE = {"pipeline": PipelineConfig(schedule="gpipe", rounds=1), "train.accumulation": 2, "remat": "full"}


@pytest.mark.wide
@pytest.mark.parametrize(
    ("changes", "close"),
    [
        ({"train.shares": (1, 1)}, 1e-5),
        ({"offload": OffloadConfig(optimizer=True)}, 1e-5),
        ({"optim.ema_decay": 0.9}, 1e-5),
        ({"precision": "fp16"}, 0.1),
        ({"slow_link": SlowLinkConfig(compression="int8")}, 0.1),
        ({"local_sgd": LocalSgdConfig(inner_steps=2)}, 0.3),
        ({"mesh": MeshSpec(pipeline=2, fsdp=4), "rules": "zero3", **GPIPE}, 1e-4),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else "",
)
def test_ways_to_train_see_the_same(changes, close, plain, home, tmp_path):
    found = config_of(home, tmp_path / "run", **APART)
    for path, value in changes.items():
        group, _, field = path.rpartition(".")
        own = {field: value} if not group else {group: dataclasses.replace(getattr(found, group), **{field: value})}
        found = dataclasses.replace(found, **own)
    losses = [line["loss"] for line in trained(found) if "loss" in line]
    assert losses == pytest.approx(plain, abs=close)
