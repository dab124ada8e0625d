"""Encoders of images that are trained: gradients are those of one plain function, on every mesh."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
from flax.traverse_util import flatten_dict
from test_trained_images import LENGTH, ROWS
from trained import packed

from shardlm.data.config import DataConfig
from shardlm.errors import ShardlmError
from shardlm.layers.seen import VECTORS
from shardlm.mesh import MeshSpec
from shardlm.models.llama import LlamaConfig
from shardlm.models.naming import Tensor
from shardlm.models.pretrained import Pretrained
from shardlm.optim import ENCODER, OptimConfig
from shardlm.rules import Rules
from shardlm.state import joined
from shardlm.train.config import (
    GrpoConfig,
    LocalSgdConfig,
    PipelineConfig,
    RunConfig,
    SlowLinkConfig,
    TrainConfig,
)
from shardlm.train.learned_encoder import check_encoder, split_as
from shardlm.train.program import Program
from shardlm.train.seeing import sight_of_run
from shardlm.train.shardings import format_shardings
from shardlm.train.task import with_eyes
from shardlm.unread import Unread
from shardlm.vision.parts import trained_paths
from shardlm.vision.trained import in_map, tensors_of

LONG = 512  # tokens of a row, of families whose images have many
RATE = 0.5  # of plain gradient descent: what a step takes away is the gradient times it


def program_of(folder, mesh=None, part="all", **changes) -> Program:
    """Whose step takes RATE times the gradients away."""
    own = {"seq_len": LENGTH} | {n: changes.pop(n) for n in ("accumulation", "seq_len") if n in changes}
    train = TrainConfig(global_batch=len(ROWS), mtp_loss=0.0, encoder=part, **own)
    optim = OptimConfig("sgd", RATE, "constant", warmup_steps=0, weight_decay=0.0, b1=0.0, clip_norm=0.0)
    optim = dataclasses.replace(optim, **changes.pop("optim", {}))
    config = RunConfig(Pretrained(str(folder), mtp=False), mesh=mesh or MeshSpec(), precision="fp32", optim=optim)
    data = DataConfig(chat_template=str(folder), packing="whole")
    config = dataclasses.replace(config, train=train, data=data, **changes)
    program = Program.make(config, config.mesh.build(jax.devices()[: config.mesh.size(*config.mesh.sizes())]))
    return program.that_sees(sight_of_run(config))


def batch_of(program: Program, name: str, state, still):
    batch, images = packed(program.seeing.sight, references.asks(name), ROWS, program.config.train.seq_len)
    batch["images"] = program.seeing.readers(program.slots)(images)
    rows = tuple(range(len(ROWS)))
    arrays = program.on_devices(batch, rows, program.eyes(state.params, still))
    return arrays | program.shown(batch, still), images


def started(program: Program, folder):
    return program.init(program.pretrained(), program.frozen(), program.encoder()), program.seeing.load(str(folder))


def stepped(program: Program, name: str, folder):
    """({path: what a step took away}, its metrics)."""
    with jax.set_mesh(program.mesh):
        state, still = started(program, folder)
        before = flatten_dict(jax.tree.map(np.asarray, state.params))
        batch, _ = batch_of(program, name, state, still)
        state, metrics = program.compile_step({})(1, state, batch)
    after = flatten_dict(jax.tree.map(np.asarray, state.params))
    return {path: before[path] - after[path] for path in before}, {n: np.asarray(a) for n, a in metrics.items()}


def plainly(program: Program, name: str, folder):
    """Loss and gradients of the language model and of the encoder, of one function."""
    with jax.set_mesh(program.mesh), program.tracing():
        state, still = started(program, folder)
        batch, images = batch_of(program, name, state, still)
        arrays = {n: a for n, a in batch.items() if n not in ("shown", VECTORS)}
        weights = arrays["loss_mask"] / arrays["loss_mask"].sum()
        encoder, pictures = program.seeing.encoder, [image.picture() for image in images]
        size = next(s for s in program.seeing.sight.sizes if s >= max(one.patches for one in pictures))
        shown = [padded(one, size) for one in pictures]
        shown = jax.tree.map(lambda *a: np.stack(a), *shown), np.array([one.patches for one in pictures], np.int32)

        def loss(params):
            text, eyes = ({n: a for n, a in params.items() if n != ENCODER}), joined(params[ENCODER], still)
            made = jax.lax.map(lambda one: encoder(eyes, *one), shown)
            vectors = jnp.zeros(batch[VECTORS].shape, batch[VECTORS].dtype)
            for image, own in zip(images, made, strict=True):
                vectors = vectors.at[image.row, image.takes].set(own[: len(image.takes)])
            rows = arrays | {VECTORS: vectors}
            return program.objective.sums(program.model.bound(state.frozen), text, rows, weights)[0]

        found = jax.jit(jax.value_and_grad(loss))(state.params)
    return float(found[0]), flatten_dict(jax.tree.map(np.asarray, found[1]))


def padded(picture, size: int) -> dict[str, np.ndarray]:
    rest = size - picture.patches
    return {name: np.pad(a, [(0, rest)] + [(0, 0)] * (a.ndim - 1)) for name, a in picture.inputs.items()}


def apart(found, expected) -> float:
    """The largest difference, of each weight's largest gradient in its part of the model."""
    assert found.keys() == expected.keys()
    most = {own: max(np.abs(a).max() for p, a in expected.items() if (p[0] == ENCODER) == own) for own in (True, False)}
    return max(np.abs(found[p] - a).max() / most[p[0] == ENCODER] for p, a in expected.items())


