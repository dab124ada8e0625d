"""PyTorch's own files: what torch.save wrote is read number for number, and nothing that a file asks for is run."""

import json
import os
import pathlib
import pickle
import re
import shutil
import zipfile

import jax
import numpy as np
import pytest
import torch_saved
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_saved import dictionary, integer, save, tensor, text

import shardlm
from shardlm.errors import ShardlmError
from shardlm.hf_files import Folder, Planned, holds_weights, write_folder
from shardlm.serve.alike import digest
from shardlm.torch_files import header
from shardlm.torch_pickle import read
from shardlm.weight_files import hold

SAVED = pathlib.Path(__file__).parent / "torch_files"
A = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.mark.parametrize("file", ["views.bin", "protocol4.bin"])
def test_what_torch_saved_is_read_number_for_number(file):
    found, told = header(SAVED / file), json.loads((SAVED / "views.json").read_text())
    assert found.keys() == told.keys()
    for name, (dtype, shape, values) in told.items():
        a = found[name].read(...)
        assert a.dtype.name == dtype == found[name].dtype.name and a.shape == tuple(shape) == found[name].shape
        assert np.array_equal(a.astype(np.float64), np.array(values, np.float64).reshape(shape)), name


def test_parts_of_what_lies_in_other_order():
    for stored in header(SAVED / "views.bin").values():
        a = stored.read(...)
        if a.ndim > 1 and a.size:
            index = (slice(1, 3), *(slice(0, n, 2) for n in a.shape[1:]))
            assert np.array_equal(stored.read(index), a[index])
            assert np.array_equal(stored.row(1).read(...), a[1])
            assert np.array_equal(stored.rows(1, 2).read(...), a[1:2])


def test_what_is_packed_is_read_as_it_lies():
    found = header(SAVED / "views.bin")
    assert np.array_equal(found["a"].laid((2, 6)).read(...), A.reshape(2, 6))
    with pytest.raises(ShardlmError, match=r"views.bin holds a tensor \[4, 3\] with strides \[1, 4\].*contiguous"):
        found["turned"].laid((12,))


def test_tied_weights_lie_in_one_place():
    found = header(SAVED / "views.bin")
    assert found["a"] == found["tied"] == found["parameter"]


def test_torch_itself_reads_the_same(tmp_path):
    """And what the tests write is what it writes."""
    torch = pytest.importorskip("torch", reason="PyTorch is not required: what it wrote is in torch_files/")
    save(tmp_path / "x.bin", {"a": A, "b": A, "c": A.T.copy().T, "h": np.float16([1, 2])})
    for file in (SAVED / "views.bin", tmp_path / "x.bin"):
        found = header(file)
        for name, a in torch.load(file, weights_only=True).items():
            assert np.array_equal(found[name].read(...).astype(np.float64), a.detach().double().numpy()), name


class Runs:
    """What is done when Python's own unpickler reads it."""

    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call


BEGUN = b"ccollections\nOrderedDict\n)R"


@pytest.mark.parametrize(
    "content,message",
    [
        (lambda mark: pickle.dumps({"a": Runs(os.mkdir, (mark,))}, 2), "asks for posix.mkdir, which weights do not"),
        (lambda mark: pickle.dumps({"a": Runs(os.mkdir, (mark,))}, 4), "asks for posix.mkdir, which weights do not"),
        (lambda mark: f"cos\nmkdir\n(V{mark}\ntR.".encode(), "asks for os.mkdir, which weights do not need; nothing"),
        (lambda mark: f"(V{mark}\nios\nmkdir\n.".encode(), "asks for the operation UNICODE, which"),
        (lambda mark: b"(" + text(mark) + b"ios\nmkdir\n.", "asks for the operation INST, which"),
        (lambda mark: b"(cos\nmkdir\n" + text(mark) + b"o.", "asks for os.mkdir"),
        (lambda mark: b"ccollections\nOrderedDict\n" + text(mark) + b"\x85R.", "calls collections.OrderedDict with 1"),
        (lambda mark: b"ctorch\nFloatStorage\n" + integer(3) + b"\x85R.", "calls torch.FloatStorage with 1 arguments"),
        (lambda mark: b"\x82\x01.", "asks for the operation EXT1"),
        (
            lambda mark: dictionary({"a": tensor("0", "FloatStorage", 12, [3], [1], hooks=b"](K\x01e")}),
            "has tensors with hooks",
        ),
    ],
)
def test_nothing_that_a_file_asks_for_is_run(tmp_path, content, message):
    mark = tmp_path / "was-here"
    file = save(tmp_path / "x.bin", {"a": A}, content(str(mark)))
    with pytest.raises(ShardlmError, match=f"x.bin: archive/data.pkl: the pickle {message}"):
        header(file)
    assert not mark.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x02}",
        b"\x80\x02.",
        b"h\x00.",
        b"}K\x01\x85K\x02s.",
        b"}b.",
        b"N}b.",
        b"u.",
        b"}(K\x01u.",
        b"\x85\x86\x87.",
        BEGUN + b"X\xff\xff\xff\x7fa.",
        b"(X\x01\x00\x00\x00atQ.",
        dictionary({"a": tensor("0", "FloatStorage", 12, [13], [1])}),
        dictionary({"a": tensor("0", "FloatStorage", 12, [3, 4], [4])}),
        dictionary({"a": tensor("0", "FloatStorage", 12, [-3], [1])}),
        dictionary({"a": tensor("0", "FloatStorage", 12, [3], [1], offset=10)}),
        dictionary({"a": tensor("0", "FloatStorage", 12, [3], [1], offset=-1)}),
        dictionary({"a": tensor("0", "FloatStorage", 12, [1] * 65, [1] * 65)}),
    ],
)
def test_a_damaged_pickle_is_named(tmp_path, content):
    with pytest.raises(ShardlmError, match=r"x.bin: archive/data.pkl is damaged; download"):
        header(save(tmp_path / "x.bin", {"a": A}, content))


