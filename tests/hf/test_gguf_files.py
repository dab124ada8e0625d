"""Files of llama.cpp, found and opened: in folders, in parts, on the hub, as Ollama keeps them; damaged ones, and what
is not supported; and what else is done with one than serving it."""

import fnmatch
import json
import pathlib
import shutil
import struct
import sys
import types

import gguf
import gguf_models
import numpy as np
import pytest

import shardlm
from shardlm import opened
from shardlm.data.chats import template_of
from shardlm.data.prepare import tokenizer_from
from shardlm.errors import ShardlmError
from shardlm.gguf_files import shards
from shardlm.gguf_files.choose import in_folder, models, tag, tagged
from shardlm.hf_files import Folder
from shardlm.models.pretrained import Pretrained
from shardlm.plan.serving.case import ServedModel
from shardlm.serve.alike import digest
from shardlm.tokenizer import train_bpe
from shardlm.train.convert import to_hf
from shardlm.weights import own_tensors


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def llama(tmp_path):
    folder = gguf_models.as_told("llama", tmp_path / "llama")
    return gguf_models.convert(folder, tmp_path / "llama.gguf")


def test_a_file_is_opened_once_and_again_when_it_changed(llama, cache):
    first = opened.find(llama)
    config = json.loads((first / "config.json").read_text())
    assert first.parent == cache / "shardlm" / "gguf" and config["quantization_config"]["file"] == str(llama)
    assert opened.find(str(llama)) == first and not list(first.parent.glob(".draft*"))
    blob = llama.rename(llama.with_name("sha256-0123"))  # as Ollama calls it
    other = opened.find(blob)
    assert other != first and opened.describe(blob).source.options["num_hidden_layers"] == 3
    blob.touch()
    assert opened.find(blob) != other


def test_a_model_that_ollama_has_pulled_is_opened_by_its_name(llama, tmp_path, monkeypatch):
    home = tmp_path / "ollama"
    monkeypatch.setenv("OLLAMA_MODELS", str(home))
    manifest = home / "manifests" / "registry.ollama.ai" / "library" / "llama3.2" / "latest"
    for folder in (manifest.parent, home / "blobs"):
        folder.mkdir(parents=True)

    def layers(*kinds):
        made = [{"mediaType": f"application/vnd.ollama.image.{kind}", "digest": f"sha256:{kind}"} for kind in kinds]
        manifest.write_text(json.dumps({"layers": made}))

    layers("model", "template", "params")
    with pytest.raises(ShardlmError, match=r"llama3.2 lacks its weights, .*sha256-model; pull it again: ollama pull"):
        opened.find("llama3.2")
    blob = llama.rename(home / "blobs" / "sha256-model")
    assert opened.find("llama3.2") == opened.find("llama3.2:latest") == opened.find(blob)
    assert ServedModel.of_folder("llama3.2").shape == ServedModel.of_folder(blob).shape
    layers("model", "adapter")
    with pytest.raises(ShardlmError, match=r"1 files of weights and 1 adapters; what is opened is one file"):
        opened.find("llama3.2")
    for other in ("llama3.2:3b", "llama", "../library/llama3.2"):
        with pytest.raises(ShardlmError, match=r"no folder"):
            opened.find(other)


def test_a_folder_that_holds_one_model_is_opened(llama, tmp_path):
    folder = tmp_path / "models"
    folder.mkdir()
    assert in_folder(folder) is None
    shutil.copy(llama, folder / "model-Q8_0.gguf")
    shutil.copy(llama, folder / "mmproj-model-f16.gguf")
    assert opened.describe(folder).source.options["model_type"] == "llama"
    shutil.copy(llama, folder / "model-Q4_K_M.gguf")
    with pytest.raises(ShardlmError, match=r"several models, model-Q4_K_M.gguf, model-Q8_0.gguf; give the path of one"):
        opened.find(folder)


