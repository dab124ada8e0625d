"""Which projections of few tokens are kernels with norm and gate: what is measured decides, and who cannot have them is
told why. Served so, replies are the same."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from engines import CONFIG, TOKENIZER, finished, of_model
from oracle import opened_of
from small import mesh_of

from shardlm.errors import ShardlmError
from shardlm.layers.block import Block
from shardlm.layers.lora import LoraConfig
from shardlm.mesh import MeshSpec
from shardlm.ops import few_rows, paged_kernel, rotate_write
from shardlm.serve import try_out
from shardlm.serve.engine_config import EngineConfig
from shardlm.serve.layers import taken_apart
from shardlm.serve.sampling_params import SamplingParams
from shardlm.state import ModelDef

SPEC = MeshSpec(tensor=2)  # of which weights lie as on GPUs (ops/cpu_einsum.py)


@pytest.fixture(scope="module")
def served():
    shape = dataclasses.replace(CONFIG, num_layers=2).transformer()
    opened = opened_of(shape, SPEC)
    with jax.set_mesh(opened.mesh):
        return (*taken_apart(opened.model, opened.params), opened.mesh)


def interpreted(monkeypatch) -> list[str]:
    """Lets a CPU run the kernels; returns the names of those that are traced, as they are."""
    ran: list[str] = []
    kernels = [(few_rows, name) for name in ("products", "in_parts", "gated")]
    for module, name in (*kernels, (rotate_write, "run"), (paged_kernel, "pallas")):
        kernel = getattr(module, name)

        def run(*args, kernel=kernel, name=name, **options):
            ran.append(name)
            return kernel(*args, **options | {"interpret": True})

        monkeypatch.setattr(module, name, run)
    return ran


@pytest.mark.parametrize(
    ("attention", "held"),
    [
        pytest.param("blocked", "auto", marks=pytest.mark.wide),
        ("pallas", "auto"),
        pytest.param("pallas", "int8", marks=pytest.mark.wide),
    ],
)
def test_replies_are_the_same(served, monkeypatch, attention, held):
    """With the GPUs' attention over pages, rotation and what is written into pages are one kernel too."""
    model, params, mesh = served
    how = {"paged_attention": attention, "kv_cache": held}
    with jax.set_mesh(mesh):
        model = ModelDef.make(model.config, dataclasses.replace(model.execution, **how))
    ran = interpreted(monkeypatch)
    said = []
    for rows in (0, 4):
        monkeypatch.setattr(try_out, "chosen", lambda *args, rows=rows: (rows, "the test says so"))
        with jax.set_mesh(mesh):
            own = try_out.settled("auto", model, params, False)
        engine = of_model(own, params, mesh_of(SPEC), tokens=32, length=32, pages=40)
        for n, prompt in enumerate((TOKENIZER.encode("some text"), TOKENIZER.encode("other"), [1, 2, 3])):
            sampling = SamplingParams(temperature=0, max_tokens=6, logprobs=0, ignore_eos=True)
            engine.add(str(n), prompt, sampling)
        done = finished(engine)
        said.append({id: one.outputs[0] for id, one in done.items()})
        assert ("gated" in ran) == bool(rows)
        assert ("run" in ran) == bool(rows and attention == "pallas")
    plain, kernel = said
    for id, reply in plain.items():
        assert kernel[id].token_ids == reply.token_ids
        one, other = ([entry.chosen.logprob for entry in each.logprobs] for each in (kernel[id], reply))
        np.testing.assert_allclose(one, other, atol=2e-5)


def test_the_quicker_way_up_to_the_tokens_for_which_it_is():
    def of(few: float, most: float) -> int:
        measured = {(16, True): few, (16, False): 1.0, (64, True): most, (64, False): 1.0}
        return try_out.quickest(measured)[0]

    assert [of(0.9, 0.9), of(0.9, 1.1), of(1.1, 0.9), of(1.1, 1.1)] == [64, 16, 0, 0]
    why = try_out.quickest({(16, True): 4e-5, (16, False): 5e-5, (64, True): 8e-5, (64, False): 7e-5})[1]
    assert why == "measured of a layer: 16 tokens 40 us, apart 50; 64 tokens 80 us, apart 70"


@pytest.mark.wide
@pytest.mark.parametrize("held", ["auto", "fp8"])
def test_each_way_is_run_and_timed(served, monkeypatch, held):
    """Interpreted, so that a CPU can: every case, with its own program, and all that a layer of it runs."""
    model, params, mesh = served
    with jax.set_mesh(mesh):
        how = {"paged_attention": "pallas", "kv_cache": held}
        model = ModelDef.make(model.config, dataclasses.replace(model.execution, **how))
    ran = interpreted(monkeypatch)
    monkeypatch.setattr(try_out, "CALLS", 2)
    monkeypatch.setattr(try_out, "ROUNDS", 1)
    monkeypatch.setattr(try_out, "TRIED", (2, 4))
    with jax.set_mesh(mesh):
        found = try_out.seconds(model, params)
    assert set(found) == {(2, False), (2, True), (4, False), (4, True)} and min(found.values()) > 0
    layers = 2 * 2  # of each of two cases
    assert {name: ran.count(name) for name in ("in_parts", "run", "gated")} == {
        "in_parts": 4 * layers,  # of four products, as a gate of so few columns is of whole sums nowhere
        "run": layers,
        "gated": layers,
    }
    assert ran.count("pallas") == 2 * layers  # attention, both ways


