"""Hugging Face folders as files: what is read, what is written, and what is refused."""

import json
import os
import shutil
import struct

import ml_dtypes
import numpy as np
import pytest

from shardlm.errors import ShardlmError
from shardlm.hf_files import Folder, Planned, write_folder
from shardlm.safetensors_files import header
from shardlm.stored import DTYPES

CONFIG = {"model_type": "llama"}


def planned(**arrays) -> list[Planned]:
    return [Planned(name, a.dtype, a.shape, lambda a=a: a) for name, a in arrays.items()]


def folder(path, **arrays):
    arrays = arrays or {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.float16([1, 2])}
    write_folder(path, planned(**arrays), CONFIG)
    return path


def test_every_dtype_and_slice_comes_back(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {name: rng.integers(1, 3, (4, 6)).astype(dtype) for name, dtype in DTYPES.items()}
    arrays["scalar"], arrays["empty"] = np.float32(3), np.zeros((0, 4), np.float32)
    opened = Folder.open(folder(tmp_path / "f", **arrays))
    for name, a in arrays.items():
        stored = opened.tensors[name]
        assert stored.dtype == a.dtype and stored.shape == a.shape
        assert np.array_equal(stored.read(...), a)
    part = opened.tensors["BF16"].read((slice(1, 3), slice(0, 6, 2)))
    assert np.array_equal(part.astype(np.float32), arrays["BF16"][1:3, ::2].astype(np.float32))


def test_large_folders_are_cut_into_files_with_an_index(tmp_path):
    arrays = {f"t{i}": np.full((10,), i, np.float32) for i in range(5)}
    seen = []
    write_folder(tmp_path / "f", planned(**arrays), CONFIG, shard_bytes=80, progress=lambda *done: seen.append(done))
    files = sorted(file.name for file in (tmp_path / "f").glob("*.safetensors"))
    assert files == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert seen == [(40 * i, 200) for i in range(1, 6)]
    index = json.loads((tmp_path / "f" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 200} and index["weight_map"]["t4"] == files[2]
    opened = Folder.open(tmp_path / "f")
    assert all(np.array_equal(opened.tensors[name].read(...), a) for name, a in arrays.items())


def test_a_write_that_fails_leaves_no_folder(tmp_path):
    def fail():
        raise RuntimeError("device lost")

    broken = [*planned(a=np.zeros(3, np.float32)), Planned("b", np.dtype("float32"), (3,), fail)]
    with pytest.raises(RuntimeError):
        write_folder(tmp_path / "f", broken, CONFIG)
    assert not (tmp_path / "f").exists()
    folder(tmp_path / "f")  # and what it left is in nobody's way
    with pytest.raises(ShardlmError, match="exists; choose another output folder"):
        folder(tmp_path / "f")


def cut(path):
    data = path.read_bytes()
    path.write_bytes(data[:-3])


def damage(path):
    data = bytearray(path.read_bytes())
    data[8:12] = b"\xff\xff\xff\xff"
    path.write_bytes(data)


def no_header(path):
    path.write_bytes(struct.pack("<Q", 10**9) + b"{}")


def pointer(path):
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n")


def other_dtype(path):
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"C64"'))


def longer(path):
    path.write_bytes(path.read_bytes() + b"tail")


def other_shape(path):
    path.write_bytes(path.read_bytes().replace(b"[2,3]", b"[2,4]").replace(b"[2, 3]", b"[2, 4]"))


def config_is_a_folder(path):
    config = path.parent / "config.json"
    config.unlink()
    config.mkdir()


@pytest.mark.parametrize(
    "change,message",
    [
        (cut, "is cut off: b ends at byte"),
        (damage, "the header is damaged; download the file again"),
        (
            no_header,
            "is not a safetensors file or is cut off: it has 10 bytes, and its header alone has 1000000008",
        ),
        (
            lambda path: os.truncate(path, 5),
            "cut off: it has 5 bytes, and the length of its header takes 8; download",
        ),
        (lambda path: os.truncate(path, 0), "is empty: it has 0 bytes, and the length of its header takes 8; download"),
        (pointer, "is a Git LFS pointer, not the weights; run `git lfs pull`"),
        (other_dtype, "a has dtype C64; supported: F64"),
        (other_shape, r"a has 24 bytes, and F32\[2, 4\] needs 32"),
        (lambda path: path.unlink(), r"holds no \*\.safetensors and .*; the weights are those files: download"),
        (
            lambda path: path.rename(path.with_name("model.pt")),
            "no pytorch_model.*; model.pt may hold anything: save the weights as",
        ),
        (lambda path: (path.unlink(), path.mkdir()), "cannot read .*model.safetensors: Is a directory"),
        (longer, r"has \d+ bytes and its tensors end at \d+; download"),
        (lambda path: (path.parent / "config.json").unlink(), "config.json is not there"),
        (lambda path: (path.parent / "config.json").write_text("{"), "config.json is not JSON"),
        (config_is_a_folder, "cannot read .*config.json: Is a directory; check what it is and its permissions"),
        (lambda path: shutil.rmtree(path.parent), "is not a folder"),
    ],
)
def test_a_broken_folder_is_named_with_its_remedy(tmp_path, change, message):
    path = folder(tmp_path / "f") / "model.safetensors"
    change(path)
    with pytest.raises(ShardlmError, match=message):
        Folder.open(tmp_path / "f")


def entry(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write_header(path, entries, data):
    text = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


A, B = entry("F32", [2], 0, 8), entry("F32", [2], 8, 16)


@pytest.mark.parametrize(
    "entries,message",
    [
        ([1], "the header is damaged; download"),
        ({"a": 7, "b": B}, "a is described by 7; download"),
        ({"a": {"dtype": "F32"}}, r"a is described by \{\"dtype\": \"F32\"\}"),
        ({"a": entry("F32", [-2], 0, 8)}, "a is described by .*-2"),
        ({"a": entry("F32", [2], 8, 0)}, "a has -8 bytes, and .* needs 8"),
        ({"a": A, "b": entry("F32", [3], 4, 16)}, r"b overlaps a: it begins at byte \d+ and that ends at \d+"),
        ({"a": A, "b": entry("F32", [2], 0, 8), "c": B}, "b overlaps a: it begins at byte"),
        ({"a": A, "b": entry("F32", [1], 12, 16)}, "b leaves a gap after a: it begins at byte"),
        ({"b": B}, "b leaves a gap after the header: it begins at byte"),
        ({"a": A}, r"has \d+ bytes and its tensors end at \d+; download"),
    ],
)
def test_tensors_have_to_follow_each_other(tmp_path, entries, message):
    write_header(tmp_path / "x.safetensors", entries, bytes(16))
    with pytest.raises(ShardlmError, match=f"x.safetensors.*{message}"):
        header(tmp_path / "x.safetensors")


def test_other_writers_align_nothing_and_sort_nothing(tmp_path):
    entries = {"x": entry("F32", [3], 1, 13), "none": entry("F32", [0, 4], 1, 1), "u": entry("U8", [1], 0, 1)}
    write_header(tmp_path / "x.safetensors", entries, b"\x07" + np.arange(3, dtype=np.float32).tobytes())
    tensors = header(tmp_path / "x.safetensors")
    assert tensors["x"].read((slice(1, 3),)).tolist() == [1, 2] and tensors["u"].read(...).tolist() == [7]


def test_a_file_that_becomes_shorter_is_an_error_and_not_the_end_of_the_process(tmp_path):
    path = folder(tmp_path / "f") / "model.safetensors"
    tensors = Folder.open(tmp_path / "f").tensors
    cut(path)
    assert tensors["a"].read(...).shape == (2, 3)
    for change in (lambda: None, path.unlink):
        change()
        with pytest.raises(ShardlmError, match=r"shorter since it was opened: .* ends at byte \d+ and the file has"):
            tensors["b"].read(...)


def test_files_without_an_index(tmp_path):
    """All that are numbered have to be there, none may repeat a tensor, and model.safetensors goes before others."""
    arrays = {f"t{i}": np.full((10,), i, np.float32) for i in range(3)}
    path = tmp_path / "f"
    write_folder(path, planned(**arrays), CONFIG, shard_bytes=40)
    one = path / "model-00002-of-00003.safetensors"
    (path / "model.safetensors.index.json").unlink()
    assert set(Folder.open(path).tensors) == set(arrays)
    one.rename(path / "other.safetensors")
    with pytest.raises(ShardlmError, match=r"holds model-00001.*, of 3 files, and not model-00002-of-00003"):
        Folder.open(path)
    shutil.copy(path / "model-00001-of-00003.safetensors", one)
    with pytest.raises(ShardlmError, match=r"tensor t0 is in model-00001-of-00003\.safetensors too; remove one"):
        Folder.open(path)
    (path / "other.safetensors").rename(path / "model.safetensors")
    assert set(Folder.open(path).tensors) == {"t1"}  # as transformers has it: others are of other programs


def test_a_broken_index_is_named(tmp_path):
    arrays = {f"t{i}": np.full((10,), i, np.float32) for i in range(3)}
    write_folder(tmp_path / "f", planned(**arrays), CONFIG, shard_bytes=40)
    index = tmp_path / "f" / "model.safetensors.index.json"
    original = json.loads(index.read_text())
    wrong = {**original["weight_map"], "t0": "model-00002-of-00003.safetensors"}
    index.write_text(json.dumps(original | {"weight_map": wrong}))
    with pytest.raises(ShardlmError, match=r"says that t0 is in model-00002-of-00003\.safetensors, and it is not"):
        Folder.open(tmp_path / "f")
    for content, message in (
        ([], "index.json holds a JSON list and not an object; download"),
        ({}, "index.json has no weight_map from tensors to files; download"),
        ({"weight_map": {"t0": "../f/model-00001-of-00003.safetensors"}}, "names ../f/model-.*not a file of"),
    ):
        index.write_text(json.dumps(content))
        with pytest.raises(ShardlmError, match=message):
            Folder.open(tmp_path / "f")
    index.write_text(json.dumps(original))
    (tmp_path / "f" / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(ShardlmError, match=r"names model-00003-of-00003\.safetensors, which is not in"):
        Folder.open(tmp_path / "f")


def test_the_format_is_safetensors_own(tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy", reason="the package safetensors is not installed")
    a = np.arange(6, dtype=ml_dtypes.bfloat16)
    path = folder(tmp_path / "f", a=a) / "model.safetensors"
    assert np.array_equal(safetensors.load_file(path)["a"].view(np.uint16), a.view(np.uint16))
    safetensors.save_file({"x": np.ones((2, 2), np.float32)}, tmp_path / "y.safetensors")
    assert np.array_equal(header(tmp_path / "y.safetensors")["x"].read(...), np.ones((2, 2)))
