"""Files of llama.cpp opened as the Hugging Face folders that they were made from: configuration and weights of each
architecture, and kinds of blocks against llama.cpp's own package."""

import dataclasses
import itertools
import re
import sys

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
from shardlm.errors import ShardlmError
from shardlm.gguf_files.forms import Order, Place, halves
from shardlm.gguf_files.header import BLOCKS, Block
from shardlm.hf_files import Folder, Planned, write_folder
from shardlm.hf_quantised.codes import FP4
from shardlm.hf_quantised.gguf import Blocks, _opened
from shardlm.hf_quantised.gguf_kinds import KINDS
from shardlm.train.convert import to_hf
from shardlm.weights import own_tensors

# The converter leaves out how a rotation is stretched that depends on each row's length.
NAMES = [name for name in gguf_models.known() if name != "llama_dynamic"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


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
    if name == "hunyuan":  # the base as it was stretched, in float32
        ropes = [config.segments[0].pattern[0].attention.rope for config in (ours, theirs)]
        assert ropes[0].theta == pytest.approx(ropes[1].theta, rel=1e-7)
        theirs = with_base(theirs, ropes[0].theta)
    assert ours == theirs
    found, expected = (own_tensors(Folder.open(opened.find(path))) for path in (file, folder))
    assert found.keys() == expected.keys()
    for name, stored in expected.items():
        whole, shape = stored.read(...), stored.shape
        # Norms of Gemma's are 1 more in the file: what is far below that is rounded. Of A_log the file has minus the
        # exponential, a relative rounding of 2**-24, and its logarithm of up to 4 is rounded too.
        off = 5e-7 if name.endswith("A_log") else 1e-7
        assert np.allclose(found[name].read(...), whole, rtol=0, atol=off), name
        part = tuple(slice(n // 3, n - n // 4, 1 + (n > 8)) for n in shape)
        assert found[name].shape == shape and np.allclose(found[name].read(part), whole[part], rtol=0, atol=off), name
        none = (slice(1, 1), *(slice(None),) * (len(shape) - 1))
        assert found[name].read(none).shape == whole[none].shape


def test_nemotron_without_experts_is_of_another_name(tmp_path):
    whole = Folder.open(gguf_models.as_told("nemotron_h", tmp_path / "whole"))
    kept = {name: stored.read(...) for name, stored in whole.tensors.items() if ".layers.4." not in name}
    of_experts = re.compile("expert|moe|n_group$|topk|scaling")
    config = {name: value for name, value in whole.config.items() if not of_experts.search(name)}
    config["layers_block_type"] = config["layers_block_type"][:4]
    planned = [Planned(name, a.dtype, a.shape, lambda a=a: a) for name, a in kept.items()]
    write_folder(tmp_path / "dense", planned, config)
    file = gguf_models.convert(tmp_path / "dense", tmp_path / "dense.gguf")
    ours, theirs = (opened.describe(path).source.transformer() for path in (file, tmp_path / "dense"))
    assert ours == theirs and own_tensors(Folder.open(opened.find(file))).keys() == kept.keys()


def test_linear_attention_is_where_files_without_a_list_of_layers_have_it(tmp_path):
    folder = gguf_models.as_told("qwen3_next", tmp_path / "next")
    every = {"qwen3next.attention.recurrent_layers": None, "qwen3next.full_attention_interval": 2}
    file = gguf_models.convert(folder, tmp_path / "model.gguf", **every)
    ours, theirs = (opened.describe(path).source.transformer() for path in (file, folder))
    assert without_losses(ours) == without_losses(theirs)


def with_base(config, theta):
    (segment,) = config.segments
    (block,) = segment.pattern
    rope = dataclasses.replace(block.attention.rope, theta=theta)
    block = dataclasses.replace(block, attention=dataclasses.replace(block.attention, rope=rope))
    return dataclasses.replace(config, segments=(dataclasses.replace(segment, pattern=(block,)),))


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


def test_a_file_in_16_bits_is_written_in_few(tmp_path):
    folder = gguf_models.as_told("llama_tied", tmp_path / "llama")
    file = gguf_models.convert(folder, tmp_path / "model.gguf", "BF16")
    for path in (file, folder):
        to_hf(path, tmp_path / f"of_{path.name}", quantization="W8A8")
    ours, theirs = (Folder.open(tmp_path / f"of_{path.name}").tensors for path in (file, folder))
    assert ours.keys() == theirs.keys() and all(np.array_equal(ours[n].read(...), theirs[n].read(...)) for n in ours)
    some = {"token_embd.weight": "Q8_0"}
    few = gguf_models.convert(folder, tmp_path / "few.gguf", lambda name, shape: some.get(name, "BF16"))
    with pytest.raises(ShardlmError, match=r"in few bits already \(gguf\)"):
        to_hf(few, tmp_path / "of_few", quantization="W8A8")


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
        in_heads = Blocks(found.block, halves(4))
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


@pytest.mark.parametrize("form", ["turned", "gate_up"])
def test_experts_of_gpt_oss_are_served_as_the_file_has_them(form, tmp_path):
    """[E, inputs, *], by codes and factors, whole and in parts that begin anywhere but within a group."""
    rng, (E, O, I) = np.random.default_rng(2), (2, 6, 96)
    blocks, wholes = [], []
    for part in range(1 + (form == "gate_up")):
        raw = rng.integers(0, 254, (E, O, I // 32, 17), dtype=np.uint8)
        raw[..., 0] = rng.integers(120, 134, raw.shape[:-1])
        (tmp_path / str(part)).write_bytes(raw.tobytes())
        blocks.append(Block(tmp_path / str(part), "MXFP4", (E, O, I), 0))
        wholes.append(gguf.quants.dequantize(raw.reshape(E, O, -1), Type.MXFP4))
    expected = np.stack(wholes, axis=2).reshape(E, -1, I).swapaxes(1, 2)
    found = _opened("experts", Place(form, tuple(blocks)))
    assert found.shape == expected.shape and found.few and found.kept == KINDS["MXFP4"].kept
    assert np.array_equal(found.read(...), expected)
    columns = (slice(None), slice(0, None, 2), slice(1, None, 2), slice(3, 7), slice(5, 6))
    for experts, groups, some in itertools.product((slice(None), slice(1, 2)), (slice(0, 3), slice(1, 3)), columns):
        inputs = slice(groups.start * 32, groups.stop * 32)
        values = FP4[found.codes((experts, inputs, some)) & 15]
        factors = found.factors_of((experts, slice(groups.start * 2, groups.stop * 2), some), every=16)
        right = expected[experts, inputs, some]
        assert np.array_equal(values * factors.repeat(16, axis=1), right)
        assert np.array_equal(found.read((experts, inputs, some)), right)


def test_what_was_put_in_another_order_is_served_as_the_file_has_it(tmp_path):
    """Codes and factors in parts, of columns by heads, of groups made of two tensors, and of one above another."""

    def blocks(name, *shape):
        a = np.random.default_rng(3).normal(0, 1, shape).astype(np.float32)
        raw = gguf.quants.quantize(a, Type.Q8_0)
        (tmp_path / name).write_bytes(raw.tobytes())
        return Block(tmp_path / name, "Q8_0", shape, 0), gguf.quants.dequantize(raw, Type.Q8_0)

    K, G, H, V, D = 2, 3, 4, 32, 64
    out, of_out = blocks("out", 5, K * G * V)
    several, of_several = blocks("several", K * (2 * H + G * V), D)
    last, of_last = blocks("last", K * G * V, D)
    up, of_up = blocks("up", 3, 6, D)
    q, k, v = np.split(of_several, (K * H, 2 * K * H))
    grouped = [a.reshape(K, -1, D) for a in (q, k, v, of_last)]
    expected = {
        Place("columns", (out,), Order(0, K, G, V)): of_out.reshape(5, G, K, V).swapaxes(1, 2).reshape(5, -1),
        Place("by_groups", (several, last), None, (K, H, H, G * V, G * V)): np.concatenate(grouped, 1).reshape(-1, D),
        Place("stacked", (up, up)): np.concatenate([of_up, of_up], axis=1),
    }
    for place, whole in expected.items():
        found = _opened("weight", place)
        assert found.shape == whole.shape and found.few and found.kept == KINDS["Q8_0"].kept, place.form
        assert np.array_equal(found.read(...), whole), place.form
        rows = [slice(None), slice(1, None, 2), slice(2, 5), slice(0, 0)]
        for some, groups in itertools.product(rows, (slice(0, 2), slice(1, 2))):
            outer = (slice(None), some) if whole.ndim == 3 else (some,)
            inputs = slice(groups.start * 32, groups.stop * 32)
            halves_of = slice(groups.start * 2, groups.stop * 2)
            factors = found.factors_of((*outer, halves_of), every=16).repeat(16, axis=-1)
            assert np.array_equal(found.codes((*outer, inputs)) * factors, whole[(*outer, inputs)]), place.form


def test_columns_that_part_groups_of_inputs_are_not_served_as_the_file_has_them(tmp_path):
    block = Block(tmp_path / "raw", "Q8_0", (2, 64), 0)
    assert _opened("weight", Place("columns", (block,), Order(0, 2, 2, 16))).kept is None


def test_experts_of_which_one_half_is_missing_are_refused(tmp_path):
    pair = (Block(tmp_path / "raw", "F32", (2, 3, 4), 0), Block(tmp_path / "raw", "F32", (2, 2, 4), 0))
    for place in (Place("stacked", pair), Place("by_groups", pair, None, (1, 1, 2))):
        with pytest.raises(ShardlmError, match=r"what weight is made of has the shape \[2, 3, 4\] and \[2, 2, 4\]"):
            _opened("weight", place)