def split(file: pathlib.Path) -> list[pathlib.Path]:
    """In three parts, as llama.cpp's tool writes them."""
    reader = gguf.GGUFReader(file)
    paths = [file.with_name(f"{file.stem}-{i:05d}-of-00003.gguf") for i in (1, 2, 3)]
    for i, path in enumerate(paths):
        writer = gguf.GGUFWriter(path, "llama")
        for field in reader.fields.values() if i == 0 else ():
            if not field.name.startswith(("GGUF.", "general.architecture")):
                gguf_models.add(writer, field.name, field.contents())
        for key, value in (("split.no", i), ("split.count", 3), ("split.tensors.count", len(reader.tensors))):
            gguf_models.add(writer, key, value)
        for tensor in reader.tensors[i * 10 : i * 10 + 10]:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
        for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
            write()
        writer.close()
    return paths


def test_a_model_in_several_files_is_opened_by_any_of_them(llama):
    whole, parts = own_tensors(Folder.open(opened.find(llama))), split(llama)
    for part in parts:
        found = own_tensors(Folder.open(opened.find(part)))
        assert found.keys() == whole.keys()
        assert all(np.array_equal(found[name].read(...), stored.read(...)) for name, stored in whole.items())
    parts[1].rename(parts[1].with_name("away"))
    with pytest.raises(ShardlmError, match=r"is one of 3 files, and llama-00002-of-00003.gguf is not beside it"):
        opened.find(parts[2])
    shutil.copy(parts[0], parts[1])
    with pytest.raises(ShardlmError, match=r"00002-of-00003.gguf says that it is file 0 \(from 0\)"):
        opened.find(parts[2])
    lonely = shutil.copy(parts[0], parts[0].with_name("lonely.gguf"))
    with pytest.raises(ShardlmError, match=r"lonely.gguf says that it is of 3 files, and by its name it is of 1"):
        opened.find(lonely)


@pytest.mark.parametrize(
    "content,message",
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "is a Git LFS pointer"),
        (b"PK\x03\x04" + bytes(30), "is not a GGUF file: it begins with"),
        (b"GGUF" + bytes(4), "is cut off: 8 bytes"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "for big-endian machines"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "of version 1; supported are 2 and 3"),
        (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "of version 9; supported are 2 and 3"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "its header goes on beyond its end"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 8, 2**62), "its header goes on beyond its end"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 4, 2**62), "its header goes on beyond its end"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 9, 1), "k is of type 9, which is unknown, or an ar"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 1, 0, 1, b"t", 99), "tensor t has 99 dimensions"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 32, 77, 0), "tensor t is of kind 77, .* knows F32"),
        (
            b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 31, 2, 0),
            r"t is Q4_0\[31\], and Q4_0 has blocks",
        ),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 2**62, 0, 0), "is cut off: t ends at byte"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 0),
            "architecture=None, which shardlm does not have; it has llama",
        ),
    ],
)
def test_what_is_no_model_is_named(content, message, tmp_path):
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(ShardlmError, match=message):
        opened.find(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"llama.attention.head_count_kv": [2, 2, 1]}, r"head_count_kv=\[2, 2, 1\], and layers that differ in it"),
        ({"llama.attention.clamp_kqv": 3.0}, "keys that shardlm does not know.*llama.attention.clamp_kqv=3.0"),
        ({"llama.rope.scaling.type": "spiral"}, "rope.scaling.type='spiral', and supported are none, linear, longrope"),
        ({"llama.rope.scaling.type": "yarn"}, "it needs rope.scaling.factor and original_context_length"),
        ({"llama.attention.head_count": 0}, "head_count=0, and a whole number is needed"),
        ({"llama.attention.value_length": 4}, "value_length=4, and supported are 8"),
        ({"llama.block_count": None}, "has no llama.block_count, which a model of this architecture needs"),
        ({"general.type": "mmproj"}, "holds mmproj .general.type='mmproj'.; give the file of the model itself"),
        ({"general.alignment": 7}, "general.alignment is 7, which is no multiple of 8"),
    ],
)
def test_metadata_that_is_not_supported_is_named(changes, message, llama, tmp_path):
    file = gguf_models.convert(tmp_path / "llama", tmp_path / "other.gguf", **changes)
    with pytest.raises(ShardlmError, match=message) as caught:
        opened.find(file)
    assert str(file) in str(caught.value)


