"""Converting by slices: the bytes that whole models make, of which no more than some slices are in memory; and nothing
that looks whole where it ends early. What is read and computed is tests/hf's, the command line test_opening.py's."""

import contextlib
import functools
import json
import pathlib
import shutil
import tracemalloc
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from few_bits import in_few_bits
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1 as ocp

import shardlm
from shardlm import checkpoint_slices, hf_files, merge, unread, weights
from shardlm.checkpoint import CheckpointConfig, Checkpoints
from shardlm.checkpoint_slices import StoredArray
from shardlm.config_json import to_json
from shardlm.errors import ShardlmError
from shardlm.held_weights import InGroups, held_weights, paths_of
from shardlm.layers.lora import LoraConfig, beside
from shardlm.models import registry
from shardlm.models.pretrained import Pretrained
from shardlm.opened import prepare
from shardlm.ops.grouped_weights import Grouped, dequantised
from shardlm.run_files import save_run_files
from shardlm.train import convert
from shardlm.train.config import RunConfig
from shardlm.unread import Unread, blocks

HF = pathlib.Path(__file__).parent / "hf"
BF16 = jnp.dtype("bfloat16")


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """So that layers of tiny models are cut too."""
    monkeypatch.setattr(unread, "BLOCK_BYTES", 3000)
    monkeypatch.setattr(checkpoint_slices, "BLOCK_BYTES", 50_000)
    monkeypatch.setattr(checkpoint_slices, "CHUNK_BYTES", 2500)


def as_written(opened, params) -> list[tuple[str, bytes]]:
    """Names and bytes of the tensors of whole parameters, in order."""
    names = functools.partial(registry.names, opened.source.to_hf(), opened.model.config)
    return [(t.name, t.make().tobytes()) for t in weights.planned(opened.model.config, params, names, BF16)]


def written(folder) -> list[tuple[str, bytes]]:
    return [(name, a.read(...).tobytes()) for name, a in hf_files.Folder.open(folder).tensors.items()]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["mtp_reference", "references/gpt_oss", "references/llama_tied", "few/qwen3_moe"])
def test_what_is_written_is_what_whole_models_make(name, tmp_path):
    folder = in_few_bits(tmp_path, "qwen3_moe")[1].path if name.startswith("few") else HF / name
    whole = shardlm.load(folder, dtype="float32", mtp=True)
    expected = as_written(whole, whole.params)
    convert.to_run(folder, tmp_path / "run")
    for source, written_as in ((folder, "direct"), (tmp_path / "run", "back")):
        convert.to_hf(source, tmp_path / written_as)
        assert written(tmp_path / written_as) == expected
    as_run = shardlm.load(tmp_path / "run", dtype="float32", mtp=True).params
    assert jax.tree.all(jax.tree.map(np.array_equal, as_run, whole.params))


def run_of_adapters(folder, source, base) -> pathlib.Path:
    """A run in 16 bits whose checkpoint has random adapters."""
    model = Pretrained(str(source), 16).pinned()
    config = RunConfig(model, precision="bf16", lora=LoraConfig(4, base=base), run_dir=str(folder))
    save_run_files(folder, to_json(config))
    rng, shapes = np.random.default_rng(0), flatten_dict(prepare(folder).model.shapes)
    adapters = {path: jnp.asarray(rng.normal(size=s.shape), jnp.float32) for path, s in shapes.items()}
    with Checkpoints(folder / "checkpoints", CheckpointConfig()) as checkpoints:
        checkpoints.save(1, {"params": unflatten_dict(adapters)}, {}, {})
    return folder


