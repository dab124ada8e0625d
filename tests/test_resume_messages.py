"""What a start in the directory of an earlier run says of what has changed."""

import json

from shardlm.train.resume import another


def test_a_checkpoint_in_another_spelling_is_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert another("model.folder", f"{tmp_path}/base/", "base") == []
    assert another("model.folder", "base", "other") == ["model.folder was 'base', is 'other'"]


def test_of_another_config_json_the_options_that_differ_are_said():
    old = {"hidden_act": "silu", "head_dim": 16, **{f"option_{i}": 0 for i in range(5)}}
    new = old | {"head_dim": 32}
    said = ["model.config's head_dim was 16, is 32"]
    assert another("model.config", json.dumps(old), json.dumps(new)) == said
    said = another("model.config", json.dumps(old), "{}")
    assert len(said) == 5 and said[-1] == "3 more options of model.config differ"


def test_a_file_of_llama_cpp_in_another_spelling_is_the_same(tmp_path):
    (tmp_path / "link.gguf").symlink_to("m.gguf")

    def config(name):
        return json.dumps({"quantization_config": {"quant_method": "gguf", "file": str(tmp_path / name)}})

    assert another("model.config", config("m.gguf"), config("link.gguf")) == []
    assert len(another("model.config", config("m.gguf"), config("other.gguf"))) == 1