NAME = "qwen2_5_vl"
WIDE = pytest.mark.wide
UNTRAINED = ("ovis2", "paligemma-first", "paligemma-second")  # images in training are refused (Sight.untrained)
GPIPE = {"accumulation": 2, "pipeline": PipelineConfig("gpipe", 1)}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = references.folder(NAME, tmp_path_factory.mktemp("plain"))
    loss, gradients = plainly(program_of(folder), NAME, folder)
    return folder, loss, gradients


@pytest.mark.parametrize(
    "mesh, changes",
    [
        pytest.param(MeshSpec(), {}, marks=WIDE),
        (MeshSpec(fsdp=2, tensor=2), {"accumulation": 2}),
        pytest.param(MeshSpec(data=2, fsdp=2), {"rules": "hybrid"}, marks=WIDE),
        pytest.param(MeshSpec(data=2, tensor=2), {"rules": "zero1", "accumulation": 2}, marks=WIDE),
        pytest.param(MeshSpec(fsdp=2, context=2), {"context_attention": "ring"}, marks=WIDE),
        pytest.param(MeshSpec(pipeline=2, tensor=2), GPIPE, marks=WIDE),
    ],
    ids=str,
)
def test_gradients_are_those_of_one_function(mesh, changes, plain):
    folder, loss, gradients = plain
    took, metrics = stepped(program_of(folder, mesh, **changes), NAME, folder)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-6)
    assert apart({path: a / RATE for path, a in took.items()}, gradients) < 1e-4
    norm = np.sqrt(sum(np.square(a).sum() for a in gradients.values()))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)


@pytest.mark.wide
@pytest.mark.parametrize(("part", "axis"), [("all", "tensor"), ("projector", "fsdp")])
def test_stages_give_gradients_of_what_their_first_layers_are_given(part, axis, tmp_path):
    """Of DeepStack's vectors, which go by the stream: in layers of both stages."""
    name = "qwen3_vl"
    folder = references.folder(name, tmp_path)
    loss, gradients = plainly(program_of(folder, part=part), name, folder)
    mesh = MeshSpec(pipeline=2, **{axis: 2})
    took, metrics = stepped(program_of(folder, mesh, part, **GPIPE), name, folder)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-6)
    assert apart({path: a / RATE for path, a in took.items()}, gradients) < 1e-4


