"""Weights that change while a model is served, from Python and over HTTP."""

import asyncio
import dataclasses
import json
import pathlib
import sys

import jax
import pytest
from engines import CONFIG, decoding_from, folder_of
from lazy_programs import all_compiled

import shardlm
from shardlm.errors import ShardlmError
from shardlm.opened import load
from shardlm.serve.async_llm import AsyncLLM
from shardlm.serve.sampling_params import SamplingParams
from shardlm.train.convert import to_run

sys.path.append(str(pathlib.Path(__file__).parent / "api"))
from client import Client, error

SIZES = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "block_size": 4}
PROMPT = '{"name": "ab", "age": 12'
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
KEY, USER = {"authorization": "Bearer admin"}, {"authorization": "Bearer user"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two models of one shape, and others that are not."""
    home = tmp_path_factory.mktemp("weights")
    others = {"wider": {"mlp_dim": 96}, "rotated": {"rope_theta": 5e5}, "shallower": {"num_layers": 2}}
    made = {name: folder_of(home / name, seed) for seed, name in enumerate(("first", "second"))}
    return made | {name: folder_of(home / name, 0, dataclasses.replace(CONFIG, **o)) for name, o in others.items()}


@pytest.fixture(scope="module", autouse=True)
def one_decode_program():
    with decoding_from(SIZES["max_num_seqs"]):
        yield


@pytest.fixture(scope="module")
def llm(folders):
    with all_compiled():
        return shardlm.LLM(folders["first"], **SIZES)


def reply(llm) -> list[int]:
    return llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids


@pytest.fixture(scope="module")
def expected(llm, folders):
    """{folder: what an engine that was started on it replies}."""
    return {"first": reply(llm), "second": reply(shardlm.LLM(folders["second"], **SIZES))}


def test_from_a_path_and_from_what_training_has(llm, folders, expected, tmp_path):
    assert expected["first"] != expected["second"]
    programs = dict(llm.engine.runner._programs)
    assert llm.generate(PROMPT, GREEDY)[0].num_cached_tokens > 0
    llm.update_weights(folders["second"])
    first = llm.generate(PROMPT, GREEDY)[0]
    assert first.outputs[0].token_ids == expected["second"] and first.num_cached_tokens == 0
    llm.update_weights(folders["first"])
    assert reply(llm) == expected["first"] and llm.engine.stats().kv_usage == 0
    trained = load(folders["second"], dtype="float32", rules="replicated")
    llm.update_weights(trained.params)  # stacked
    jax.tree.map(lambda a: a.delete(), trained.params)  # as a step that donates them does
    assert reply(llm) == expected["second"]
    llm.update_weights(llm.engine.runner.params)  # as an engine has them
    assert reply(llm) == expected["second"]
    to_run(folders["first"], tmp_path / "run")
    llm.update_weights(tmp_path / "run")
    assert reply(llm) == expected["first"]
    assert llm.engine.runner._programs == programs


def test_what_does_not_fit_is_refused_with_both_shapes(llm, folders, expected):
    old = llm.engine.runner.params
    for path, message in (
        (folders["wider"], r"another architecture than what is served: segments.0.pattern.0.mlp.mlp_dim is 96, served"),
        (folders["rotated"], r"theta is 500000.0, served is 10000.0"),
        (folders["shallower"], r"segments has 2 entries, served 3"),
        (folders["first"].parent, "is not a run: it has no config.json"),
        ("nowhere", "there is no folder nowhere"),
        ({"weights": jax.tree.leaves(old)}, "no tree of parameters"),
    ):
        with pytest.raises(ShardlmError, match=message):
            llm.update_weights(path)
    wide = load(folders["wider"], dtype="float32").params
    with pytest.raises(ShardlmError, match=r"mlp\.down is \[1, 96, 32\], served is \[1, 64, 32\].* and 5 more"):
        llm.update_weights(wide)
    with pytest.raises(ShardlmError, match="is missing"):
        llm.update_weights({"segments": old["segments"]})
    assert llm.engine.runner.params is old


def test_over_http_while_requests_run(llm, folders, expected):
    llm.update_weights(folders["first"])
    served = AsyncLLM(llm.engine, model_name="tiny", template=None)
    client = Client(served, admin_keys=("admin",), api_keys=("user",))
    second = {"path": str(folders["second"])}

    async def post(path, body, headers=KEY):
        return await client.send("POST", path, json.dumps(body), headers)

    async def refused(body, status, headers=KEY, path="/update_weights"):
        return error(await post(path, body, headers), status)["message"]

    async def all_of_it():
        outputs = served.generate(PROMPT, dataclasses.replace(GREEDY, max_tokens=40), request_id="long")
        before = (await anext(outputs)).outputs[0].token_ids
        assert "asks for an administrator" in await refused(second, 401, USER)
        assert "another architecture" in await refused({"path": str(folders["wider"])}, 400)
        assert "no draft model is served" in await refused(second | {"draft": "other"}, 400)
        assert "no folder" in await refused({"model_path": "nowhere"}, 400, path="/update_weights_from_disk")
        assert "give the path" in await refused({}, 400) and "give the path" in await refused(
            second | {"model_path": "a"}, 400
        )
        answers = await asyncio.gather(post("/update_weights", second), post("/update_weights", second))
        last = [output async for output in outputs][-1].outputs[0].token_ids
        after = [output async for output in served.generate(PROMPT, GREEDY, request_id="new")][-1]
        greedy = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
        text = (await post("/v1/completions", greedy, USER)).json()
        models = (await client.send("GET", "/v1/models", None, USER)).json()["data"]
        assert models[0]["id"] == "tiny" and models[0]["root"] == second["path"]
        return before, answers, last, after, text["choices"][0]["text"]

    before, (done, busy), last, after, text = asyncio.run(all_of_it())
    served.shutdown()
    assert (
        done.json()["success"] and done.json()["path"] == second["path"] and "being read" in error(busy, 409)["message"]
    )
    assert last[: len(before)] == before and len(last) == 40
    # What "long" recomputed after the swap may be cached, so the tokens alone tell which weights these are.
    assert after.outputs[0].token_ids == expected["second"] and text == after.outputs[0].text
    assert "SHARDLM_ADMIN_KEY" in error(Client().post("/update_weights", second), 403)["message"]


def test_the_answer_counts_the_replies_that_go_on(llm, folders, monkeypatch):
    """They wait at that moment, since their pages hold what the old weights made."""
    served, swap = AsyncLLM(llm.engine, model_name="tiny", template=None), llm.engine.update_weights

    def with_two(*new):
        for name in "ab":
            llm.engine.add(name, [5, 6, 7], dataclasses.replace(GREEDY, max_tokens=40))
        llm.engine.step()
        assert llm.engine.stats().num_running == 2
        swap(*new)

    monkeypatch.setattr(llm.engine, "update_weights", with_two)
    client = Client(served, admin_keys=("admin",))
    answer = client.post("/update_weights", {"path": str(folders["first"])}, headers=KEY).json()
    asyncio.run(served.drain())
    served.shutdown()
    assert answer["num_running"] == 2 and "2 requests go on" in answer["message"]
