"""The engine against the model called directly: whatever else runs, each reply is what the model says."""

import asyncio
import functools
import itertools
import json
import random
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import CONFIG, END, TOKENIZER, finished, random_engine
from small import init

from shardlm.errors import ShardlmError
from shardlm.generate import Sampling, generate
from shardlm.layers.packed import Packed
from shardlm.mesh import MeshSpec
from shardlm.serve import state
from shardlm.serve.api.app import endpoints
from shardlm.serve.api.batches.files import Input, Output
from shardlm.serve.api.batches.run import Counts, run
from shardlm.serve.api.service import Service
from shardlm.serve.api.settings import Settings
from shardlm.serve.async_llm import AsyncLLM
from shardlm.serve.bad_words import BadWords
from shardlm.serve.bench.engine import bench_serving, serve_to
from shardlm.serve.bench.workload import lengths
from shardlm.serve.chunk_programs import Cuts
from shardlm.serve.layers import taken_apart
from shardlm.serve.sampling_params import SamplingParams, StructuredOutputs

GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
PROMPTS = [TOKENIZER.encode(text) for text in ('{"name": "ab"', '{"name": "abc", "age": 12', "né日🙂 true", "x" * 40)]


@pytest.fixture(scope="module")
def served():
    """On two devices, with 19 pages: two requests of 64 tokens do not fit. Prompts are cut into small chunks."""
    return random_engine(MeshSpec(tensor=2), cuts=Cuts((4, 8, 16, 32), 2), least=1)


@pytest.fixture(scope="module")
def directly(served):
    """What the model continues each prompt with, alone."""
    engine, model, params = served
    found = {}
    with jax.set_mesh(engine.runner.mesh):
        for prompt in PROMPTS:
            tokens = generate(model, params, prompt, max_new_tokens=20, sampling=Sampling(temperature=0))
            found[tuple(prompt)] = list(tokens)
    return found


@functools.partial(jax.jit, static_argnums=0)
def forward(model, params, row):
    """(hidden [T, D], log-probabilities [T, V]) of a row int32 [1, T], without a cache."""
    lm = model.model(params)
    positions = jnp.arange(row.shape[1], dtype=jnp.int32)[None]
    hidden, _, _ = lm(row, positions, Packed(jnp.ones_like(row), model.execution.rules))
    return jax.reshard((hidden[0], jax.nn.log_softmax(lm.logits(hidden)[0])), jax.P())


def forward_of(served, tokens) -> list[np.ndarray]:
    """As `forward` of the model that is served. All rows are of 64 tokens, one program, and nothing looks ahead."""
    engine, model, params = served
    row = np.zeros((1, 64), np.int32)
    row[0, : len(tokens)] = tokens
    with jax.set_mesh(engine.runner.mesh):
        return [np.asarray(a)[: len(tokens)] for a in forward(model, params, row)]


def hidden_of(served, tokens):
    """float32 [T, D]."""
    return forward_of(served, tokens)[0]


def logprobs_of(served, tokens):
    """float32 [T, V]."""
    return forward_of(served, tokens)[1]


def test_replies_do_not_depend_on_what_else_runs(served, directly):
    """Arrivals at random, shared beginnings, too few pages, requests that are aborted."""
    engine, rng = served[0], random.Random(0)
    preempted = engine.scheduler.preemptions
    wanted, done = {}, {}
    for number in range(40):
        prompt = rng.choice(PROMPTS)
        wanted[f"r{number}"] = directly[tuple(prompt)][: (length := rng.randint(1, 20))]
        engine.add(f"r{number}", prompt, SamplingParams(temperature=0, max_tokens=length, ignore_eos=True))
        if rng.random() < 0.2:
            gone = f"r{rng.randrange(number + 1)}"
            if (output := engine.abort(gone)) is not None:
                assert output.finished and output.outputs[0].finish_reason == "abort"
                assert wanted[gone][: len(output.outputs[0].token_ids)] == output.outputs[0].token_ids
                del wanted[gone]
        for _ in range(rng.randrange(3)):
            done |= {output.request_id: output for output in engine.step() if output.finished}
    done |= finished(engine)
    assert {id: output.outputs[0].token_ids for id, output in done.items()} == wanted
    assert engine.scheduler.preemptions > preempted and engine.stats().prefix_hits > 0
    text = done[max(wanted, key=lambda id: len(wanted[id]))].outputs[0]
    assert text.text == TOKENIZER.decode(text.token_ids) and text.finish_reason == "length"