def all_at_once(opened):
    """The sums of weights and adapters, of whole stacks."""
    model, flat, made = opened.model, flatten_dict(opened.params), {}
    execution, lora = model.execution, model.execution.lora
    for path, held in held_weights(model.frozen_shapes, execution.weights, model.groups).items():
        w = flat[path]
        if isinstance(held, InGroups):
            parts = Grouped(*(flat[own] for own in paths_of(path, flat)))
            w = dequantised(parts, held.axis, held.how, execution.dtype)
        if beside(path)[0] in flat:
            product = merge._product(*(flat[own] for own in beside(path)), stacked=True)
            w = w + (lora.alpha / lora.rank * product).astype(w.dtype)
        made[path] = w.astype(execution.dtype)
    return unflatten_dict(made)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["gpt2 of PEFT", "mixtral on int4", "llama on a file's bits"])
def test_adapters_are_merged_as_in_whole_stacks(name, tmp_path, monkeypatch):
    monkeypatch.chdir(HF.parent.parent)
    if name.endswith("PEFT"):
        source = HF / "adapters" / "gpt2"
    elif name.endswith("int4"):
        source = run_of_adapters(tmp_path / "run", HF / "references" / "mixtral", "int4")
    else:
        source = run_of_adapters(tmp_path / "run", in_few_bits(tmp_path, "llama")[1].path, "checkpoint")
    opened = shardlm.load(source)
    with jax.set_mesh(opened.mesh):
        expected = as_written(opened, all_at_once(opened))
    convert.to_hf(source, tmp_path / "merged", merge=True)
    assert written(tmp_path / "merged") == expected
    plain = prepare(source).found.source.folder
    assert written(tmp_path / "merged") != as_written(opened, shardlm.load(plain).params)


def most_held(monkeypatch, convert_it) -> int:
    """The most bytes of numpy's and of jax's arrays that are there while something is written."""
    live = []

    @contextlib.contextmanager
    def bar(what):
        tracemalloc.reset_peak()  # what was traced before and is there no more does not count
        yield lambda done, total: live.append(sum(a.nbytes for a in jax.live_arrays()))

    monkeypatch.setattr(convert, "bytes_bar", bar)
    before = sum(a.nbytes for a in jax.live_arrays())
    tracemalloc.start()
    try:
        convert_it()
        return tracemalloc.get_traced_memory()[1] + max(live) - before
    finally:
        tracemalloc.stop()


@pytest.mark.wide
def test_no_more_than_some_slices_are_in_memory(tmp_path, monkeypatch):
    """24 layers, of which a slice is at most 128 KiB in float32, are 12 MiB: a run of them, a folder of that, and a
    folder with adapters merged."""
    monkeypatch.setattr(unread, "BLOCK_BYTES", 2**17)
    monkeypatch.setattr(checkpoint_slices, "BLOCK_BYTES", 2**18)
    monkeypatch.setattr(checkpoint_slices, "CHUNK_BYTES", 2**15)
    config = {"model_type": "llama", "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256}
    config |= {"num_hidden_layers": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu"}
    config |= {"rms_norm_eps": 1e-5, "rope_theta": 1e4, "dtype": "bfloat16"}
    shape = registry.transformer(config)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    model = prepare(folder).model
    ones = jax.tree.map(lambda s: Unread(s.shape, BF16, lambda i: np.ones([c.stop - c.start for c in i])), model.shapes)
    names = functools.partial(registry.names, config, shape)
    shutil.rmtree(folder)
    hf_files.write_folder(folder, weights.planned(shape, ones, names, BF16), config)
    adapters = run_of_adapters(tmp_path / "adapters", folder, "dtype")
    whole = 2 * sum(a.nbytes for a in jax.tree.leaves(ones))
    for conversion in (
        lambda: convert.to_run(folder, tmp_path / "run"),
        lambda: convert.to_hf(tmp_path / "run", tmp_path / "back"),
        lambda: convert.to_hf(adapters, tmp_path / "merged", merge=True),
    ):
        held = most_held(monkeypatch, conversion)
        assert held < whole / 3, (held, whole)
    assert written(tmp_path / "back") == written(folder)


def test_what_ends_early_leaves_nothing_that_looks_whole(tmp_path, monkeypatch):
    folder, read = HF / "references" / "llama", hf_files.Stored.read
    for to, output in ((convert.to_run, tmp_path / "run"), (convert.to_hf, tmp_path / "hf")):
        left = iter(range(30))

        def interrupted(stored, index, left=left):
            if next(left, None) is None:
                raise KeyboardInterrupt
            return read(stored, index)

        with monkeypatch.context() as patch:
            patch.setattr(hf_files.Stored, "read", interrupted)
            with pytest.raises(KeyboardInterrupt):
                to(folder, output)
        assert [path.name for path in tmp_path.glob(f"{output.name}*")] == [f"{output.name}.unfinished"]
        with pytest.raises(ShardlmError):
            shardlm.load(output.with_name(f"{output.name}.unfinished"))
        to(folder, output)
        assert not output.with_name(f"{output.name}.unfinished").exists()
        assert shardlm.load(output).model.config.num_layers


def test_a_disk_without_room_is_told_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=1000))
    for to, message in (
        (convert.to_run, "the disk is full: it needs .* KiB, and there are 1000 B free"),
        (convert.to_hf, "hf needs .* KiB and there are 1000 B free on its file system; free"),
    ):
        with pytest.raises(ShardlmError, match=message):
            to(HF / "references" / "llama", tmp_path / "hf")
        assert not (tmp_path / "hf").exists() and not list(tmp_path.rglob("*.safetensors"))


