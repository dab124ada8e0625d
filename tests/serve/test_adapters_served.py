"""Several adapters beside the weights that are served: each reply is the one of the model with that adapter alone."""

import asyncio
import contextlib
import dataclasses
import functools
import json
import math
import pathlib
import shutil
import sys
import types

import jax
import numpy as np
import pytest
from engines import CONFIG, TOKENIZER, decoding_from, folder_of
from flax.traverse_util import flatten_dict, unflatten_dict
from lazy_programs import all_compiled
from oracle import Oracle

from shardlm import peft, peft_folder
from shardlm.errors import ShardlmError
from shardlm.layers.lora import LoraConfig
from shardlm.layers.param import Execution
from shardlm.mesh import MeshSpec
from shardlm.models.pretrained import Pretrained
from shardlm.opened import load
from shardlm.rules import Rules
from shardlm.serve.adapter_table import NO_ROOM, AdapterTable, LoRARequest, Room
from shardlm.serve.adapters import names_of
from shardlm.serve.api.app import make_app
from shardlm.serve.api.settings import Settings
from shardlm.serve.async_llm import AsyncLLM
from shardlm.serve.live_weights import new_weights
from shardlm.serve.llm import LLM
from shardlm.serve.outputs import EngineError
from shardlm.serve.replicas import _Out
from shardlm.serve.sampling_params import SamplingParams
from shardlm.state import ModelDef
from shardlm.train.convert import to_run

sys.path.append(str(pathlib.Path(__file__).parent / "api"))
from client import Client, error

SIZES = {"max_num_seqs": 3, "max_num_batched_tokens": 32, "block_size": 4}
PROMPT = '{"name": "ab", "age": 12'
KEY, USER = {"authorization": "Bearer admin"}, {"authorization": "Bearer user"}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
KINDS = {
    "small": LoraConfig(2, 4.0),
    "wide": LoraConfig(4, 2.0, ("wq", "wo")),
    "other": LoraConfig(2, 4.0),
    "large": LoraConfig(5),
}


def adapter_of(path, base, lora: LoraConfig, seed: int):
    """A folder of PEFT with random adapters on `base`."""
    mesh, source = MeshSpec().build(jax.devices()[:1]), Pretrained(str(base)).pinned()
    with jax.set_mesh(mesh):
        model = ModelDef.make(source.transformer(), Execution(Rules.make("replicated", MeshSpec()), lora=lora))
    rng = np.random.default_rng(seed)
    flat = {p: 0.4 * rng.standard_normal(s.shape).astype(np.float32) for p, s in flatten_dict(model.shapes).items()}
    peft.save(path, model, unflatten_dict(flat), source)
    return path


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    home = tmp_path_factory.mktemp("adapters")
    base = folder_of(home / "base")
    made = {name: adapter_of(home / name, base, lora, i) for i, (name, lora) in enumerate(KINDS.items())}
    return {"base": base} | made


@pytest.fixture(scope="module")
def alone(folders):
    """{name: what the model with it alone replies, without a server}."""
    prompt = TOKENIZER.encode(PROMPT)
    opened = {name: load(folder, dtype="float32") for name, folder in folders.items() if name != "large"}
    said = {name: Oracle(one).reply(prompt, GREEDY).tokens for name, one in opened.items()}
    assert len({tuple(one) for one in said.values()}) == len(said)  # they differ
    return said


@pytest.fixture(scope="module", autouse=True)
def one_decode_program():
    """Of as many as run, which compiles sooner than three; test_matrix.py has others."""
    with decoding_from(SIZES["max_num_seqs"]):
        yield


@pytest.fixture(scope="module")
def llm(folders):
    """With room for two, and none of them."""
    with all_compiled():
        return LLM(folders["base"], enable_lora=True, max_loras=2, max_lora_rank=4, **SIZES)


def tokens_of(outputs) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def of(name: str, folders=None) -> LoRARequest | None:
    return None if name == "base" else LoRARequest(name, 1, str(folders[name]) if folders else "")