VALID = dictionary({"a": tensor("0", "FloatStorage", 12, [3, 4], [4, 1]), "b": tensor("1", "HalfStorage", 2, [2], [1])})


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=60) | st.tuples(st.integers(0, len(VALID) - 1), st.binary(max_size=3)))
def test_any_bytes_are_data_or_refused(change):
    content = VALID[: change[0]] + change[1] + VALID[change[0] + 1 :] if isinstance(change, tuple) else change
    try:
        read(content, "x.bin")
    except ShardlmError as error:
        assert str(error).startswith("x.bin")


@pytest.mark.parametrize(
    "content,message",
    [
        (b"\x80\x02K\x05.", "holds a int and not tensors by their names; save a state_dict"),
        (b"\x80\x02}" + text("step") + b"K\x05s.", "'step' is a int and not a tensor. Weights of a Hugging"),
        (b"\x80\x02}" + text("model") + b"}s.", "'model' is a dict and not a tensor.*state_dict"),
        (dictionary({"a": tensor("7", "FloatStorage", 12, [12], [1])}), "no entry archive/data/7, which a tensor is"),
        (
            dictionary({"a": tensor("0", "FloatStorage", 13, [12], [1])}),
            "data/0 has 48 bytes, and 13 numbers of",
        ),
        (dictionary({"a": tensor("0", "DoubleStorage", 12, [6], [1])}), "48 bytes, and 12 numbers of float64 need 96"),
    ],
)
def test_what_is_no_weights_is_named(tmp_path, content, message):
    with pytest.raises(ShardlmError, match=f"x.bin.*{message}"):
        header(save(tmp_path / "x.bin", {"a": A}, content))


def test_other_forms_are_named(tmp_path):
    with pytest.raises(ShardlmError, match=r"before.bin is of PyTorch's form before 1.6 \(a pickle\).*torch.save\("):
        header(SAVED / "before.bin")
    x = tmp_path / "x.bin"
    for content, message in (
        (b"\0" * 257 + b"ustar" + b"\0" * 300, r"before 1.6 \(a tar file\)"),
        (b"version https://git-lfs", "a Git LFS pointer.*git lfs pull"),
        (b"", "not a file.*it is empty; download"),
        (b"<html>", "not a file of PyTorch's .*begins with b'<html>'; download"),
        ((SAVED / "views.bin").read_bytes()[:2000], r"cut off or damaged \(File is not a zip file\); download"),
    ):
        x.write_bytes(content)
        with pytest.raises(ShardlmError, match=f"x.bin is .*{message}"):
            header(x)
    x.unlink()
    with pytest.raises(ShardlmError, match=r"cannot read .*x.bin: No such file"):
        header(x)
    save(x, {"a": A}, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(ShardlmError, match=r"x.bin: archive/data.pkl is compressed"):
        header(x)
    save(x, {"a": A}, byteorder=b"big")
    with pytest.raises(ShardlmError, match=r"x.bin was saved on a machine with another order of bytes"):
        header(x)
    with zipfile.ZipFile(x, "w") as archive:
        archive.writestr("a/code/x.py", "")
    with pytest.raises(ShardlmError, match=r"0 entries data.pkl.*TorchScript"):
        header(x)


def test_an_entry_that_is_not_where_the_archive_says(tmp_path):
    file = save(tmp_path / "x.bin", {"a": A})
    with zipfile.ZipFile(file) as archive:
        at = archive.getinfo("archive/data/0").header_offset
    content = bytearray(file.read_bytes())
    content[at : at + 4] = b"PK\x05\x06"
    file.write_bytes(content)
    with pytest.raises(ShardlmError, match=r"x.bin is cut off or damaged at archive/data/0; download"):
        header(file)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_entries_of_one_name_are_refused(tmp_path):
    """Readers differ in which they take, so that what one looked at is not what another runs with."""
    file = save(tmp_path / "x.bin", {"a": A})
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("archive/data/0", (A + 1).tobytes())
    with pytest.raises(ShardlmError, match=r"x.bin has several entries of one name"):
        header(file)


def test_folders_are_read_as_transformers_chooses(tmp_path):
    """One file, else what the index names, else all that are numbered; safetensors before any of them."""
    folder, rng = tmp_path / "f", np.random.default_rng(0)
    arrays = {f"t{i}": rng.normal(size=(3, 2)).astype(np.float16) for i in range(3)}
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "opt"}')
    assert not holds_weights(folder)
    (folder / "training_args.bin").write_bytes(b"")
    with pytest.raises(ShardlmError, match=r"no \*.safetensors and no pytorch_model\*.bin; training_args.bin may hold"):
        Folder.open(folder)
    files = [f"pytorch_model-0000{i + 1}-of-00003.bin" for i in range(3)]
    for name, file in zip(arrays, files, strict=True):
        save(folder / file, {name: arrays[name]})
    assert holds_weights(folder) and [file.name for file in hold(folder)] == files

    def check(tensors, expected=arrays):
        assert tensors.keys() == expected.keys()
        assert all(np.array_equal(tensors[name].read(...), a) for name, a in expected.items())

    check(Folder.open(folder).tensors)
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": dict(zip(arrays, files, strict=True))}))
    (folder / "pytorch_model-other.bin").write_bytes(b"of something else")
    check(Folder.open(folder).tensors)
    before = digest(folder)
    (folder / files[1]).rename(folder / "elsewhere")
    with pytest.raises(ShardlmError, match=rf"pytorch_model.bin.index.json names {files[1]}, which is not in"):
        Folder.open(folder)
    save(folder / "pytorch_model.bin", {"one": A})
    check(Folder.open(folder).tensors, {"one": A})
    assert digest(folder) != before
    write_folder(tmp_path / "g", [Planned("s", A.dtype, A.shape, lambda: A)], {})
    shutil.copy(tmp_path / "g" / "model.safetensors", folder)
    check(Folder.open(folder).tensors, {"s": A})
    assert [file.name for file in hold(folder)] == ["model.safetensors"]