def slices_of(shape, rng):
    for _ in range(20):
        ends = [sorted(rng.choice(n + 1, 2, replace=False)) for n in shape]
        yield tuple(slice(int(first), int(last)) for first, last in ends)


def test_slices_of_arrays_that_a_mesh_saved_and_of_compressed_ones(tmp_path):
    rng = np.random.default_rng(0)
    mesh = jax.make_mesh((2, 4), ("fsdp", "tensor"))
    arrays = {"w": rng.normal(size=(3, 16, 8)).astype(np.float32), "norm": rng.normal(size=16).astype(BF16)}
    specs = {"w": P(None, "fsdp", "tensor"), "norm": P()}
    on_mesh = {name: jax.device_put(a, NamedSharding(mesh, specs[name])) for name, a in arrays.items()}
    with Checkpoints(tmp_path / "run", CheckpointConfig()) as checkpoints:
        checkpoints.save(1, {"params": on_mesh}, {}, {})
    with ocp.Context():
        ocp.save_checkpointables(tmp_path / "compressed", {"state": {"params": on_mesh}})
    with Checkpoints(tmp_path / "run") as checkpoints:
        found = checkpoints.unread_params(jax.tree.map(jax.typeof, arrays))
    for name, a in arrays.items():
        other = StoredArray(tmp_path / "compressed" / "state", f"params.{name}")
        for index in slices_of(a.shape, rng):
            assert np.array_equal(found[name].fetch(index), a[index])
            assert np.array_equal(other.read(index), a[index])
    stored = StoredArray(tmp_path / "run" / "1" / "state", "params.w")
    stored._store.kvstore.delete_range(stored._store.kvstore.KeyRange("c/0/1/", "c/0/2/")).result()
    with pytest.raises(ShardlmError, match=r"1 is damaged: params\.w/c/0/1/0 is missing"):
        found["w"].fetch((slice(0, 1), slice(8, 9), slice(0, 1)))


def test_blocks_cut_an_array_once_and_alike():
    for shape in ((), (5,), (3, 7), (2, 5, 4), (2, 0, 4)):
        for numbers in (1, 3, 4, 19, 1000):
            times = np.zeros(shape, int)
            for index in blocks(shape, numbers):
                times[index] += 1
                assert times[index].size <= numbers
            assert (times == 1).all()
    assert [index[0] for index in blocks((10, 3), 12)] == [slice(0, 4), slice(4, 8), slice(8, 10)]
    assert [len(range(*i[1].indices(9))) for i in blocks((2, 9), 8)] == [5, 4, 5, 4]