def test_tensors_that_do_not_fit_are_named(llama, tmp_path):
    metadata = {"llama.attention.head_count": 2, "llama.attention.head_count_kv": 1}
    file = gguf_models.convert(tmp_path / "llama", tmp_path / "other.gguf", **metadata)
    with pytest.raises(ShardlmError, match=r"does not fit its config.json: .*self_attn.q_proj.weight is \[32, 32\]"):
        shardlm.load(file)
    assert opened.find(llama)


def test_a_damaged_file_is_refused_or_read_and_nothing_else(llama):
    whole = llama.read_bytes()
    header = min(block.begin for block in shards.read(llama).tensors.values())
    rng, broken = np.random.default_rng(0), llama.with_name("broken.gguf")
    places = [*range(64), *rng.integers(0, header, 150).tolist()]
    contents = [whole[:end] for end in (*range(0, header, 97), len(whole) - 1)]
    contents += [whole[:i] + bytes([whole[i] ^ 1 << int(rng.integers(8))]) + whole[i + 1 :] for i in places]
    refused = 0
    for content in contents:
        broken.write_bytes(content)
        try:
            own_tensors(Folder.open(opened.find(broken)))
        except ShardlmError:
            refused += 1
    assert refused > len(contents) // 2
    broken.write_bytes(whole)
    found = own_tensors(Folder.open(opened.find(broken)))
    broken.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ShardlmError, match="has become shorter since it was opened"):
        [stored.read(...) for stored in found.values()]


def test_a_file_s_name_says_its_kind():
    names = ["m-Q4_K_M.gguf", "m.Q8_0.gguf", "m-IQ2_XXS.gguf", "m-UD-Q6_K_XL-00001-of-00002.gguf", "m-bf16.gguf"]
    assert [tag(name) for name in names] == ["Q4_K_M", "Q8_0", "IQ2_XXS", "Q6_K_XL", "BF16"]
    assert tag("model.gguf") == "" and tagged(names, "q8_0") == ["m.Q8_0.gguf"]
    more = ["m-UD-Q6_K_XL-00002-of-00002.gguf", "mmproj-F16.gguf", "README.md", "m.imatrix.gguf"]
    assert models([*names, *more]) == sorted(names)


@pytest.fixture
def hub(llama, tmp_path, monkeypatch):
    """A hub whose one repository holds these files."""
    folder, there = tmp_path / "snapshot", types.SimpleNamespace(names=[], offline=False)
    folder.mkdir()

    def snapshot_download(repository, allow_patterns, local_files_only=False):
        assert repository == "me/model"
        for name in there.names if not local_files_only else ():
            if any(fnmatch.fnmatch(name, pattern) for pattern in allow_patterns):
                shutil.copy(llama, folder / name)
        return str(folder)

    def list_repo_files(repository):
        if there.offline:
            raise OSError("no network")
        return there.names

    api = types.SimpleNamespace(list_repo_files=list_repo_files)
    module = types.SimpleNamespace(snapshot_download=snapshot_download, HfApi=lambda: api)
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return there


def test_a_model_on_the_hub_is_named_by_its_quantisation(hub):
    hub.names = ["m-Q4_K_M.gguf", "m-Q8_0.gguf", "README.md", "mmproj.gguf"]
    with pytest.raises(ShardlmError, match=r"holds models for llama.cpp; say which one: me/model:Q4_K_M, me/mod"):
        opened.find("me/model")
    for name in ("me/model:Q8_0", "hf.co/me/model:q8_0", "https://huggingface.co/me/model:m-Q8_0.gguf"):
        file = opened.describe(name).source.options["quantization_config"]["file"]
        assert pathlib.Path(file).name == "m-Q8_0.gguf"
    with pytest.raises(ShardlmError, match=r"me/model:Q6_K: the repository has no such file.*there are me/model:Q4_K"):
        opened.find("me/model:Q6_K")
    hub.offline = True
    assert opened.find("me/model:Q8_0")
    hub.names.append("other-Q8_0.gguf")
    hub.offline = False
    with pytest.raises(ShardlmError, match=r"several, m-Q8_0.gguf, other-Q8_0.gguf; there are .*me/model:m-Q8_0"):
        opened.find("me/model:Q8_0")


def test_a_file_that_is_not_there_is_not_asked_of_the_hub():
    with pytest.raises(ShardlmError, match=r"there is no file models/m.gguf; give the path"):
        opened.find("models/m.gguf")


