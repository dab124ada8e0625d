"""Serving plans of prompts with images: their tokens, the encoder's operations and time, and what is refused. By
formulas alone; tests/test_gpu_images.py holds the operations to compiled encoders."""

import dataclasses
import json
import math
import pathlib
import re

import page_checker
import pytest

from shardlm.bench.published_encoders import ENCODERS, sight_named
from shardlm.config import load
from shardlm.data.config import DataConfig
from shardlm.errors import ShardlmError
from shardlm.hardware import GPUS
from shardlm.mesh import MeshSpec
from shardlm.models.pretrained import Pretrained
from shardlm.plan.answer import answer
from shardlm.plan.asked import cluster_of
from shardlm.plan.constraints import Constraints
from shardlm.plan.plan import Plan
from shardlm.plan.report import data as report
from shardlm.plan.report import html as report_html
from shardlm.plan.report import text as report_text
from shardlm.plan.search import search
from shardlm.plan.serving.answer import answer_serving
from shardlm.plan.serving.case import ServedModel, ServingCase
from shardlm.plan.serving.encoder import Image, operations
from shardlm.plan.serving.load import Replica
from shardlm.plan.serving.memory import serving_memory
from shardlm.plan.serving.report.data import to_json
from shardlm.plan.serving.report.html import to_html
from shardlm.plan.serving.report.text import to_text
from shardlm.plan.serving.search import ServingPlan
from shardlm.plan.serving.time import Speed
from shardlm.plan.sketch import Sketch
from shardlm.plan.training_images import RowImages
from shardlm.serve.engine_config import EngineConfig
from shardlm.serve.pool_size import CHUNK_TOKENS
from shardlm.train.config import GrpoConfig, PreferenceConfig, RunConfig, TrainConfig

