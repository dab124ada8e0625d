"""The weights of a model that sees, replaced while it is served: those of its encoder too."""

import asyncio
import json
import pathlib
import shutil
import sys
import types

import jax
import pytest
import references
import test_served_images as served_images
from rolled import rolled
from served import SIZES, asked, replies

from shardlm import LLM, SamplingParams
from shardlm.errors import ShardlmError
from shardlm.mesh import MeshSpec
from shardlm.opened import load
from shardlm.optim import ENCODER
from shardlm.serve import live_encoder
from shardlm.serve.async_llm import AsyncLLM
from shardlm.train.convert import to_run
from shardlm.vision.registry import sight_of

sys.path.append(str(pathlib.Path(__file__).parents[1] / "serve" / "api"))
from client import Client

ASKS = served_images.ASKS
VISION, TEXT = "vision_tower", "language_model"
KEY = {"authorization": "Bearer admin"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A small Mistral 3; one with another encoder; one with another text too."""
    home = tmp_path_factory.mktemp("live")
    first = references.folder("mistral3", home)
    eyes = rolled(first, home / "eyes", VISION)
    return {"first": first, "eyes": eyes, "both": rolled(eyes, home / "both", TEXT)}


@pytest.fixture(scope="module")
def llm(folders):
    return LLM(folders["first"], **SIZES)


@pytest.fixture(scope="module")
def expected(llm, folders):
    """What engines that were opened with each folder reply."""
    found = {name: replies(asked(LLM(folders[name], **SIZES), ASKS)) for name in ("eyes", "both")}
    found["first"] = replies(asked(llm, ASKS))
    assert found["first"][:3] != found["eyes"][:3] and found["first"][3] == found["eyes"][3] != found["both"][3]
    return found


def test_replies_are_those_of_an_engine_that_is_opened_with_the_new_folder(llm, folders, expected):
    programs = dict(llm.engine.runner._programs)
    for name in ("eyes", "both", "first"):
        llm.update_weights(folders[name])
        outputs = asked(llm, ASKS)
        assert replies(outputs) == expected[name]
        assert outputs[0].num_cached_tokens == 0
        llm.engine.scheduler._holdings.encoder_cache.check_invariants()
    assert llm.engine.runner._programs == programs


def test_a_prompt_that_is_half_read_begins_anew(llm, folders, expected):
    """In batches of 48 tokens that of the second ask takes several."""
    ids, images = ASKS[1]
    sight = llm.engine.sight
    ids, placed = sight.expanded(ids, [sight.prepare(image) for image in images])
    llm.reset_prefix_cache()
    llm.engine.add("long", ids, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), pictures=placed)
    llm.engine._start(llm.engine.scheduler.schedule())
    assert 0 < llm.engine.scheduler._running[0].computed < len(ids)
    llm.update_weights(folders["both"])
    done = {}
    while llm.engine.has_unfinished:
        done |= {output.request_id: output for output in llm.engine.step() if output.finished}
    assert replies([done["long"]]) == expected["both"][1:2]
    llm.update_weights(folders["first"])
    assert replies(asked(llm, ASKS)) == expected["first"]


def test_over_http(llm, folders, expected):
    served = AsyncLLM(llm.engine, model_name="tiny", template=None)
    client = Client(served, admin_keys=("admin",))

    async def both():
        body = json.dumps({"path": str(folders["both"])})
        answer = await client.send("POST", "/update_weights", body, KEY)
        assert answer.json()["success"], answer.text
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        prompts = [{"prompt_token_ids": ids, "multi_modal_data": {"image": images}} for ids, images in ASKS]
        asks = [served.generate(one, params, str(number)) for number, one in enumerate(prompts)]
        return [[output async for output in one][-1] for one in asks]

    found = replies(asyncio.run(both()))
    served.shutdown()
    llm.engine.pace = None
    assert found == expected["both"]
    llm.update_weights(folders["first"])


@pytest.mark.parametrize("mesh", [pytest.param(MeshSpec(tensor=2), marks=pytest.mark.wide), MeshSpec(data=2)], ids=str)
def test_meshes(folders, expected, mesh):
    llm = LLM(folders["first"], mesh=mesh, **SIZES)
    llm.update_weights(folders["both"])
    assert replies(asked(llm, ASKS)) == expected["both"]


def test_the_old_encoder_stays_where_there_is_no_new_one(llm, folders, expected, tmp_path, caplog):
    """With arrays, and with a run whose encoder has gone."""
    llm.update_weights(folders["eyes"])
    llm.update_weights(load(folders["first"], dtype="float32", rules="replicated").params)
    assert replies(asked(llm, ASKS)) == expected["eyes"]
    text = rolled(folders["first"], tmp_path / "text", TEXT)
    to_run(text, tmp_path / "run")
    shutil.rmtree(text)
    llm.update_weights(tmp_path / "run")
    assert "read by the encoder that was there before, as that of" in caplog.text
    assert replies(asked(llm, ASKS)) == expected["both"]
    llm.update_weights(folders["first"])


def test_arrays_of_a_run_that_trains_its_encoder_bring_what_it_trains(llm, folders, expected):
    """As TrainState.params has it, in float32: copies, as the run donates its own."""
    eyes = LLM(folders["eyes"], **SIZES).engine.runner.image_encoder.params
    text = load(folders["first"], dtype="float32", rules="replicated").params
    trained = jax.tree.map(lambda a: a.astype("float32", copy=True), eyes)
    some = {name: part for name, part in trained.items() if name != "tower"}
    llm.update_weights(text | {ENCODER: some})
    assert replies(asked(llm, ASKS)) != expected["first"]
    llm.update_weights(text | {ENCODER: trained})
    jax.tree.map(lambda a: a.delete(), trained)
    assert replies(asked(llm, ASKS)) == expected["eyes"]
    wrong = {"tower": {"block": {"wq": text["embedding"]}}}
    with pytest.raises(ShardlmError, match=r"of another encoder of images.*: tower\.block\.wq is another"):
        llm.update_weights(text | {ENCODER: wrong})
    llm.update_weights(folders["first"])


def test_another_encoder_is_refused(llm, folders, expected, tmp_path):
    other = shutil.copytree(folders["both"], tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    config["vision_config"]["num_attention_heads"] //= 2
    config["vision_config"].pop("head_dim", None)
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(ShardlmError, match=r"has another encoder of images than what is served: .*heads=1"):
        llm.update_weights(other)
    assert replies(asked(llm, ASKS)) == expected["first"]


def test_a_folder_of_weights_alone_fits_a_model_that_reads_videos(tmp_path):
    """Whether GLM's encoder is given frames shows in its tokenizer, which trainers do not write."""
    home = references.folder("glm4v-video", tmp_path)
    source = types.SimpleNamespace(options=json.loads((home / "config.json").read_text()))
    served = types.SimpleNamespace(encoder=types.SimpleNamespace(config=sight_of(home, source.options).encoder))
    for file in home.glob("*token*"):
        file.unlink()
    assert not sight_of(home, source.options).videos
    live_encoder._check(served, home, source)