# Stages and other options: test_matrix.py.
@pytest.mark.parametrize("mesh", [MeshSpec(), MeshSpec(data=2, tensor=2)], ids=["of a run", "data"])
def test_rows_of_one_batch_have_their_own(mesh, folders, alone, tmp_path):
    modules, base = {name: folders[name] for name in ("small", "wide")}, folders["base"]
    if mesh == MeshSpec():
        base = tmp_path / "run"
        to_run(folders["base"], base)
    llm = LLM(base, mesh=mesh, lora_modules=modules, **SIZES)
    assert llm.engine.adapters.room == Room(2, 16)
    order = ["wide", "base", "small"]
    for _ in range(2):  # the second time from cached pages, which are no other adapter's
        found = llm.generate([PROMPT] * 3, GREEDY, lora_request=[of(name) for name in order])
        assert tokens_of(found) == [alone[name] for name in order]
    assert all(output.num_cached_tokens for output in found)
    assert llm.engine.stats().kv_usage == 0
    if mesh.data > 1:  # a replica that was out when an adapter came has it when it returns
        llm.engine.engines[0].ended, llm.engine._out[0] = EngineError("gone"), _Out(math.inf, 1.0)
        assert tokens_of(llm.generate(PROMPT, GREEDY, lora_request=of("other", folders))) == [alone["other"]]
        llm.engine._out[0].at = 0
        llm.engine.step()
        assert llm.engine.stats().engines_up == 2
        order = ["other", "base"] * 3
        found = llm.generate([PROMPT] * 6, GREEDY, lora_request=[of(name) for name in order])
        assert tokens_of(found) == [alone[name] for name in order]


@contextlib.contextmanager
def compiled():
    """What is compiled meanwhile."""
    found = []
    listen = lambda event, seconds, **_: found.append(event) if "backend_compile" in event else None  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_they_come_and_go_without_a_compile(llm, folders, alone):
    with compiled() as found:
        for name in ("small", "wide", "other", "base", "small"):  # the third finds no room, and the oldest one leaves
            assert tokens_of(llm.generate(PROMPT, GREEDY, lora_request=of(name, folders))) == [alone[name]]
    assert not found
    assert [adapter.name for adapter in llm.engine.adapters.loaded] == ["other", "small"]
    with pytest.raises(ShardlmError, match=r"3 adapters in one call and max_loras=2"):
        llm.generate([PROMPT] * 3, GREEDY, lora_request=[of(name, folders) for name in ("small", "wide", "other")])
    again = LoRARequest("small", 1, str(folders["other"]))  # another one of this name
    assert tokens_of(llm.generate(PROMPT, GREEDY, lora_request=again)) == [alone["other"]]
    llm.update_weights(folders["base"])  # adapters stay
    assert tokens_of(llm.generate(PROMPT, GREEDY, lora_request=again)) == [alone["other"]]
    new = new_weights(folders["base"], llm.engine.runner)  # as do those that come while they are read
    assert tokens_of(llm.generate(PROMPT, GREEDY, lora_request=of("wide", folders))) == [alone["wide"]]
    llm.engine.update_weights(new)
    assert tokens_of(llm.generate(PROMPT, GREEDY, lora_request=of("wide", folders))) == [alone["wide"]]


def test_refusals(llm, folders, tmp_path):
    before = llm.engine.adapters.loaded
    deeper = folder_of(tmp_path / "deeper", 0, type(CONFIG)(**{**vars(CONFIG), "num_layers": 2}))
    elsewhere = adapter_of(tmp_path / "elsewhere", deeper, KINDS["small"], 0)
    broken = shutil.copytree(folders["small"], tmp_path / "broken")
    config = json.loads((broken / peft_folder.CONFIG).read_text())
    (broken / peft_folder.CONFIG).write_text(json.dumps(config | {"use_dora": True}))
    for request, message in (
        (of("nobody"), "there is no adapter 'nobody'; "),
        (of("large", folders), "has rank 5 and max_lora_rank=4; start with max_lora_rank=5"),
        (LoRARequest("base", 1, str(folders["base"])), "is a whole model and no adapter"),
        (LoRARequest("elsewhere", 1, str(elsewhere)), "is for another model than what is served: segments has"),
        (LoRARequest("broken", 1, str(broken)), "use_dora=True, which is not supported"),
    ):
        with pytest.raises(ShardlmError, match=message):
            llm.generate(PROMPT, GREEDY, lora_request=request)
    assert llm.engine.adapters.loaded == before and not llm.engine.has_unfinished
    with pytest.raises(ShardlmError, match="serve the checkpoint, and give this one as one of lora_modules"):
        LLM(folders["small"], enable_lora=True, **SIZES)
    with pytest.raises(ShardlmError, match=r"start with enable_lora=True, max_loras=N"):
        names_of(types.SimpleNamespace(adapters=AdapterTable(NO_ROOM), runner=None), of("small", folders), 1)