def test_a_projector_learns_at_its_own_rate(plain):
    """Clipped by one norm, of what is trained alone; beside that nothing is in the state."""
    folder, _, gradients = plain
    found = program_of(folder, MeshSpec(fsdp=2), "projector", optim={"encoder_rate": 0.25, "clip_norm": 0.1})
    took, metrics = stepped(found, NAME, folder)
    expected = {p: a for p, a in gradients.items() if p[0] != ENCODER or p[1] == "merger"}
    norm = np.sqrt(sum(np.square(a).sum() for a in expected.values()))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    rate = {True: 0.25 * RATE, False: RATE}
    assert apart({p: a / rate[p[0] == ENCODER] * norm / 0.1 for p, a in took.items()}, expected) < 1e-4


def test_what_is_trained_of_it_is_among_the_parameters_that_are_printed(tmp_path):
    program = program_of(references.folder(NAME, tmp_path), MeshSpec(fsdp=2), "projector")
    *lines, last = format_shardings(program).splitlines()
    found = {line.split()[0] for line in lines if line.startswith("encoder.")}
    assert found == {".".join(["encoder", *path]) for path in program.seeing.learned.paths}
    count = sum(np.prod(s.shape) for s in jax.tree.leaves(program.state_shapes().params))
    assert last.startswith(f"{count:,} parameters")


def test_rows_without_images_leave_the_encoder_as_it_is(plain):
    """No image was read, so that the step goes on without one."""
    folder, *_ = plain
    program = program_of(folder)
    with jax.set_mesh(program.mesh):
        state, still = started(program, folder)
        batch, _ = packed(program.seeing.sight, [([3, 4, 5], [])], [[0]] * len(ROWS), LENGTH)
        before = jax.tree.map(np.asarray, state.params[ENCODER])
        arrays = program.on_devices(batch, tuple(range(len(ROWS))), program.eyes(state.params, still))
        state, metrics = program.compile_step({})(1, state, arrays | program.shown(batch, still))
    assert metrics["finite"] and metrics["grad_norm"] > 0
    jax.tree.map(np.testing.assert_array_equal, state.params[ENCODER], before)


# Encoders of others before another language model, which learns in tests of text.
ALIKE = ("cohere2_vision", "gemma4-ahead", "glm46v", "glm4v_moe", "glm5_next", "idefics3", "lighton_ocr")
ALIKE += ("llava-pixtral", "qwen3_5_moe", "qwen3_vl_moe", "qwen4_exp")


@pytest.mark.wide
@pytest.mark.parametrize("name", [name for name in references.NAMES if name not in (*UNTRAINED, *ALIKE)])
def test_every_family_learns(name, tmp_path):
    """Biases that even the load of experts follow that, and no gradient."""
    folder = references.folder(name, tmp_path)
    _, gradients = plainly(program_of(folder, seq_len=LONG), name, folder)
    took, _ = stepped(program_of(folder, MeshSpec(fsdp=2, tensor=2), seq_len=LONG), name, folder)
    took, gradients = ({p: a for p, a in one.items() if p[-1] != "router_bias"} for one in (took, gradients))
    assert apart({path: a / RATE for path, a in took.items()}, gradients) < 1e-4
    assert all(np.abs(a).max() > 0 for path, a in gradients.items() if path[0] == ENCODER)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model": LlamaConfig()}, "the model is no checkpoint that sees; set model to Pretrained"),
        ({"data": DataConfig()}, "without data.chat_template: texts have no images; set data.chat_template"),
        ({"grpo": GrpoConfig(reward=("a.py:b",))}, "replies are sampled with the encoder as it was; leave grpo.reward"),
        (
            {"pipeline": PipelineConfig("1f1b"), "mesh": MeshSpec(pipeline=2)},
            "its backward pass gives no gradients of images; set pipeline.schedule to circular or gpipe",
        ),
        ({"slow_link": SlowLinkConfig("int8")}, "an encoder's gradients are summed every step; leave those"),
        ({"local_sgd": LocalSgdConfig(2)}, "an encoder's gradients are summed every step; leave those"),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else "",
)
def test_what_does_not_go_with_it_is_refused(changes, message):
    seeing = Pretrained(str(references.HOME / NAME))
    config = RunConfig(seeing, data=DataConfig(chat_template="there"), train=TrainConfig(encoder="projector"))
    check_encoder(config)
    with pytest.raises(ShardlmError, match=rf"train.encoder=projector.*{message}.*or train.encoder to frozen"):
        check_encoder(dataclasses.replace(config, **changes))


