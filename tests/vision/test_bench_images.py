"""`launch.bench serve` with images: random ones, offline and over HTTP, and what is refused. Nothing here is timed."""

import base64
import dataclasses
import io
import json

import pytest
import test_served_images as served_images
from commands import run
from PIL import Image
from test_asked_images import TEMPLATE

from shardlm.errors import ShardlmError
from shardlm.serve.bench import image_work
from shardlm.serve.bench.checkpoint import BESIDE, checkpoint_engine
from shardlm.serve.bench.seen import Seen, summary
from shardlm.serve.bench.workload import Job
from shardlm.serve.engine_config import EngineConfig

family = served_images.family
SIZE = (16, 24)  # 2 x 3 squares of 8 pixels: 6 vectors, and a token at the end of each row
TOKENS = 2 * (3 + 1)
FLAGS = ("--requests=3", "--prompt_len=9", "--output_len=4", "--max_num_seqs=2", "--block_size=4", "--quiet")


def measured(folder, tmp_path, *words):
    file = tmp_path / "bench.json"
    done = run("launch.bench", "serve", f"--model={folder}", *FLAGS, f"--output={file}", *words)
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text())


@pytest.mark.wide
def test_a_checkpoint_that_sees_is_measured(family, tmp_path):
    (family.folder / "chat_template.jinja").write_text(TEMPLATE)
    asked = ("--concurrency=2", "--images_per_prompt=2", "--image_size=16x24")
    found = measured(family.folder, tmp_path, *asked)
    [offline], [online] = found["offline"], found["online"]
    assert offline["images_per_prompt"] == 2 and offline["image_size"] == list(SIZE)
    assert offline["image_tokens"] == 2 * TOKENS and offline["prepare_seconds"] > 0
    assert offline["images_per_second"] * offline["prefill_seconds"] == pytest.approx(2)
    assert (online["requests"], online["failed"], online["output_tokens"]) == (3, 0, 12), online
    assert online["images"] == 6 and online["images_per_second"] * online["seconds"] == pytest.approx(6)
    assert found["workload"]["images_per_prompt"] == 2 and found["workload"]["image_size"] == list(SIZE)


@pytest.mark.wide
def test_texts_of_a_checkpoint_and_images_of_a_file(family, tmp_path):
    (family.folder / "chat_template.jinja").write_text(TEMPLATE)
    parts = [{"type": "image_url", "image_url": {"url": image_work.data_url(image_work.noise(SIZE, 1))}}]
    entries = [{"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "t20"}]}]}, {"prompt": "t7"}]
    file = tmp_path / "asks.jsonl"
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    found = measured(family.folder, tmp_path, "--concurrency=1", f"--file={file}", "--requests=4")
    [offline], [online] = found["offline"], found["online"]
    assert "images_per_second" not in offline and (online["failed"], online["images"]) == (0, 2), online


def test_there_is_room_for_the_images(family):
    (family.folder / "chat_template.jinja").write_text(TEMPLATE)
    sizes = EngineConfig(max_num_seqs=1, max_num_batched_tokens=48, block_size=4)
    engine, template = checkpoint_engine(str(family.folder), sizes, needed=20, images=3, size=SIZE)
    assert engine.max_model_len == 20 + 3 * TOKENS + BESIDE and template.source == TEMPLATE
    with pytest.raises(ShardlmError, match=r"images_per_prompt=1: .* does not see here; leave images out"):
        none = dataclasses.replace(sizes, limit_mm_per_prompt={"image": 0})
        checkpoint_engine(str(family.folder), none, needed=20, images=1, size=SIZE)


def test_each_prompt_has_its_own_images():
    jobs = image_work.image_jobs(3, 10, 5, 4, seed=1, ratio=0.0, images=2, size=SIZE)
    contents = [job.body["messages"][0]["content"] for job in jobs]
    urls = [part["image_url"]["url"] for content in contents for part in content[:2]]
    assert len(set(urls)) == 6 and all(job.images == 2 and job.path == "/v1/chat/completions" for job in jobs)
    opened = Image.open(io.BytesIO(base64.b64decode(urls[0].split(",")[1])))
    assert opened.format == "JPEG" and opened.size == SIZE[::-1]
    texts = [content[2]["text"].split() for content in contents]
    assert all(len(text) == 10 for text in texts) and len({tuple(text[:4]) for text in texts}) == 1
    assert len({tuple(text) for text in texts}) == 3 and jobs[0].body["max_tokens"] == 5 and jobs[0].body["ignore_eos"]
    again = image_work.image_jobs(3, 10, 5, 4, seed=1, ratio=0.0, images=2, size=SIZE)
    assert again == jobs != image_work.image_jobs(3, 10, 5, 4, seed=2, ratio=0.0, images=2, size=SIZE)
    assert Job({"prompt": "a"}).images == Job({"messages": [{"role": "user", "content": "a"}]}).images == 0


def test_images_of_requests_that_failed_do_not_count():
    seen = [Seen(first=0.1, whole=0.2, tokens=2, images=3), Seen(error="x", images=3)]
    report = summary(seen, 2.0, {})
    assert report["images"] == 3 and report["images_per_second"] == 1.5
    assert "images" not in summary([Seen(first=0.1, whole=0.2, tokens=2)], 2.0, {})


@pytest.mark.parametrize("text", ["448", "448x", "0x448", "4.5x9", "-4x9", ""])
def test_sizes_that_are_none(text):
    assert image_work.size_of("448x896") == (448, 896)
    with pytest.raises(ShardlmError, match=f"image_size={text}: give HEIGHTxWIDTH in pixels"):
        image_work.size_of(text)


def test_what_is_refused(family, tmp_path):
    asked = ("launch.bench", "serve", "--images_per_prompt=1")
    for words, message in (
        (("--config=configs/bench_768x12.py",), "a configuration's model reads text alone; give --model"),
        ((f"--model={family.folder}", "--turns=2"), "is of random prompts: leave --turns and --file out"),
        ((f"--model={family.folder}", "--image_size=big"), "image_size=big: give HEIGHTxWIDTH in pixels"),
        (("--url=http://a", "--rates=1", "--file=x"), "is of random prompts: give --file's messages images"),
    ):
        done = run(*asked, *words)
        assert done.returncode == 1 and message in done.stderr, done.stderr