def test_words_of_several_tokens_are_never_said(served, directly):
    """By the model's whole forward pass: the most likely token that ends no word, step by step."""
    engine = served[0]
    # A word that the model would say, spelt by tokens that spell it again.
    pairs = [(prompt, pair) for prompt, said in directly.items() for pair in itertools.pairwise(said[:12])]
    words = [(prompt, pair, TOKENIZER.decode(pair)) for prompt, pair in pairs]
    prompt, word = next((p, w) for p, pair, w in words if pair in BadWords.make([w], TOKENIZER).several)
    prompt, said = list(prompt), directly[prompt]
    forbidden = BadWords.make([word, " tags"], TOKENIZER)
    tokens = list(prompt)
    for _ in range(12):
        logits = logprobs_of(served, tokens)[-1].copy()
        reply = tokens[len(prompt) :]
        for bad in (*((one,) for one in forbidden.single), *forbidden.several):
            if tuple(reply[len(reply) - len(bad) + 1 :]) == bad[:-1]:
                logits[bad[-1]] = -np.inf
        tokens.append(int(np.argmax(logits)))
    params = SamplingParams(temperature=0, max_tokens=12, bad_words=[word, " tags"], ignore_eos=True)
    engine.add("clean", prompt, params)
    engine.add("beside", PROMPTS[0], GREEDY)
    done = finished(engine)
    assert done["clean"].outputs[0].token_ids == tokens[len(prompt) :] != said[:12]
    assert word not in done["clean"].outputs[0].text
    assert done["beside"].outputs[0].token_ids == directly[tuple(PROMPTS[0])][:9]
    schema = StructuredOutputs(choice=["true"])  # nothing else is allowed: the grammar wins
    ends = TOKENIZER.encode("true")
    assert len(ends) == 1 or BadWords.make(["true"], TOKENIZER).several
    engine.add("forced", prompt, SamplingParams(max_tokens=9, structured_outputs=schema, bad_words=["true"]))
    assert finished(engine)["forced"].outputs[0].text == "true"


def test_sampling_is_the_request_s_own(served):
    """A seed gives the same tokens alone and beside others, replies differ, and settings do what they say."""
    engine = served[0]
    params = SamplingParams(seed=5, n=3, max_tokens=8, temperature=1.5, top_k=50, logprobs=2, ignore_eos=True)
    engine.add("alone", PROMPTS[0], params)
    alone = finished(engine)["alone"].outputs
    for n in range(3):
        engine.add(f"other{n}", PROMPTS[n], SamplingParams(max_tokens=30, ignore_eos=True))
    engine.add("beside", PROMPTS[0], params)
    beside = finished(engine)["beside"].outputs
    assert [one.token_ids for one in alone] == [one.token_ids for one in beside]
    assert len({tuple(one.token_ids) for one in alone}) == 3
    for one in alone:
        expected = logprobs_of(served, [*PROMPTS[0], *one.token_ids])[len(PROMPTS[0]) - 1 :]
        for place, told in enumerate(one.logprobs):
            chosen, others = told.chosen, told.likeliest(2)
            assert chosen.token_id == one.token_ids[place]
            assert abs(chosen.logprob - expected[place][chosen.token_id]) < 1e-4
            assert [o.token_id for o in others] == np.argsort(-expected[place], kind="stable")[:2].tolist()
        assert abs(one.cumulative_logprob - sum(c.logprob for c in (place.chosen for place in one.logprobs))) < 1e-4
    engine.add("biased", PROMPTS[1], SamplingParams(temperature=0, max_tokens=5, logit_bias={7: 100.0}))
    engine.add(
        "varied", PROMPTS[1], SamplingParams(temperature=0, max_tokens=20, frequency_penalty=2, presence_penalty=2)
    )
    engine.add("long", PROMPTS[2], SamplingParams(temperature=0, max_tokens=9, min_tokens=9, logit_bias={END: 100.0}))
    engine.add("short", PROMPTS[2], SamplingParams(temperature=0, max_tokens=9, min_tokens=3, logit_bias={END: 100.0}))
    done = {id: output.outputs[0] for id, output in finished(engine).items()}
    assert done["biased"].token_ids == [7] * 5
    varied = done["varied"].token_ids
    assert len(set(varied)) > len(varied) // 2
    assert END not in done["long"].token_ids and done["long"].finish_reason == "length"
    assert done["short"].token_ids[3:] == [END] and done["short"].finish_reason == "stop"