def test_the_only_model_of_a_repository_needs_no_name(hub):
    hub.names = ["config.json", "m-Q4_0.gguf"]
    file = opened.describe("me/model").source.options["quantization_config"]["file"]
    assert pathlib.Path(file).name == "m-Q4_0.gguf"


def test_weights_of_pytorch_are_fetched_where_there_are_no_safetensors(hub, tmp_path):
    """As the first OPT and BLOOM are published."""
    hub.names = ["config.json", "pytorch_model.bin", "flax_model.msgpack", "merges.txt", "training_args.bin"]
    folder = opened.find("me/model")
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "merges.txt", "pytorch_model.bin"]
    hub.offline = True
    assert opened.find("me/model") == folder
    hub.offline = False
    (folder / "pytorch_model.bin").unlink()
    hub.names = ["config.json", "pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"]
    opened.find("me/model")
    assert (folder / hub.names[1]).exists() and (folder / hub.names[2]).exists()
    (folder / hub.names[1]).unlink()
    hub.names.append("model.safetensors")
    opened.find("me/model")
    assert (folder / "model.safetensors").exists() and not (folder / hub.names[1]).exists()


def test_a_repository_of_weights_that_may_hold_anything(hub):
    """As research code is published."""
    hub.names = ["config.json", "checkpoint.pt", "vocab.json"]
    with pytest.raises(ShardlmError, match=r"me/model holds no \*.safetensors and .*; checkpoint.pt may hold .*OTHER"):
        opened.find("me/model")


def test_a_digest_is_of_the_model_and_not_of_where_it_is(llama, tmp_path):
    other = tmp_path / "elsewhere" / llama.name
    other.parent.mkdir()
    shutil.copy(llama, other)
    folders = [opened.find(path) for path in (llama, other)]
    assert folders[0] != folders[1] and digest(folders[0]) == digest(folders[1])
    gguf_models.convert(tmp_path / "llama", other, "BF16")
    assert digest(opened.find(other)) != digest(folders[0])


def test_conversions_and_plans_take_a_file(llama, tmp_path):
    to_hf(llama, tmp_path / "back", "float32")
    back, whole = Folder.open(tmp_path / "back"), Folder.open(tmp_path / "llama")
    assert back.tensors.keys() == whole.tensors.keys() and "quantization_config" not in back.config
    for name, stored in whole.tensors.items():
        assert np.array_equal(back.tensors[name].read(...), stored.read(...))
    assert (tmp_path / "back" / "tokenizer.json").is_file()
    planned = ServedModel.of_folder(llama)
    assert planned.name == "llama.gguf" and planned.shape == opened.describe(llama).source.transformer()


def test_training_takes_tokenizer_and_template_from_the_file(tmp_path):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    folder = gguf_models.as_told("llama", tmp_path / "llama")
    (tmp_path / "chat").mkdir()
    file = gguf_models.convert(folder, tmp_path / "chat" / "m.gguf", **{"tokenizer.chat_template": template})
    for path in (file, file.parent):
        assert tokenizer_from(str(path), ()).vocab_size == 96
        assert template_of(str(path)).source == template
    train_bpe(["own"], 300).save(file.parent / "tokenizer.json")
    assert tokenizer_from(str(file.parent), ()).vocab_size > 96 == tokenizer_from(str(file), ()).vocab_size


def test_a_file_that_is_gone_is_named_where_a_model_is_trained_further(tmp_path):
    with pytest.raises(ShardlmError, match=r"there is no file .*m.gguf; give the path"):
        Pretrained(str(tmp_path / "m.gguf")).transformer()


def test_a_user_without_a_home_is_told_what_to_set(llama, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(pathlib.Path, "home", lambda: pathlib.Path("~nobody-of-this-name").expanduser())
    with pytest.raises(ShardlmError, match="set XDG_CACHE_HOME to a folder"):
        opened.find(llama)


def test_a_cache_that_cannot_be_written_is_named(llama, tmp_path, monkeypatch):
    (tmp_path / "taken").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "taken"))
    with pytest.raises(ShardlmError, match=r"taken/shardlm/gguf/\w+ cannot be written: Not a dir.*set XDG_CACHE_HOME"):
        opened.find(llama)