def test_a_rate_of_an_encoder_that_is_frozen_is_refused():
    config = RunConfig(LlamaConfig(), optim=OptimConfig(encoder_rate=0.1))
    with pytest.raises(ShardlmError, match=r"optim\.encoder_rate=0\.1 with train\.encoder=frozen: no encoder"):
        check_encoder(config)
    check_encoder(dataclasses.replace(config, optim=OptimConfig()))


def test_data_without_images_are_refused():
    text = types.SimpleNamespace(image_token=None)
    train = TrainConfig(encoder="all")
    program = types.SimpleNamespace(config=types.SimpleNamespace(train=train))
    with pytest.raises(ShardlmError, match=r"train\.encoder=all: the training data have no images to train it on; set"):
        with_eyes(program, types.SimpleNamespace(train=text, validation=text), None)


def test_numbers_of_a_checkpoint_that_are_no_weights_stay():
    """Buffers of transformers: Gemma 4's limits of products, and what its averages are standardised by."""
    layer = "vision_tower.encoder.layers.{layer}.self_attn.q_proj"
    names = {
        "wq": f"{layer}.linear.weight",
        "wq_input_min": f"{layer}.input_min",
        "wq_output_max": f"{layer}.output_max",
    }
    names |= {"standard_scale": "vision_tower.std_scale", "out.kernel": "embed_vision.embedding_projection.weight"}
    named = {path: Tensor(name) for path, name in names.items()}
    paths = [tuple(path.split(".")) for path in names]
    assert trained_paths(paths, named, "all") == {("wq",), ("out", "kernel")}
    assert trained_paths(paths, named, "projector") == {("out", "kernel")}
    assert trained_paths(paths, named, "frozen") == frozenset()


def test_weights_are_split_where_they_divide():
    table = Rules.make("zero3", MeshSpec(fsdp=4, tensor=2)).optimizer
    assert split_as((27, 1152, 16, 72), table) == ("norm", "embed", "norm", "mlp")
    assert split_as((27, 1152), table) == ("norm", "embed")
    assert split_as((3, 5), table) == ("norm", "norm")
    assert split_as((1152, 3420), Rules.make("replicated", MeshSpec(data=8)).optimizer) == ("norm", "norm")


@pytest.mark.wide
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_gradients_are_those_of_transformers(name, tmp_path):
    """loss.backward() of the same prompts."""
    torch = pytest.importorskip("torch", reason="a wide test of what transformers computes")
    transformers = pytest.importorskip("transformers", reason="a wide test of what transformers computes")
    from qwen_checkpoints import inputs

    folder = references.folder(name, tmp_path)
    program = program_of(folder)
    took, metrics = stepped(program, name, folder)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    losses, asks = [], references.asks(name)
    for number in (number for row in ROWS for number in row):
        ids, images = asks[number]
        told, _ = program.seeing.sight.expanded(ids, [program.seeing.sight.prepare(image) for image in images])
        logits = model(input_ids=torch.tensor([told]), **inputs(images, told)).logits[0, :-1].float()
        losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(told[1:]), reduction="none"))
    loss = torch.cat(losses).mean()
    loss.backward()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    theirs = {in_map(program.seeing.encoder, n): p.grad.numpy() for n, p in model.named_parameters() if "visual." in n}
    ours = {path[1:]: a / RATE for path, a in took.items() if path[0] == ENCODER}
    unread = {path: Unread(a.shape, a.dtype, a.__getitem__) for path, a in ours.items()}
    made = {n: make(np.dtype(np.float32)) for n, make in tensors_of(program.seeing.encoder, unread).items()}
    assert made.keys() == theirs.keys()
    most = max(np.abs(a).max() for a in theirs.values())
    assert max(np.abs(made[n] - a).max() for n, a in theirs.items()) < 1e-4 * most
    norm = np.sqrt(sum(p.grad.square().sum().item() for p in model.parameters()))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