def test_a_prompt_is_scored_as_the_forward_pass_does(served):
    engine = served[0]
    engine.add("scored", PROMPTS[3], SamplingParams(max_tokens=0, prompt_logprobs=1))
    engine.add("plain", PROMPTS[3], GREEDY)
    engine.add("embedded", PROMPTS[3], SamplingParams(max_tokens=0), embed=True)
    done = finished(engine)
    output = done["scored"]
    assert output.prompt_logprobs[0] is None and output.outputs[0].token_ids == []
    hidden = hidden_of(served, PROMPTS[3])[-1]
    np.testing.assert_allclose(done["embedded"].embedding, hidden / np.linalg.norm(hidden), atol=1e-5)
    expected = logprobs_of(served, PROMPTS[3])
    for place, told in enumerate(output.prompt_logprobs[1:], 1):
        own, [best] = told.chosen, told.likeliest(1)
        row = expected[place - 1]
        assert own.token_id == PROMPTS[3][place] and abs(own.logprob - row[own.token_id]) < 1e-4
        assert best.token_id == row.argmax() and own.rank == 1 + (row > row[own.token_id]).sum()


def test_replies_end_where_they_should(served, directly):
    engine = served[0]
    whole = TOKENIZER.decode(directly[tuple(PROMPTS[0])])
    stop = whole[3:6]
    engine.add("text", PROMPTS[0], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop=[stop]))
    schema = {"type": "object", "properties": {"age": {"type": "integer", "maximum": 99}}, "required": ["age"]}
    for n in range(3):
        held = SamplingParams(seed=n, max_tokens=50, structured_outputs=StructuredOutputs(json=schema))
        engine.add(f"json{n}", PROMPTS[1], held)
    choice = StructuredOutputs(choice=["né日", "true"])
    engine.add("choice", PROMPTS[2], SamplingParams(n=2, seed=1, max_tokens=20, structured_outputs=choice))
    done = {id: output.outputs for id, output in finished(engine).items()}
    assert done["text"][0].text == whole[: whole.index(stop)] and done["text"][0].stop_reason == stop
    for n in range(3):
        if done[f"json{n}"][0].finish_reason == "stop":
            assert json.loads(done[f"json{n}"][0].text)["age"] <= 99
    assert any(done[f"json{n}"][0].finish_reason == "stop" for n in range(3))
    assert {one.text for one in done["choice"]} <= {"né日", "true"}


def test_what_cannot_be_served_is_refused_and_leaves_nothing(served):
    engine = served[0]
    for prompt, params, message in (
        ([], GREEDY, "the prompt has no tokens"),
        ([10_000], GREEDY, "outside the vocabulary"),
        (list(range(64)), SamplingParams(n=2), "max_model_len=64 must hold it and at least one new token"),
        ([1], SamplingParams(structured_outputs=StructuredOutputs(regex="(")), "cannot be compiled"),
        ([1], SamplingParams(logit_bias={400: 1.0}), "outside the vocabulary"),
    ):
        with pytest.raises(ShardlmError, match=message):
            engine.add("bad", prompt, params)
    assert not engine.has_unfinished and not engine.scheduler.has_unfinished