def until_first_token(step, held: list) -> list:
    """Engine.step, as long as no request has moved on."""
    held += [] if held else step()
    return held[:]


def test_over_http_they_are_models(llm, folders, alone, monkeypatch):
    """A reply that runs goes on with the adapter that it began with, which is unloaded and has its place till then."""
    for adapter in llm.engine.adapters.loaded:
        llm.engine.adapters.leave(adapter.name)
    served = AsyncLLM(llm.engine, model_name="tiny", template=None)
    client = Client(served, admin_keys=("admin",), api_keys=("user",))
    twelve = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}

    async def post(path, body, headers=KEY):
        return await client.send("POST", path, json.dumps(body), headers)

    async def said(model, path="/v1/completions", **body):
        answer = await post(path, twelve | body | {"model": model}, USER)
        return answer.json()["choices"][0]["token_ids"] if answer.status_code == 200 else error(answer, 404)["message"]

    async def load(name, status=200, **body):
        return await post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folders["other"]), **body})

    async def all_of_it():
        assert (await load("small", lora_path=str(folders["small"]))).json()["success"]
        models = (await client.send("GET", "/v1/models", None, USER)).json()["data"]
        assert [(one["id"], one.get("parent")) for one in models] == [("tiny", None), ("small", "tiny")]
        assert models[1]["root"] == str(folders["small"])
        assert await asyncio.gather(*(said(name) for name in ("small", "tiny", "small"))) == [
            alone[name] for name in ("small", "base", "small")
        ]
        assert await said("wide") == "the model 'wide' is not here; here is tiny, small"
        long = dataclasses.replace(GREEDY, max_tokens=36)
        with monkeypatch.context() as patch:
            patch.setattr(llm.engine, "step", functools.partial(until_first_token, llm.engine.step, held := []))
            running = served.generate(PROMPT, long, request_id="long", lora_request=LoRARequest("small"))
            await anext(running)
            assert held
            gone = await post("/v1/unload_lora_adapter", {"lora_name": "small"})
            assert gone.json()["success"] and "is not here" in await said("small")
            assert (await load("other")).json()["success"]
            full = error(await load("more"), 400)["message"]
            assert "max_loras=2, loaded are other, and requests run of 1 that were unloaded" in full
        assert await said("other") == alone["other"]
        last = [output async for output in running][-1].outputs[0].token_ids
        assert last[:12] == alone["small"] and len(last) == 36
        assert (await load("more")).json()["success"]
        assert "load_inplace=true" in error(await load("more"), 409)["message"]
        assert (await load("more", load_inplace=True, lora_path=str(folders["wide"]))).json()["success"]
        assert await said("more") == alone["wide"]
        vectors = [await post("/v1/embeddings", {"input": PROMPT, "model": name}, USER) for name in ("tiny", "more")]
        base, more = (answer.json()["data"][0]["embedding"] for answer in vectors)
        assert max(abs(a - b) for a, b in zip(base, more, strict=True)) > 0.01
        assert "administrator" in error(await post("/v1/load_lora_adapter", {}, USER), 401)["message"]
        assert "the model's own name" in error(await load("tiny"), 400)["message"]
        assert error(await load(None), 400)["param"] == "lora_name"
        wide = error(await load("large", lora_path=str(folders["large"])), 400)
        assert "has rank 5 and max_lora_rank=4" in wide["message"] and wide["type"] == "invalid_request_error"
        assert error(await post("/v1/unload_lora_adapter", {"lora_name": "nobody"}), 404)["param"] == "lora_name"

    asyncio.run(all_of_it())
    served.shutdown()
    with pytest.raises(ShardlmError, match="adapter 'more' has the model's own name"):
        make_app(served, Settings(model_names=("more",)))
