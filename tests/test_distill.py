"""Distillation: loss and gradients are those of plain formulas over all logits, on every mesh, of all weights and of
adapters, by a teacher of another family and width; what a run of it holds; and what cannot be is refused. The op is
tests/ops/test_distillation.py's."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import objective_runs
import pytest
from small import mesh_of, packed_batch, relative_error

from shardlm.errors import ShardlmError
from shardlm.layers.lora import LoraConfig
from shardlm.layers.packed import Packed
from shardlm.mesh import MeshSpec
from shardlm.models.llama import LlamaConfig
from shardlm.models.pretrained import Pretrained
from shardlm.ops import distillation
from shardlm.state import TEACHER
from shardlm.tokenizer import Tokenizer, train_bpe
from shardlm.train.bench import bench_training
from shardlm.train.config import (
    DistillConfig,
    GrpoConfig,
    PreferenceConfig,
    RunConfig,
    SlowLinkConfig,
    TrainConfig,
)
from shardlm.train.distill import check_distill, check_tokenizers
from shardlm.train.program import Program
from shardlm.train.settled import settle

REFERENCES = pathlib.Path(__file__).parent / "hf" / "references"
B, T, VOCAB = 8, 32, 96
STUDENT = LlamaConfig(VOCAB, 16, 2, 4, 2, 8, 32, 10_000.0)
DISTILL = DistillConfig(str(REFERENCES / "gemma2"), 0.7, 2.0, "jsd", 0.3)
LORA = {"model": Pretrained(str(REFERENCES / "llama")), "lora": LoraConfig(4)}
TOLERANCE = 2e-5  # float32 sums in another order


def config_of(**changes) -> RunConfig:
    options = {
        "model": STUDENT,
        "mesh": MeshSpec(),
        "precision": "fp32",
        "remat": "none",
        "distill": DISTILL,
        "train": TrainConfig(global_batch=B, seq_len=T, z_loss=1e-3),
    }
    return RunConfig(**(options | changes))


def state_of(config: RunConfig, program: Program):
    """New weights are the same on every mesh; adapters would begin at nothing."""
    state = program.init(program.pretrained(), program.frozen())
    rng = np.random.default_rng(1)
    return state, jax.tree.map(
        lambda a: jax.device_put(np.asarray(a) + 0.05 * rng.standard_normal(a.shape, np.float32), a.sharding),
        state.params,
    )


def loss_and_gradients(config: RunConfig, evaluates: bool = False):
    program = Program.make(config, mesh_of(config.mesh))
    state, params = state_of(config, program)
    return objective_runs.loss_and_gradients(program, params, state.frozen, packed_batch(B, T, VOCAB), evaluates)


def naive(config: RunConfig):
    """All logits of both at once."""
    program, batch, distill = Program.make(config, mesh_of(MeshSpec())), packed_batch(B, T, VOCAB), config.distill

    def logits(model, params):
        lm = model.model(params)
        ctx = Packed.make(jnp.asarray(batch["segment_ids"]), None, model.execution)
        return lm.logits(lm(jnp.asarray(batch["tokens"]), jnp.asarray(batch["positions"]), ctx)[0])

    def loss(params, frozen):
        student, teacher = logits(program.model.bound(frozen), params), logits(program.teacher, frozen[TEACHER])
        gap = distillation.reference(student, teacher, distill.divergence)
        of_all = jax.nn.log_softmax(student)
        nll = -jnp.take_along_axis(of_all, jnp.asarray(batch["targets"])[..., None], axis=-1)[..., 0]
        z = config.train.z_loss * jax.nn.logsumexp(student, axis=-1) ** 2
        every, mask = {"loss": nll, "z_loss": z, "divergence": gap}, batch["loss_mask"]
        parts = {name: jnp.sum(a * mask) / mask.sum() for name, a in every.items()}
        return (1 - distill.weight) * (parts["loss"] + parts["z_loss"]) + distill.weight * parts["divergence"], parts

    state, params = state_of(config, program)
    with jax.set_mesh(program.mesh):
        return jax.tree.map(np.asarray, jax.jit(jax.grad(loss, has_aux=True))(params, state.frozen))


@pytest.mark.parametrize(
    ("options", "meshes"),
    [
        ({}, [MeshSpec(fsdp=2, context=2, tensor=2)]),
        pytest.param({"remat": "dots"}, [MeshSpec(), MeshSpec(data=2, context=2, tensor=2)], marks=pytest.mark.wide),
        pytest.param(LORA, [MeshSpec(), MeshSpec(fsdp=4, tensor=2)], marks=pytest.mark.wide),
    ],
    ids=["full", "dots", "lora"],
)
def test_loss_and_gradients_are_the_formulas_on_every_mesh(options, meshes):
    grads, metrics = naive(config_of(**options))
    assert metrics["divergence"] > 0.01
    for spec in meshes:
        train = TrainConfig(global_batch=B, seq_len=T, z_loss=1e-3, accumulation=2 if spec.fsdp > 1 else 1)
        found, of_step, sums = loss_and_gradients(config_of(**options, mesh=spec, train=train), spec == MeshSpec())
        assert relative_error(of_step, metrics) < TOLERANCE
        assert relative_error(found, grads) < TOLERANCE
        if sums:
            tokens = sums.pop("tokens")
            assert relative_error(sums, {name: tokens * metrics[name] for name in sums}) < TOLERANCE


@pytest.mark.wide
@pytest.mark.parametrize(
    "student,teacher", [("", "mixtral"), ("", "bloom"), ("", "qwen3_next"), ("mixtral", "mixtral")]
)
def test_other_teachers_and_meshes(student, teacher):
    """Mixtures of experts on their axis, another width, and linear attention; by Ulysses over context."""
    distill = DistillConfig(str(REFERENCES / teacher), 0.9)
    config = config_of(model=Pretrained(str(REFERENCES / student)) if student else STUDENT, distill=distill)
    grads, metrics, _ = loss_and_gradients(config)
    tensor = MeshSpec(fsdp=2, expert=2, tensor=2) if student else MeshSpec(fsdp=4, tensor=2)
    for spec in (tensor, MeshSpec(fsdp=2, context=2)):
        around = {"mesh": spec, "context_attention": "ulysses", "remat": "full"}
        found, of_step, _ = loss_and_gradients(dataclasses.replace(config, **around))
        assert relative_error(of_step, metrics) < TOLERANCE
        assert relative_error(found, grads) < TOLERANCE


def test_the_teacher_rests_split_in_the_compute_dtype_beside_what_adapters_stand_on():
    program = Program.make(config_of(**LORA, precision="bf16", mesh=MeshSpec(fsdp=8)), mesh_of(MeshSpec(fsdp=8)))
    frozen = program.frozen_shapes()
    taught = frozen.pop(TEACHER)
    assert jax.tree.structure(frozen) == jax.tree.structure(program.model.frozen_shapes)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(taught)} == {"bfloat16"}
    assert taught["embedding"].sharding.spec == program.teacher.shapes["embedding"].sharding.spec
    assert taught["embedding"].sharding.shard_shape((VOCAB, 32)) != (VOCAB, 32)
    with pytest.raises(ShardlmError, match="steps are timed with made-up weights"):
        bench_training(program, warmup=0, steps=1)
    read = program.frozen()
    assert jax.tree.structure(read[TEACHER]) == jax.tree.structure(taught)


def test_the_teacher_is_not_rounded_where_the_model_is():
    """Though its widths make no whole groups of W4A16's."""
    student = dataclasses.replace(STUDENT, embed_dim=128, head_dim=32, mlp_dim=128)
    settled = settle(config_of(model=student, matmul="W4A16"), MeshSpec(), jax.devices()[0])
    assert (settled.execution.matmul, settled.teacher.execution.matmul) == ("W4A16", "dtype")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": dataclasses.replace(STUDENT, vocab_size=64)}, "predicts 96 tokens and the model 64"),
        ({"distill": DistillConfig(str(REFERENCES / "gpt2"))}, "distill.teacher=.*gpt2: seq_len=128 is more than"),
        (
            {
                "model": dataclasses.replace(STUDENT, num_heads=3, num_kv_heads=3),
                "distill": DistillConfig(str(REFERENCES / "qwen3_next")),
                "mesh": MeshSpec(context=2),
            },
            "by ulysses and the model by ring",
        ),
    ],
)
def test_teachers_that_are_refused(changes, message):
    config = config_of(**changes)
    if "seq_len" in message:
        config = dataclasses.replace(config, train=TrainConfig(global_batch=B, seq_len=128))
    with pytest.raises(ShardlmError, match=message):
        Program.make(config, mesh_of(config.mesh))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mesh": MeshSpec(tensor=2, pipeline=2)}, "stages do not run the teacher"),
        ({"slow_link": SlowLinkConfig("int8")}, "stands on the whole mesh"),
        ({"grpo": GrpoConfig(("a.py:f",))}, "with grpo.reward"),
        ({"preference": PreferenceConfig(0.1)}, "with preference.beta=0.1"),
        ({"distill": DistillConfig("folder", 1.0)}, "which weighs nothing then; set train.z_loss to 0"),
    ],
)
def test_what_does_not_go_with_one(changes, message):
    with pytest.raises(ShardlmError, match=message):
        check_distill(config_of(**changes))