def test_what_was_said_counts_when_it_is_computed_anew(served):
    """Also where that takes several chunks, of which the first holds no token of the reply."""
    engine, prompt = served[0], PROMPTS[3]
    assert len(prompt) > engine.scheduler.config.max_batch_tokens
    params = SamplingParams(temperature=0, max_tokens=20, frequency_penalty=2, presence_penalty=2, ignore_eos=True)
    engine.add("whole", prompt, params)
    whole = finished(engine)["whole"].outputs[0].token_ids
    engine.add("anew", prompt, params)
    while len(engine._replies["anew"].output.token_ids) < 10:
        engine.step()
    engine.update_weights(engine.runner.params)
    assert finished(engine)["anew"].outputs[0].token_ids == whole
    assert engine.reset_prefix_cache()
    engine.add("anew", prompt, params)
    while len(engine._replies["anew"].output.token_ids) < 5:
        engine.step()
    assert engine.reset_prefix_cache() is False and engine.reset_prefix_cache(reset_running_requests=True)
    engine.scheduler.pages.check_invariants()
    done = finished(engine)["anew"]
    assert done.outputs[0].token_ids == whole and done.num_cached_tokens == 0
    engine.add("cached", prompt, params)
    done = finished(engine)["cached"]
    assert done.outputs[0].token_ids == whole and done.num_cached_tokens > 0


