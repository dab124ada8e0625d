"""The class that users call, from a folder; and the LM Evaluation Harness on it, where that is installed."""

import asyncio
import contextlib
import functools
import importlib.util
import json
import pathlib
import threading

import numpy as np
import pytest
from engines import TOKENIZER, folder_of

import shardlm
from shardlm.errors import ShardlmError
from shardlm.mesh import MeshSpec
from shardlm.serve import harness
from shardlm.serve.api.app import make_app
from shardlm.serve.api.server import Listen, Server, listening
from shardlm.serve.api.settings import Settings
from shardlm.serve.async_llm import AsyncLLM
from shardlm.serve.build import EngineConfig, build
from shardlm.serve.sampling_params import SamplingParams

SIZES = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "block_size": 4}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return shardlm.LLM(folder_of(tmp_path_factory.mktemp("served") / "model"), **SIZES)


def test_what_users_of_vllm_s_class_expect(llm):
    texts = ['{"name": "ab"', "né日🙂", "true"]
    outputs = llm.generate(texts, GREEDY)
    assert [output.prompt for output in outputs] == texts and all(output.finished for output in outputs)
    by_ids = llm.generate([TOKENIZER.encode(text) for text in texts], [GREEDY] * 3)
    assert [o.outputs[0].text for o in by_ids] == [o.outputs[0].text for o in outputs]
    [alone] = llm.generate(texts[0], GREEDY)
    assert alone.outputs[0].token_ids == outputs[0].outputs[0].token_ids
    [answer] = llm.chat([{"role": "user", "content": "true"}], GREEDY)
    assert answer.prompt == "user: true\n" and len(answer.outputs[0].token_ids) == 6
    [scores] = llm.score(texts[0])
    assert len(scores) == len(TOKENIZER.encode(texts[0])) - 1 and max(scores) < 0
    assert abs(np.linalg.norm(llm.embed(texts), axis=1) - 1).max() < 1e-5
    with pytest.raises(ShardlmError, match="3 prompts and 2 sampling parameters"):
        llm.generate(texts, [GREEDY] * 2)
    with pytest.raises(ShardlmError, match=r"max_model_len=64 must hold it"):
        llm.generate(["true", list(range(70))], GREEDY)
    assert not llm.engine.has_unfinished


def test_what_cannot_be_built_is_refused(llm):
    for options, message in (
        ({"quantization": "int3"}, "choose from int8, int4, fp8"),
        ({"mesh": MeshSpec(fsdp=2)}, "give its devices to tensor, expert, pipeline or data"),
        ({"mesh": MeshSpec(pipeline=4)}, "pipeline=4 stages of 3 layers; choose at most 3"),
        ({"mesh": MeshSpec(data=3, tensor=4)}, "needs 12 devices and there are 8"),
        ({"max_model_len": 128}, "more than the model's 64 positions"),
        ({"kv_cache_bytes": 100}, "hold no page"),
        ({"kv_cache_bytes": 10_000}, "needs 16 pages of 4, and the pool has"),
        ({"gpu_memory_utilization": 1.5}, "is a share above 0"),
    ):
        with pytest.raises(ShardlmError, match=message):
            build(llm.folder, EngineConfig(**(SIZES | options)))
    with pytest.raises(ShardlmError, match="give mesh or the sizes, not both"):
        shardlm.LLM(llm.folder, mesh=MeshSpec(), tensor_parallel_size=2)


@pytest.mark.skipif(harness.lm_eval is None, reason="needs the extra eval: the LM Evaluation Harness")
def test_tasks_of_the_harness(llm, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    documents = [{"q": "true", "choices": ["x", "y"], "answer": 1}, {"q": '{"age', "choices": ['"', "1"], "answer": 0}]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in documents))
    write_task(tmp_path / "choice.yaml", data, "multiple_choice", 'doc_to_choice: "{{choices}}"', "answer", "acc")
    write_task(tmp_path / "rolling.yaml", data, "loglikelihood_rolling", "", "q", "byte_perplexity")
    write_task(
        tmp_path / "text.yaml",
        data,
        "generate_until",
        "generation_kwargs: {until: [x], max_gen_toks: 8}",
        "q",
        "exact_match",
    )
    tasks = ["choice", "rolling", "text"]
    found = harness.run_tasks(llm, tasks, include_path=str(tmp_path))
    best = [max(one["choices"], key=lambda choice, one=one: continued(llm, one["q"], choice)) for one in documents]
    right = sum(choice == one["choices"][one["answer"]] for choice, one in zip(best, documents, strict=True))
    assert found["choice"]["acc,none"] == right / 2
    total = sum(sum(llm.score([[llm.engine.stop_ids[0], *TOKENIZER.encode(one["q"])]])[0]) for one in documents)
    nbytes = sum(len(one["q"].encode()) for one in documents)
    assert found["rolling"]["byte_perplexity,none"] == pytest.approx(np.exp(-total / nbytes), rel=1e-4)
    own = functools.partial(harness.TaskManager, include_defaults=False)  # the others take half a minute to read
    monkeypatch.setattr(harness, "TaskManager", own)
    with pytest.raises(ShardlmError, match="has no task 'nothing'"):
        harness.run_tasks(llm, ["choice", "nothing"], include_path=str(tmp_path))
    if not all(importlib.util.find_spec(name) for name in ("aiohttp", "requests", "tenacity")):
        pytest.skip("the harness over HTTP needs lm_eval[api]")
    with serving(llm) as url:  # the harness as a client that knows nothing of us
        options = {"model": "tiny", "base_url": f"{url}/v1/completions", "max_length": 64, "num_concurrent": 2}
        manager = harness.TaskManager(include_path=str(tmp_path))
        over_http = harness.lm_eval.simple_evaluate(
            "local-completions", model_args=options, tasks=tasks, task_manager=manager, bootstrap_iters=0
        )["results"]
    for task in tasks:
        numbers = {name: value for name, value in found[task].items() if isinstance(value, float)}
        assert numbers and {name: over_http[task][name] for name in numbers} == pytest.approx(numbers, rel=1e-5)


@contextlib.contextmanager
def serving(llm):
    """The engine over HTTP in a thread of its own; yields the address. The engine is at its end afterwards."""
    served = AsyncLLM(llm.engine, model_name="tiny", template=None)
    server, sock = Server(make_app(served, Settings()), Listen()), listening(Listen(port=0), 60)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([sock])))
    thread.start()
    yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    server.should_exit = True
    thread.join()
    served.shutdown()


def continued(llm, context: str, continuation: str) -> float:
    """Log-probability of the continuation's tokens."""
    whole, before = TOKENIZER.encode(context + continuation), TOKENIZER.encode(context)
    return sum(llm.score([whole])[0][len(before) - 1 :])


def write_task(file: pathlib.Path, data: pathlib.Path, kind: str, more: str, target: str, metric: str) -> None:
    text = '""' if kind == "loglikelihood_rolling" else '"{{q}}"'
    file.write_text(
        f"task: {file.stem}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
        f'output_type: {kind}\ntarget_delimiter: ""\ndoc_to_text: {text}\ndoc_to_target: "{{{{{target}}}}}"\n{more}\n'
        f"metric_list:\n  - metric: {metric}\n"
    )