def test_a_teacher_of_another_tokenizer_is_refused(tmp_path):
    one, other = (train_bpe(texts, 300) for texts in (["abc abd " * 9], ["xyz xyw " * 9]))
    for name, tokenizer in (("one", one), ("other", other)):
        (tmp_path / name).mkdir()
        tokenizer.save(tmp_path / name / "tokenizer.json")
    config = config_of(distill=DistillConfig(str(tmp_path / "one")))
    check_tokenizers(config, Tokenizer.load(tmp_path / "one"))
    with pytest.raises(ShardlmError, match=r"has another tokenizer than data.tokenizer.* tokens have other numbers"):
        check_tokenizers(config, other)


def test_settings_that_mean_nothing():
    for wrong, message in (
        ({"teacher": "a", "weight": 0.0}, "weight is above 0"),
        ({"teacher": "a", "temperature": 0.0}, "temperature above 0"),
        ({"teacher": "a", "kind": "jsd", "beta": 1.0}, "beta between 0 and 1"),
        ({"teacher": "a", "beta": 0.2}, "it is of jsd"),
        ({"weight": 0.9}, "without distill.teacher"),
        ({"kind": "jsd"}, "without distill.teacher"),
    ):
        with pytest.raises(ShardlmError, match=message):
            DistillConfig(**wrong)