def test_a_request_that_breaks_leaves_the_others(served, directly, monkeypatch):
    engine = served[0]
    for id, prompt in (("broken", PROMPTS[0]), ("whole", PROMPTS[1])):
        engine.add(id, prompt, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    monkeypatch.setattr(engine._replies["broken"].detokenizer, "push", lambda tokens: 1 / 0)
    done = finished(engine)
    assert done["broken"].error.startswith("ZeroDivisionError") and done["broken"].outputs[0].finish_reason == "abort"
    assert done["whole"].outputs[0].token_ids == directly[tuple(PROMPTS[1])][:9] and done["whole"].error is None


def test_new_weights_are_served_at_once(served):
    engine, model, _ = served
    with jax.set_mesh(engine.runner.mesh):
        params = init(model, seed=1)
        expected = list(generate(model, params, PROMPTS[0], max_new_tokens=9, sampling=Sampling(temperature=0)))
        other = taken_apart(model, params)[1]
    before = engine.runner.params
    engine.add("old", PROMPTS[0], GREEDY)
    old = finished(engine)["old"].outputs[0].token_ids
    engine.update_weights(other)
    engine.add("new", PROMPTS[0], GREEDY)
    assert finished(engine)["new"].outputs[0].token_ids == expected != old
    engine.update_weights(before)


def test_many_clients_stream_and_some_leave(served, directly):
    llm = AsyncLLM(served[0], model_name="tiny", template=None)

    async def client(number: int):
        rng = random.Random(number)
        prompt, leaves = PROMPTS[number % 4], rng.random() < 0.4
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        last = 0
        stream = llm.generate(prompt, params, request_id=f"c{number}")
        async for output in stream:
            tokens = output.outputs[0].token_ids
            assert tokens == directly[tuple(prompt)][: len(tokens)] and len(tokens) >= last
            last = len(tokens)
            if leaves and last > 3:
                break
        await stream.aclose()
        assert leaves or last == 20

    async def everybody():
        await asyncio.gather(*(client(number) for number in range(24)))
        with pytest.raises(ShardlmError, match="outside the vocabulary"):
            await anext(llm.generate([9999], GREEDY, request_id="bad"))
        await llm.drain()

    asyncio.run(everybody())
    assert llm.stats().kv_usage == 0 and llm.stats().num_running == 0
    llm.shutdown()


def test_a_file_of_requests(served, directly, tmp_path, monkeypatch):
    """More than run at once; nobody waits for parts of them, and each is what the model says alone."""
    engine = served[0]
    monkeypatch.setattr(engine, "pace", None)
    llm = AsyncLLM(engine, model_name="tiny", template=None, paced=False)
    how = {"temperature": 0, "max_tokens": 20, "ignore_eos": True, "return_token_ids": True}
    lines = [
        {"custom_id": f"{n}", "method": "POST", "url": "/v1/completions", "body": {"prompt": PROMPTS[n % 4], **how}}
        for n in range(16)
    ]
    (tmp_path / "in").write_text("".join(json.dumps(line) + "\n" for line in lines))
    output, counts = Output(str(tmp_path / "out"), resume=False), Counts()
    write = lambda line, _: output.write(line)  # noqa: E731
    requests, handlers = Input(str(tmp_path / "in"), 2**20), endpoints(Service(llm, Settings()))
    how = {"most": 2 * llm.max_num_seqs, "check": llm.check_health}
    asyncio.run(run(requests.lines(), handlers, write, output.known, counts, **how))
    llm.shutdown()
    output.close()
    found = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert {one["custom_id"]: one["response"]["body"]["choices"][0]["token_ids"] for one in found} == {
        f"{n}": directly[tuple(PROMPTS[n % 4])] for n in range(16)
    }
    assert counts == Counts(done=16) and llm.max_num_seqs == 3 and engine.pace is None and not engine.has_unfinished


def test_the_benchmark_offline_and_over_http(served, tmp_path):
    found = bench_serving(served[0], prompt_len=9, output_len=6, shared=4)
    assert json.loads(json.dumps(found))["benchmark"] == "serve" and found["weight_bytes"] == 4 * found["parameters"]
    assert found["num_programs"] == len(served[0].runner._programs) and found["compile_seconds"] > 0
    [alone] = found["offline"]
    assert alone["batch"] == 1 and min(alone["prefill_seconds"], alone["seconds"]) > 0  # each by a clock of its own
    file, picture = tmp_path / "online.json", tmp_path / "online.png"
    words = ["--rates=inf", "--concurrency=2", "--requests=5", "--prompt_len=9", "--output_len=6", "--shared_prefix=4"]
    words += ["--range_ratio=0.5"]
    words += [f"--vocab={CONFIG.vocab_size}", "--goodput=e2e:99,ttft:1e-9", f"--output={file}", f"--plot={picture}"]
    asyncio.run(serve_to(served[0], [sys.executable, "-m", "launch.bench", "serve", "--quiet", *words]))
    written = json.loads(file.read_text())
    assert written["model"] == "bench" and [row.get("request_rate") for row in written["online"]] == ["inf", None]
    assert written["workload"]["range_ratio"] == 0.5
    for seed, row in enumerate(written["online"], 1):
        replies = sum(new for _, new in lengths(5, 9, 6, 0.5, seed))
        assert row["requests"] == 5 and row["failed"] == 0 and row["output_tokens"] == replies
        assert 0 < row["ttft_seconds"]["p50"] <= row["e2e_seconds"]["p50"] <= row["e2e_seconds"]["p99"]
        assert row["goodput"]["share"] == 0 and row["goodput"]["limits_seconds"] == {"e2e": 99, "ttft": 1e-9}
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert served[0].stats().prefix_hits > 0 and served[0].stats().kv_usage == 0
    pages = served[0].scheduler.pages
    stats = served[0].stats()
    assert (stats.num_pages, stats.page_size) == (pages.num_pages - 1, pages.page_size)  # the first is scrap


def test_rows_of_slots_are_replaced_but_not_that_of_padding():
    """Several may have that one; all others are told to be unlike."""
    held = {"counts": np.arange(12, dtype=np.int16).reshape(4, 3), "last": np.arange(4, dtype=np.int32)}
    new = {"counts": -np.ones((3, 3), np.int16), "last": np.full(3, -1, np.int32)}
    put = jax.jit(state.put)
    given = jax.tree.map(jnp.asarray, held), jnp.array([2, 3, 3], jnp.int32), new
    found = put(*given)
    expected = {name: np.where((np.arange(4) == 2).reshape(-1, *[1] * (a.ndim - 1)), -1, a) for name, a in held.items()}
    assert jax.tree.all(jax.tree.map(np.array_equal, found, expected))
    text = put.lower(*given).as_text()
    assert text.count("unique_indices = true") == text.count('"stablehlo.scatter"') == 2
