"""The language models of checkpoints that see, written alone: the same weights, and what transformers says by them."""

import json

import jax
import numpy as np
import pytest
import references

import shardlm
from shardlm.train import convert
from shardlm.vision import kept

WIDE = pytest.mark.wide
NAMES = ("glm4v", "lfm2_vl", *(pytest.param(name, marks=WIDE) for name in (
    "glm4v_moe", "glm46v", "glm_ocr", "llava_next-granite", "llava_onevision-onevision", "cohere2_vision",
    "paddleocr_vl", "lighton_ocr",
)))  # fmt: skip


@pytest.fixture(autouse=True)
def without_eyes(monkeypatch):
    """As where the encoder is gone."""
    monkeypatch.setattr(kept, "whole", lambda folder, options: None)


@pytest.mark.parametrize("name", NAMES)
def test_texts_written_alone(name, tmp_path):
    opened = shardlm.load(references.folder(name, tmp_path), dtype="float32")
    convert.to_hf(tmp_path / name, tmp_path / "written", "float32")
    back = shardlm.load(tmp_path / "written", dtype="float32")
    assert not any("vis" in option for option in back.source.options)
    assert jax.tree.all(jax.tree.map(np.array_equal, back.params, opened.params))


@pytest.mark.wide
@pytest.mark.parametrize("name", [name if isinstance(name, str) else name.values[0] for name in NAMES])
def test_texts_written_alone_are_those_of_transformers(name, tmp_path):
    """To the prompt without images."""
    torch = pytest.importorskip("torch", reason="what transformers made is in references/")
    transformers = pytest.importorskip("transformers", reason="what transformers made is in references/")
    convert.to_hf(references.folder(name, tmp_path), tmp_path / "written")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "written", dtype="float32")
    (ids, images), said = references.asks(name)[-1], references.said(name)[-1]
    assert not images and "vision" not in json.dumps(model.config.to_dict()["architectures"]).lower()
    with torch.no_grad():
        found = torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)
    found = [found[i, ids[i + 1]].item() for i in range(len(ids) - 1)]
    np.testing.assert_allclose(found, said["prompt"], atol=1e-4)
