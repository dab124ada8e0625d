"""Files of llama.cpp opened as the Hugging Face folders that they were made from: configuration and weights of each
architecture, kinds of blocks against llama.cpp's own package, and files that are damaged or not meant."""

import dataclasses
import fnmatch
import json
import pathlib
import shutil
import struct
import sys
import types

import few_bits
import gguf
import gguf_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from small import logits_of

import shardlm
from shardlm import opened
from shardlm.data.chats import template_of
from shardlm.data.prepare import tokenizer_from
from shardlm.errors import ShardlmError
from shardlm.gguf_files import shards
from shardlm.gguf_files.choose import in_folder, models, tag, tagged
from shardlm.gguf_files.header import BLOCKS, Block
from shardlm.hf_files import Folder
from shardlm.hf_quantised.gguf import Blocks
from shardlm.hf_quantised.gguf_kinds import KINDS
from shardlm.tokenizer import train_bpe
from shardlm.weights import own_tensors

# The converter leaves out how a rotation is stretched that depends on each row's length.
NAMES = [path.name for path in sorted(gguf_models.REFERENCES.iterdir()) if path.name != "llama_dynamic"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def llama(tmp_path):
    folder = gguf_models.as_told("llama", tmp_path / "llama")
    return gguf_models.convert(folder, tmp_path / "llama.gguf")


def without_losses(config):
    """A model's shape without what only training asks for, which files in GGUF do not say."""

    def plain(block):
        changes = {"balance_loss": 0.0} if hasattr(block.mlp, "balance_loss") else {}
        return dataclasses.replace(block, mlp=dataclasses.replace(block.mlp, **changes))

    segments = [dataclasses.replace(s, pattern=tuple(map(plain, s.pattern))) for s in config.segments]
    return dataclasses.replace(config, segments=tuple(segments))


@pytest.mark.parametrize("name", NAMES)
def test_an_architecture_is_what_it_was_made_from(name, tmp_path):
    folder = gguf_models.as_told(name, tmp_path / name)
    file = gguf_models.convert(folder, tmp_path / f"{name}.gguf")
    ours, theirs = (opened.describe(path).source.transformer() for path in (file, folder))
    if name == "llama_llama3":  # of other lengths than Llama's own: what each frequency is divided by
        ours, theirs = (divided(config) for config in (ours, theirs))
    else:
        ours, theirs = (without_losses(config) for config in (ours, theirs))
    assert ours == theirs
    found, expected = (own_tensors(Folder.open(opened.find(path))) for path in (file, folder))
    assert found.keys() == expected.keys()
    for name, stored in expected.items():
        whole, shape = stored.read(...), stored.shape
        # Norms of Gemma's are 1 more in the file: what is far below that is rounded.
        assert np.allclose(found[name].read(...), whole, rtol=0, atol=1e-7), name
        part = tuple(slice(n // 3, n - n // 4, 1 + (n > 8)) for n in shape)
        assert found[name].shape == shape and np.allclose(found[name].read(part), whole[part], rtol=0, atol=1e-7), name
        none = (slice(1, 1), *(slice(None),) * (len(shape) - 1))
        assert found[name].read(none).shape == whole[none].shape


def divided(config):
    rope = config.segments[0].pattern[0].attention.rope
    return rope.frequencies(8).round(6).tolist()


def test_logits_are_the_folder_s(tmp_path):
    folder = gguf_models.as_told("llama_tied", tmp_path / "llama")
    file = gguf_models.convert(folder, tmp_path / "model.gguf", "BF16")
    tokens = jnp.arange(24).reshape(2, 12) + 3
    found = []
    for path in (file, folder):
        model = shardlm.load(path)
        with jax.set_mesh(model.mesh):
            found.append(jax.jit(logits_of, static_argnums=0)(model.model, model.params, tokens))
    assert np.array_equal(*found)


def mixed(name, shape):
    """As llama.cpp mixes them: of some layers' tensors more bits, and of the head."""
    if name == "output.weight" or name in ("blk.0.ffn_down.weight", "blk.0.attn_v.weight"):
        return "Q6_K"
    return {"attn_output": "Q5_K", "ffn_up": "Q8_0", "ffn_gate": "Q4_0"}.get(name.split(".")[-2], "Q4_K")


def test_weights_are_served_as_the_file_has_them(tmp_path):
    """In float32, of which kinds with a number taken away are within the rounding."""
    file = gguf_models.convert(gguf_models.wide(tmp_path / "wide"), tmp_path / "model-Q4_K_M.gguf", mixed)
    tokens = jnp.arange(24).reshape(2, 12) + 3
    found = []
    for quantization in ("checkpoint", "dtype"):
        model = shardlm.load(file, decoding=True, quantization=quantization)
        with jax.set_mesh(model.mesh):
            found.append(np.asarray(jax.jit(logits_of, static_argnums=0)(model.model, model.params, tokens)))
        if quantization == "checkpoint":
            kinds = {own: (groups.numbers, groups.zero) for own, groups in model.model.execution.weights.kinds}
            assert kinds["wq"] == kinds["down"] == ("int4", "float32"), kinds
            assert kinds["gate"][0] == "int4" and kinds["up"][0] == kinds["wo"][0] == "int8"
            assert dict(model.model.execution.weights.but) == {"wv": (0,), "down": (0,)}
    assert np.abs(found[0] - found[1]).max() < 1e-4 and found[1].std() > 0.1


@pytest.mark.parametrize("kind", [kind for kind in BLOCKS if BLOCKS[kind][0] > 1])
def test_blocks_stand_for_what_llama_cpp_s_package_says(kind, tmp_path):
    numbers, size = BLOCKS[kind]
    assert gguf.GGML_QUANT_SIZES[Type[kind]] == (numbers, size)
    rng, rows, width = np.random.default_rng(1), 12, 2
    raw = rng.integers(0, 255, (rows, width, size), dtype=np.uint8)
    for first in HALVES.get(kind, ()):  # numbers of 16 bits that are none or infinite make all others so
        raw[..., first : first + 2] = rng.normal(0, 1, (rows, width)).astype(np.float16)[..., None].view(np.uint8)
    (tmp_path / "raw").write_bytes(b"12345678" + raw.tobytes())
    found = Blocks(Block(tmp_path / "raw", kind, (rows, width * numbers), 8))
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw.reshape(rows, -1), Type[kind])
        few_bits.check(found, expected)
        in_heads = Blocks(found.block, size=4)
        few_bits.check(in_heads, expected.reshape(3, 2, 2, -1).swapaxes(1, 2).reshape(expected.shape))
    assert found.nbytes == raw.nbytes
    assert bool(found.kept) == (kind in KINDS)


HALVES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
}


def test_a_rare_kind_without_its_package_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    (tmp_path / "raw").write_bytes(bytes(136))
    with pytest.raises(ShardlmError, match=r"kind IQ4_XS.*pip install 'shardlm\[gguf\]', or .*Q4_K, .*are read with"):
        Blocks(Block(tmp_path / "raw", "IQ4_XS", (1, 256), 0)).read(...)
    assert "IQ4_XS" not in KINDS


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