@pytest.mark.sampled(1)
@pytest.mark.parametrize("apart", [False, True])
def test_layers_side_by_side_are_timed(monkeypatch, apart):
    """As Cohere's, whose feed-forward networks have no norm of their own, and GPT-NeoX's, whose have."""
    shape = dataclasses.replace(CONFIG, num_layers=1).transformer()
    [segment] = shape.segments
    blocks = tuple(dataclasses.replace(block, parallel=True, norms_apart=apart) for block in segment.pattern)
    opened = opened_of(dataclasses.replace(shape, segments=(dataclasses.replace(segment, pattern=blocks),)), SPEC)
    interpreted(monkeypatch)
    monkeypatch.setattr(try_out, "CALLS", 2)
    monkeypatch.setattr(try_out, "TRIED", (2, 4))
    norms = []
    before = Block.before
    monkeypatch.setattr(Block, "before", lambda *args: norms.append(args[2]) or before(*args))
    with jax.set_mesh(opened.mesh):
        found = try_out.seconds(*taken_apart(opened.model, opened.params))
    assert max(found.values()) < math.inf
    assert set(norms) == ({"attention", "mlp"} if apart else {"attention"})


def test_a_gpu_without_such_kernels_is_served_without(served, monkeypatch, caplog):
    model, params, mesh = served
    monkeypatch.setattr(try_out, "CALLS", 2)
    monkeypatch.setattr(try_out, "TRIED", (2, 4))

    with jax.set_mesh(mesh):
        found = try_out.seconds(model, params)  # Triton's kernels are not compiled for CPUs
    assert found[2, True] == found[4, True] == math.inf and max(found[2, False], found[4, False]) < math.inf
    assert "kernels with norm and gate cannot be compiled for this GPU" in caplog.text

    def failing(*args):
        raise ValueError("of XLA's own")

    monkeypatch.setattr(try_out, "_of_block", failing)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="of XLA's own"):
        try_out.seconds(model, params)


def test_the_log_says_what_became_of_it(served, caplog):
    model, params, mesh = served
    caplog.set_level("INFO")
    with jax.set_mesh(mesh):
        assert try_out.settled("on", model, params, False).execution.fused_rows == 0
        try_out.settled("auto", model, params, False)
    on, auto = caplog.records
    assert (on.levelname, on.message) == ("WARNING", "fused_products=on is without effect: the platform is cpu")
    assert auto.message == "projections have no norm and gate in them: the platform is cpu"


def test_errors_of_our_own_are_not_taken_for_the_gpu_s(served, monkeypatch):
    model, params, mesh = served

    def wrong(*args, **options):
        raise AttributeError("no such name")

    monkeypatch.setattr(try_out, "TRIED", (2, 4))
    monkeypatch.setattr(few_rows, "in_parts", wrong)  # which the other way does not call
    with jax.set_mesh(mesh), pytest.raises(AttributeError, match="no such name"):
        try_out.seconds(model, params)


def test_who_cannot_have_them_is_told(served, monkeypatch):
    model, params, mesh = served

    def chosen(wanted="auto", deterministic=False, gpu=True, **execution):
        own = dataclasses.replace(model, execution=dataclasses.replace(model.execution, **execution))
        monkeypatch.setattr(try_out, "_platform", lambda mesh: "gpu" if gpu else "cpu")
        monkeypatch.setattr(try_out, "seconds", lambda *args: dict.fromkeys(measured, 1.0) | {(16, True): 0.5})
        with jax.set_mesh(mesh):
            return try_out.chosen(wanted, own, params, deterministic)

    measured = [(rows, how) for rows in try_out.TRIED for how in (False, True)]
    half = {"dtype": "bfloat16"}
    assert chosen(gpu=False) == (0, "the platform is cpu")
    assert chosen() == (0, "the dtype is float32")
    assert chosen("on", dtype="float16") == (0, "the dtype is float16")
    assert chosen("off", **half) == (0, "fused_products=off")
    assert chosen("on", **half) == (64, "fused_products=on")
    assert chosen("on", deterministic=True, **half)[0] == 0
    assert chosen(weights="int4", **half) == (0, "weights are in few bits")
    assert chosen(lora=LoraConfig(4), **half) == (0, "projections have adapters")
    assert chosen(**half)[0] == 16
    monkeypatch.setattr(try_out.jax, "process_count", lambda: 2)
    assert chosen(**half)[0] == 0 and chosen("on", **half)[0] == 64
    drafting = dataclasses.replace(model, execution=dataclasses.replace(model.execution, **half))
    assert try_out.like_model(drafting, params, 16).execution.fused_rows == 16
    assert try_out.like_model(model, params, 16).execution.fused_rows == 0  # of float32
    with pytest.raises(ShardlmError, match="fused_products='always'; choose from auto, on, off"):
        EngineConfig(fused_products="always")