def test_a_file_that_becomes_shorter_is_an_error(tmp_path):
    shutil.copy(SAVED / "views.bin", tmp_path / "x.bin")
    found = header(tmp_path / "x.bin")
    os.truncate(tmp_path / "x.bin", found["turned"].end - 1)
    with pytest.raises(ShardlmError, match=r"x.bin has become shorter since it was opened"):
        found["turned"].read(...)


REFERENCES = pathlib.Path(__file__).parent / "references"
MASKS = {"bias": np.ones((1, 1, 8, 8), bool), "masked_bias": np.float32(-1e4).reshape(())}
ANGLES = np.ones(4, np.float32)


@pytest.mark.parametrize(
    "family,without,beside",
    [
        ("gpt2", "transformer.", {f"h.0.attn.{name}": a for name, a in MASKS.items()}),
        ("gptj", "", {f"transformer.h.0.attn.{name}": a for name, a in MASKS.items()}),
        ("gpt_neo", "", {f"transformer.h.1.attn.attention.{name}": a for name, a in MASKS.items()}),
        ("gpt_neox", "", {f"gpt_neox.layers.0.attention.{name}": a for name, a in MASKS.items()}),
        ("gpt_bigcode", "", {f"transformer.h.0.attn.{name}": a for name, a in MASKS.items()}),
        ("llama", "", {"model.layers.0.self_attn.rotary_emb.inv_freq": ANGLES}),
        ("falcon", "", {"transformer.h.0.self_attention.maybe_rotary.inv_freq": ANGLES}),
        ("opt", "model.", {}),
        ("bloom", "transformer.", {}),
    ],
)
def test_what_such_files_hold_besides_is_left_aside(tmp_path, family, without, beside):
    """Buffers, heads that repeat the embedding, and names of the decoder alone."""
    folder = shutil.copytree(REFERENCES / family, tmp_path / family)
    arrays = {name.removeprefix(without): s.read(...) for name, s in Folder.open(folder).tensors.items()}
    heads = {"lm_head.weight", "embed_out.weight"} & arrays.keys()
    if not heads and not without:
        embedding = next(name for name in arrays if re.search(r"(wte|embed_tokens|word_embeddings)\.weight$", name))
        arrays["lm_head.weight"] = arrays[embedding]
    torch_saved.save_folder(folder, arrays | beside)
    ours, theirs = (shardlm.load(path).params for path in (folder, REFERENCES / family))
    assert jax.tree.all(jax.tree.map(np.array_equal, ours, theirs))


def test_a_tied_head_has_the_name_of_its_family(tmp_path):
    folder = shutil.copytree(REFERENCES / "gpt_neox", tmp_path / "tied")
    options = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(options | {"tie_word_embeddings": True}))
    assert "embed_out.weight" in Folder.open(folder).tensors
    assert shardlm.load(folder).model.config.tie_embeddings


def test_a_reference_in_both_forms_is_the_same_model(tmp_path):
    folder = shutil.copytree(REFERENCES / "opt", tmp_path / "opt")
    arrays = {name: stored.read(...) for name, stored in Folder.open(folder).tensors.items()}
    torch_saved.save_folder(folder, arrays)
    for name, stored in Folder.open(folder).tensors.items():
        assert stored.file.name == "pytorch_model.bin" and np.array_equal(stored.read(...), arrays[name])
