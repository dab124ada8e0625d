"""Hugging Face folders as files: what is read, what is written, and what is refused."""

import json
import shutil
import struct

import ml_dtypes
import numpy as np
import pytest

from shardlm.errors import ShardlmError
from shardlm.hf_files import DTYPES, Folder, Planned, header, write_folder

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
        assert a.size == 0 or np.array_equal(stored.read(...), a)
    part = opened.tensors["BF16"].read((slice(1, 3), slice(0, 6, 2)))
    assert np.array_equal(part.astype(np.float32), arrays["BF16"][1:3, ::2].astype(np.float32))


def test_large_folders_are_cut_into_files_with_an_index(tmp_path):
    arrays = {f"t{i}": np.full((10,), i, np.float32) for i in range(5)}
    seen = []
    write_folder(tmp_path / "f", planned(**arrays), CONFIG, shard_bytes=80, progress=lambda t: seen.append(t.name))
    files = sorted(file.name for file in (tmp_path / "f").glob("*.safetensors"))
    assert files == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)] and seen == list(arrays)
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


def other_shape(path):
    path.write_bytes(path.read_bytes().replace(b"[2,3]", b"[2,4]").replace(b"[2, 3]", b"[2, 4]"))


@pytest.mark.parametrize(
    "change,message",
    [
        (cut, "is cut off: b ends at byte"),
        (damage, "the header is damaged; download the file again"),
        (no_header, "is not a safetensors file or is cut off: 10 bytes, a header of 1000000000"),
        (pointer, "is a Git LFS pointer, not the weights; run `git lfs pull`"),
        (other_dtype, "a has dtype C64; supported: F64"),
        (other_shape, r"a has 24 bytes, and F32\[2, 4\] needs 32"),
        (lambda path: path.unlink(), r"holds no \*\.safetensors"),
        (lambda path: path.rename(path.with_name("pytorch_model.bin")), "pytorch_model.bin would run code on loading"),
        (lambda path: shutil.copy(path, path.with_name("other.safetensors")), "tensor a is in model.safetensors too"),
        (lambda path: (path.parent / "config.json").unlink(), "config.json is not there"),
        (lambda path: (path.parent / "config.json").write_text("{"), "config.json is not JSON"),
        (lambda path: shutil.rmtree(path.parent), "is not a folder"),
    ],
)
def test_a_broken_folder_is_named_with_its_remedy(tmp_path, change, message):
    path = folder(tmp_path / "f") / "model.safetensors"
    change(path)
    with pytest.raises(ShardlmError, match=message):
        Folder.open(tmp_path / "f")


def test_a_broken_index_is_named(tmp_path):
    arrays = {f"t{i}": np.full((10,), i, np.float32) for i in range(3)}
    write_folder(tmp_path / "f", planned(**arrays), CONFIG, shard_bytes=40)
    index = tmp_path / "f" / "model.safetensors.index.json"
    original = json.loads(index.read_text())
    wrong = {**original["weight_map"], "t0": "model-00002-of-00003.safetensors"}
    index.write_text(json.dumps(original | {"weight_map": wrong}))
    with pytest.raises(ShardlmError, match=r"says that t0 is in model-00002-of-00003\.safetensors, and it is not"):
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