PARTS = "compute", "contention", "exposed"
CONFIGS = pathlib.Path(__file__).parent.parent.parent / "configs"
TEXT = {  # https://huggingface.co/Qwen/Qwen2.5-VL-7B-Instruct
    "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_hidden_layers": 28,
    "num_key_value_heads": 4, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "vocab_size": 152064,
    "hidden_act": "silu", "tie_word_embeddings": False, "model_type": "qwen2_5_vl_text", "dtype": "bfloat16",
    "rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    folder, files = tmp_path_factory.mktemp("qwen"), ENCODERS["Qwen2.5-VL 7B"]
    config = files["config"] | {"text_config": TEXT, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(files["preprocessor_config"]))
    return folder


@pytest.fixture(scope="module")
def qwen(folder) -> ServedModel:
    return ServedModel.of_folder(folder)


def case_of(model: ServedModel, images: int = 0, size=(448, 896), **engine) -> ServingCase:
    mesh = MeshSpec(**{axis: engine.pop(axis, 1) for axis in ("tensor", "pipeline")})
    asked = {"images_per_prompt": images, "image_size": size}
    config = EngineConfig(mesh=mesh, **({"max_model_len": 16384} | engine))
    return ServingCase(model, cluster_of("h100", None, 8), config, 1000, 100, **asked)


def speed_of(case: ServingCase) -> Speed:
    return Speed.of(case, serving_memory(case))


def flops(image: Image, unit: str | None = None) -> float:
    return sum(op.flops * op.count for op in operations(image, 2, fused=True) if unit in (None, op.unit))


def test_tokens_and_patches_are_those_that_the_model_prepares(qwen):
    images = case_of(qwen, 2).images
    assert images.tokens == 2 * (448 // 28) * (896 // 28)
    assert (images.image.count, images.image.patches, images.image.merged) == (2048, 2048, 4)
    small = case_of(qwen, 1, (280, 280)).images
    assert (small.tokens, small.image.count, small.image.patches) == (100, 400, 1024)
    assert case_of(qwen, 2).mix.prompt == 1000 + images.tokens and case_of(qwen).images is None


def test_operations_by_hand():
    """Of 4 layers, of which 2 have windows of 4 x 4 patches; D = 48, 3 heads of 16, F = 56, vectors of 32."""
    image = Image(sight_named("windows").encoder, 256, 200, 4)
    weights = 2 * 4 * 4 * 3 * 48 + 4 * (4 * 48 * 48 + 3 * 48 * 56)
    products = 2 * (weights * 256 + (192 * 192 + 192 * 32) * 64)
    everywhere, inside = 4 * 3 * 16 * 2 * 256 * 200, 4 * 3 * 16 * 2 * 256 * 48
    assert flops(image, "attention") == everywhere
    assert flops(image) == products + everywhere + inside


def test_layers_with_windows_take_less_than_if_they_saw_all(qwen):
    image = case_of(qwen, 1, (1792, 1792)).images.image
    assert image.patches == 16384 and image.windowed == (28, 64)
    everywhere = dataclasses.replace(image, config=dataclasses.replace(image.config, window=0))
    assert flops(everywhere, "attention") == pytest.approx(8 * flops(image, "attention"))


def test_images_take_their_encoders_time_before_the_first_token(qwen):
    without, speed = speed_of(case_of(qwen)), speed_of(case_of(qwen, 2))
    assert without.images_seconds == 0 and 0.003 < speed.image_seconds < 0.03
    assert speed.images_seconds == 2 * speed.image_seconds
    assert speed.prefill(2024) == pytest.approx(without.prefill(2024) + speed.images_seconds)
    words = dataclasses.replace(without.case, prompt_len=2024)
    replica, of_words = Replica.of(speed.case, speed), Replica.of(words, without)
    assert replica.alone == pytest.approx(of_words.alone + speed.images_seconds)
    assert replica.most().rate < of_words.most().rate


def test_an_encoder_is_whole_on_each_device(qwen):
    one, four = (speed_of(case_of(qwen, 1, tensor=tensor)) for tensor in (1, 4))
    assert one.image_seconds == four.image_seconds
    assert four.prefill(2000) < one.prefill(2000)


def test_more_replicas_are_needed_for_a_rate(qwen):
    rate = {"request_rate": 20.0, "prompt_len": 1500}
    counts = [ServingPlan.of(dataclasses.replace(case_of(qwen, images), **rate)).replicas for images in (0, 1)]
    assert counts[0] < counts[1]


def test_a_step_of_training_on_images(qwen):
    """The encoder whole on each device, vectors split as the batch is, images read in turn by all that share rows."""
    own = case_of(qwen, 1).images
    rows = RowImages(1.5, (448, 896), own.tokens, qwen.seen, own.image)
    config = load(str(CONFIGS / "llama3_8b.py"))
    config = dataclasses.replace(config, mesh=MeshSpec(fsdp=4, context=2))
    train = config.train
    sketch = Sketch.of(config, GPUS["h100"])
    found = rows.added(sketch)
    assert found.encoder_bytes == 2 * qwen.seen.parameters
    assert found.vector_bytes == 2 * 3584 * train.global_batch * train.seq_len // 8
    calls = math.ceil(train.global_batch / 4 * 1.5 / 2)
    assert found.encoder_seconds == calls * speed_of(case_of(qwen, 1)).image_seconds
    assert found.learned_bytes == 0
    # float32 weights and adamw's two moments over eight devices, sums of gradients whole, five times through it.
    learns = dataclasses.replace(config, train=dataclasses.replace(train, encoder="all"))
    all_of_it = rows.added(dataclasses.replace(sketch, config=learns))
    assert all_of_it.learned_bytes == pytest.approx((12 / 8 + 4) * qwen.seen.parameters, rel=0.01)
    assert all_of_it.encoder_seconds == pytest.approx(5 * found.encoder_seconds)
    assert all_of_it.vector_bytes == 2 * found.vector_bytes  # and gradients of them
    # The checkpoint's own encoder beside it, and what that saw.
    pairs = dataclasses.replace(learns, preference=PreferenceConfig(beta=0.1))
    compared = rows.added(dataclasses.replace(sketch, config=pairs))
    assert compared.vector_bytes == 3 * found.vector_bytes and compared.encoder_bytes == 2 * found.encoder_bytes
    assert compared.encoder_seconds == pytest.approx(6 * found.encoder_seconds)


def test_what_a_plan_of_training_says_of_images(folder):
    train = TrainConfig(global_batch=64, seq_len=2048, mtp_loss=0.0, encoder="projector")
    data = DataConfig(chat_template=str(folder))
    config = RunConfig(Pretrained(str(folder)), data=data, precision="bf16", remat="full", train=train)
    images = RowImages.asked("1.5@448x896", config)
    assert images.tokens == 512 and images.image.patches == 2048
    asked = config, cluster_of("h100", None, 8), Constraints.parse(["mesh.fsdp=8"])
    found = answer(*asked, images=images)
    told, plan = report.to_json(found), found.best.plan
    added = images.added(plan.sketch)
    assert added.learned_bytes > 0
    assert told["images"]["encoder_seconds"] == added.encoder_seconds > 0
    assert {"kind": "images", "bytes": added.nbytes} in told["plans"][0]["memory"]["kinds"]
    assert told["plans"][0]["timeline"][0] == {
        "phase": "images",
        "parts": [{"part": part, "seconds": s} for part, s in zip(PARTS, (added.encoder_seconds, 0, 0), strict=True)],
    }
    bare = Plan.of(plan.config, plan.cluster)
    assert plan.step_seconds == pytest.approx(bare.step_seconds + added.encoder_seconds)
    assert plan.memory.total == pytest.approx(bare.memory.total + added.nbytes)
    text = " ".join(report_text.to_text(told).split())
    assert "With 1.5 images of 448 x 896 pixels (height x width) in each row, 512 tokens each: their encoder" in text
    assert re.search(r"GiB a GPU, training it [\d.]+ GiB more and", text)
    assert "All of it is in the figures above" in text
    page = report_html.to_html(told)
    page_checker.check(page)
    assert "their encoder takes" in page
    assert report.to_json(answer(*asked))["images"] is None


def test_every_way_to_run_counts_its_images(folder):
    """Those that fit with them alone are ranked, by steps that begin with reading them; looking for the fastest alone
    finds the same."""
    train = TrainConfig(global_batch=64, seq_len=8192, mtp_loss=0.0)
    config = RunConfig(Pretrained(str(folder)), precision="bf16", remat="full", train=train)
    images, held = RowImages.asked("4@896x896", config), Constraints.parse(["mesh.pipeline=1", "matmul=dtype"])
    cluster = cluster_of("h100", None, 8)
    seen, bare = search(config, cluster, held, images=images), search(config, cluster, held)
    for plan in seen.plans:
        added, without = images.added(plan.sketch), Plan.of(plan.config, cluster)
        assert added.nbytes > 2**30 and plan.memory.kinds["images"] == added.nbytes
        assert plan.memory.total == pytest.approx(without.memory.total + added.nbytes)
        assert plan.step_seconds == pytest.approx(without.step_seconds + plan.cost.image_seconds)
        assert plan.least_seconds <= plan.step_seconds
    ways = [[(plan.config.mesh, plan.config.remat, plan.config.train) for plan in one.plans] for one in (seen, bare)]
    assert ways[0] != ways[1]
    assert search(config, cluster, held, every=False, images=images).plans[0].config == seen.plans[0].config


def test_what_samples_replies_to_images_has_room_for_their_vectors(folder):
    config = RunConfig(
        Pretrained(str(folder)), precision="bf16", mesh=MeshSpec(fsdp=8), grpo=GrpoConfig(reward=("a:b",))
    )
    config = dataclasses.replace(config, train=TrainConfig(global_batch=8, seq_len=4096, mtp_loss=0.0))
    images, cluster = RowImages.asked("1@448x448", config), cluster_of("h100", None, 8)
    seen, bare = (Plan.of(config, cluster, images=own).memory.kinds for own in (images, None))
    assert seen["what samples"] - bare["what samples"] == 2 * 3584 * max(4096, 4 * CHUNK_TOKENS[False])


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ("2", "give N@HEIGHTxWIDTH, such as 2@896x896"),
        ("two@448x448", "give N@HEIGHTxWIDTH, such as 2@896x896"),
        ("0@448x448", "none are asked for"),
        ("5@448x896", "an image is 512 tokens of 2,048 patches, and a row of 2,048 tokens has 5"),
    ],
)
def test_images_of_rows_that_cannot_be_are_refused(folder, asked, error):
    config = RunConfig(Pretrained(str(folder)), train=TrainConfig(seq_len=2048))
    with pytest.raises(ShardlmError, match=error):
        RowImages.asked(asked, config)
    with pytest.raises(ShardlmError, match="the model is no checkpoint that sees"):
        RowImages.asked("1@448x448", load(str(CONFIGS / "llama3_8b.py")))


