"""Images in prompts of Qwen's models: positions on three axes, DeepStack, linear attention; against transformers."""

import functools
import json
import shutil

import numpy as np
import pytest
import references
from qwen_checkpoints import FAMILIES, IMAGE, folder_of, inputs
from safetensors.numpy import save_file
from seeing import noise
from served import SIZES, Family, asked, held_to_transformers, replies

from shardlm import LLM
from shardlm.hf_files import Folder
from shardlm.mesh import MeshSpec
from shardlm.serve import memories, pool_size
from shardlm.serve.snapshots import Snapshots
from shardlm.train.convert import to_hf

pytest.importorskip("transformers", reason="what transformers made is in references/")

FIRST, SECOND, THIRD = noise(40, 64), noise(24, 24, 1), noise(90, 21, 2)
ASKS = [
    ([1, 20, 92, IMAGE, 93, 21, 22], [FIRST]),
    ([92, IMAGE, 93, 23, 92, IMAGE, 93, 5, 6, 92, IMAGE, 93, 7], [SECOND, THIRD, FIRST]),
    ([1, 20, 92, IMAGE, 93, 21, 33], [FIRST]),
    ([7, 8, 9], []),
]
DRAFTS = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
MESHED = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen4_exp")
PLAIN, WIDE = ("qwen2_5_vl", "qwen3_vl"), pytest.mark.wide  # windows and axes; DeepStack


@pytest.mark.parametrize("kind", [kind if kind in PLAIN else pytest.param(kind, marks=WIDE) for kind in FAMILIES])
def test_replies_are_those_of_transformers(kind, tmp_path):
    """All at once; once more, when what they begin with is in pages (which linear attention does not have); and of some
    on a mesh."""
    family = Family(*folder_of(kind, tmp_path), inputs)
    llm = LLM(family.folder, **SIZES)
    held_to_transformers(family, llm, ASKS)
    again = asked(llm, ASKS)
    assert again[0].num_cached_tokens or kind.startswith(("qwen3_5", "qwen4"))
    if kind in MESHED:
        assert replies(again) == replies(asked(LLM(family.folder, mesh=MeshSpec(tensor=2), **SIZES), ASKS))


@pytest.mark.wide
def test_a_thinker_inside_of_what_speaks_too(tmp_path):
    """As Qwen2.5-Omni is published: the same replies, and an export of all, what speaks and hears as it was."""
    path, _ = folder_of("qwen2_5_omni_thinker", tmp_path / "thinker")
    own, spoken = Folder.open(path), {"talker.codec_head.weight": np.ones((3, 2), np.float32)}
    tensors = {f"thinker.{name}": np.asarray(one.read(...)) for name, one in own.tensors.items()} | spoken
    whole = shutil.copytree(path, tmp_path / "whole")
    save_file(tensors, whole / "model.safetensors")
    config = {"model_type": "qwen2_5_omni", "dtype": "float32", "talker_config": {}, "thinker_config": own.config}
    (whole / "config.json").write_text(json.dumps(config))
    assert replies(asked(LLM(whole, **SIZES), ASKS)) == replies(asked(LLM(path, **SIZES), ASKS))
    to_hf(whole, tmp_path / "written", "float32")
    found = Folder.open(tmp_path / "written")
    assert found.config == config and found.tensors.keys() == tensors.keys()
    assert all(np.array_equal(np.asarray(found.tensors[name].read(...)), a) for name, a in tensors.items())


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["qwen3_5", "qwen4_exp"])
def test_beginnings_of_what_remembers_are_found_with_their_images(kind, tmp_path, monkeypatch):
    """Behind an image too, where copies of memories are made of shorter texts than usual."""
    monkeypatch.setattr(memories, "LEAST", 8)
    monkeypatch.setattr(pool_size, "Snapshots", functools.partial(Snapshots, least=8, tail=1))
    llm = LLM(references.folder(kind, tmp_path), **SIZES)
    asks, said = references.asks(kind), [one["reply"] for one in references.said(kind)]
    for found in (False, True):
        outputs = asked(llm, asks, len(said[0]))
        assert replies(outputs) == said and (outputs[1].num_cached_tokens > 60) == found


@pytest.mark.wide
@pytest.mark.parametrize(
    "options", [{"speculative_config": DRAFTS}, {"deterministic": True}, {"kv_cache_dtype": "int8"}]
)
def test_qwen4_however_it_is_served(options, tmp_path):
    """Places on axes go with drafts, with tokens in turn, and beside keys in 8 bits."""
    llm = LLM(references.folder("qwen4_exp", tmp_path), **SIZES | options)
    said = [one["reply"] for one in references.said("qwen4_exp")]
    assert replies(asked(llm, references.asks("qwen4_exp"), len(said[0]))) == said
