"""Images in prompts, as an engine reads them, against transformers, and beside all else that engines do."""

import json
import pathlib
import shutil
import subprocess
import sys

import pytest
import references
import tiny_run
from ports import free_port
from rolled import rolled
from seeing import noise
from served import SIZES, Checkpoint, asked, held_to_references, replies

from shardlm import LLM
from shardlm.errors import ShardlmError
from shardlm.mesh import MeshSpec
from shardlm.train.convert import to_run

NAME, IMG = "mistral3", 10
FIRST, SECOND, THIRD = noise(40, 64), noise(24, 24, 1), noise(90, 50, 2)
ASKS = [
    ([1, 20, IMG, 21, 22], [FIRST]),
    ([1, IMG, 23, IMG, 5], [SECOND, THIRD]),
    ([1, 20, IMG, 21, 33], [FIRST]),
    ([7, 8, 9], []),
]


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """A small Mistral 3 that transformers wrote."""
    return Checkpoint(references.folder(NAME, tmp_path_factory.mktemp(NAME)))


@pytest.fixture(scope="module")
def llm(family):
    return LLM(family.folder, **SIZES)


@pytest.fixture(scope="module")
def expected(llm):
    return replies(asked(llm, ASKS))


def test_replies_are_those_of_transformers(llm):
    held_to_references(NAME, llm)


def test_an_equal_beginning_is_found_and_another_image_is_not(llm, expected):
    again = asked(llm, ASKS[:1])
    assert again[0].num_cached_tokens > 20
    assert replies(again) == expected[:1]
    other = asked(llm, [(ASKS[0][0], [noise(40, 64, 9)])])
    assert other[0].num_cached_tokens <= 2 // SIZES["block_size"] * SIZES["block_size"]
    assert replies(other) != expected[:1]


@pytest.mark.wide
def test_who_is_preempted_reads_its_images_again(family, expected):
    tight = LLM(family.folder, **SIZES | {"enable_prefix_caching": False}, kv_cache_bytes=70 * 2048)
    assert replies(asked(tight, ASKS)) == expected
    more = asked(tight, ASKS * 3, count=24)
    assert tight.engine.scheduler.preemptions > 0
    assert [reply[:6] for reply in replies(more)] == expected * 3


def test_a_small_encoder_cache_lets_prompts_wait(llm, expected, monkeypatch):
    cache = llm.engine.scheduler._holdings.encoder_cache
    llm.engine.reset_prefix_cache()
    most = max(llm.engine.sight.prepare(image).vectors for image in (FIRST, SECOND, THIRD))
    monkeypatch.setattr(cache, "_free", cache._free[-most - 12 :])
    assert replies(asked(llm, ASKS)) == expected
    assert len(cache._free) + sum(map(len, cache._places.values())) == most + 12
    llm.engine.reset_prefix_cache()


@pytest.mark.parametrize("mesh", [pytest.param(MeshSpec(tensor=2), marks=pytest.mark.wide), MeshSpec(data=2)], ids=str)
def test_meshes(family, expected, mesh):
    assert replies(asked(LLM(family.folder, mesh=mesh, **SIZES), ASKS)) == expected


@pytest.mark.wide
def test_drafts_of_ngrams(family, expected):
    drafting = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    assert replies(asked(LLM(family.folder, speculative_config=drafting, **SIZES), ASKS)) == expected


def test_several_replies_share_an_image(llm, expected):
    [output] = asked(llm, ASKS[:1], n=3, temperature=0)
    assert [list(one.token_ids) for one in output.outputs] == expected[:1] * 3


def test_what_cannot_be_is_refused(family, llm):
    with pytest.raises(ShardlmError, match="truncate_prompt_tokens=4 would cut into images"):
        asked(llm, ASKS[:1], truncate_prompt_tokens=4)
    with pytest.raises(ShardlmError, match="places for 1 images and comes with 2"):
        asked(llm, [([1, IMG], [FIRST, SECOND])])
    with pytest.raises(ShardlmError, match=r"Shorten it by [0-9]*, send fewer or smaller images, or raise"):
        asked(llm, [([1, IMG, *[9] * 300], [FIRST])])
    with pytest.raises(ShardlmError, match="this model reads images and no videos; leave those out"):
        LLM(family.folder, limit_mm_per_prompt={"video": 1}, **SIZES)
    with pytest.raises(ShardlmError, match="images and videos are read"):
        LLM(family.folder, limit_mm_per_prompt={"audio": 1}, **SIZES)


def test_text_alone(family, expected):
    blind = LLM(family.folder, limit_mm_per_prompt={"image": 0}, **SIZES)
    assert blind.engine.sight is None
    [output] = blind.generate([{"prompt_token_ids": ASKS[3][0]}], None)[:1]
    assert len(output.prompt_token_ids) == 3


@pytest.mark.wide
def test_a_run_sees_by_the_encoder_that_it_began_with(family, expected, tmp_path, caplog):
    """Which is in its checkpoint's folder, as long as that is there."""
    folder, run = shutil.copytree(family.folder, tmp_path / "folder"), tmp_path / "run"
    to_run(folder, run)
    assert replies(asked(LLM(run, **SIZES), ASKS)) == expected
    shutil.rmtree(folder)
    assert LLM(run, **SIZES).engine.sight is None
    assert f"its encoder is in {folder}, which has no weights now" in caplog.text
    with pytest.raises(ShardlmError, match=f"its encoder is in {folder}, which has no weights now; leave it out"):
        LLM(run, limit_mm_per_prompt={"image": 1}, **SIZES)


def test_nothing_is_left_behind(llm):
    assert llm.engine.stats().num_running == 0
    cache = llm.engine.scheduler._holdings.encoder_cache
    assert not cache._held
    cache.check_invariants()


def test_the_deterministic_mode(family, llm):
    """Its bits do not depend on what else is there, nor on what was found of a prompt."""
    own = LLM(family.folder, deterministic=True, **SIZES)
    held_to_references(NAME, own)
    together = asked(own, ASKS, scored=True)
    alone = [asked(own, [ask], scored=True)[0] for ask in ASKS]
    again = asked(own, ASKS)
    assert again[0].num_cached_tokens > 20
    assert replies(together) == replies(alone) == replies(again)
    for one, other in zip(together, alone, strict=True):
        assert one.prompt_logprobs[1:] == other.prompt_logprobs[1:]


@pytest.mark.wide
def test_two_processes(family, expected, tmp_path):
    """Encoder and buffer are in both, and read the same images, after new weights too; of stages in one's."""
    other = rolled(family.folder, tmp_path / "other", "vision_tower", "language_model")
    after = replies(asked(LLM(other, **SIZES), ASKS[:2]))
    worker, port = pathlib.Path(__file__).parent / "one_of_two_seeing.py", free_port()
    folders = [str(family.folder), str(other)]
    words = [[str(port), str(process), str(tmp_path / str(process)), *folders] for process in range(2)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": tiny_run.environment()}
    started = [subprocess.Popen([sys.executable, str(worker), *own], **pipes) for own in words]
    outputs = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0, 0], outputs
    said, followed = (json.loads((tmp_path / str(process)).read_text()) for process in range(2))
    refused = "pipeline stages in several processes take no new weights"
    assert said[0] == [expected[:2], after]
    assert said[1][0] == expected[:2] and said[1][1].startswith(refused)
    assert followed == ["followed"] * 2