def test_a_model_whose_images_see_all_of_themselves_reads_them_over_pages(qwen):
    whole = dataclasses.replace(qwen.seen, sight=dataclasses.replace(qwen.seen.sight, whole=True))
    own, usual = speed_of(case_of(dataclasses.replace(qwen, seen=whole), 1)), speed_of(case_of(qwen, 1))
    assert usual.memory.sizes.in_parts and not own.memory.sizes.in_parts
    assert own.chunk(2048, 0) > usual.chunk(2048, 0)


def test_what_is_said(qwen):
    told = to_json(answer_serving(case_of(qwen, 2)))
    assert told["images"]["tokens"] == 1024 and told["requests"]["prompt_tokens"]["mean"] == 2024
    assert told["images"]["encoder_seconds"] == speed_of(case_of(qwen, 2)).image_seconds
    text = to_text(told)
    assert "1,024 of a prompt's tokens stand for 2 images of 448 x 896 pixels (height x width), each read as" in text
    assert "of it, the encoder for each image" in text and "preparing them on the host is not counted" in text
    page = to_html(told)
    page_checker.check(page)
    assert "the encoder for each image" in page
    without = to_json(answer_serving(case_of(qwen)))
    assert without["images"] is None and "image" not in to_text(without).replace("the encoder of images", "")


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({"images": 3, "limit_mm_per_prompt": {"image": 2}}, "more than the 2 of limit_mm_per_prompt"),
        ({"images": 1, "size": (3584, 3584), "max_model_len": 4096}, "an image of 3584 x 3584 pixels makes"),
        ({"images": 12, "size": (1120, 1120)}, "prompt_len=1000, 19200 tokens of images and output_len=100 are 20300"),
        ({"images": 1, "size": (10**6, 10**6)}, "1000000 x 1000000 pixels; at most 67108864 are read"),
    ],
)
def test_images_that_cannot_be_are_refused(qwen, asked, error):
    with pytest.raises(ShardlmError, match=error):
        case_of(qwen, **asked)


def test_the_first_of_stages_has_the_encoder(qwen):
    staged = serving_memory(case_of(qwen, 1, pipeline=2))
    assert [stage.encoder > 0 for stage in staged.stages] == [True, False]
    assert speed_of(case_of(qwen, 1, pipeline=2)).image_seconds == speed_of(case_of(qwen, 1)).image_seconds


def test_other_prompts_are_refused(qwen):
    with pytest.raises(ShardlmError, match="leave shared_prefix out"):
        dataclasses.replace(case_of(qwen, 1), shared_prefix=100)
    blind = dataclasses.replace(qwen, seen=None)
    with pytest.raises(ShardlmError, match="does not see here"):
        case_of(blind, 1)
