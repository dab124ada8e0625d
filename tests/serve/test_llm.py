"""The class that users call, from a folder; and the LM Evaluation Harness on it, where that is installed."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib.util
import json
import pathlib
import random
import threading
import time

import jax
import numpy as np
import pytest
from engines import TOKENIZER, folder_of
from lazy_programs import all_compiled

import shardlm
from shardlm import life
from shardlm.errors import ShardlmError
from shardlm.serve import async_llm, harness
from shardlm.serve.api.app import make_app
from shardlm.serve.api.server import Listen, Server, listening
from shardlm.serve.api.settings import Settings
from shardlm.serve.async_llm import AsyncLLM
from shardlm.serve.defaults import recommended
from shardlm.serve.request import PromptTooLong
from shardlm.serve.sampling_params import SamplingParams
from shardlm.serve.started import Started

SIZES = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "block_size": 4}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


RECOMMENDED = {"temperature": 0.5, "top_k": 5, "repetition_penalty": 1.05}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = folder_of(tmp_path_factory.mktemp("served") / "model")
    (folder / "generation_config.json").write_text(json.dumps({**RECOMMENDED, "top_p": None, "pad_token_id": 0}))
    with all_compiled():
        return shardlm.LLM(folder, **SIZES)


def test_get_tokenizer_is_as_hugging_face_s(llm):
    """Compared with transformers 5.23 by hand, over all options that are here."""
    tokenizer, chat = llm.get_tokenizer(), [{"role": "user", "content": "true"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "user: true\n"
    ids = TOKENIZER.encode("user: true\n")
    found = tokenizer.apply_chat_template(chat, add_generation_prompt=True)
    assert found["input_ids"] == found.input_ids == ids and found.attention_mask == [1] * len(ids)
    assert tokenizer.apply_chat_template([chat] * 2, return_dict=False) == [ids] * 2
    own = "{% for t in tools %}{{ t.function.name }}{% endfor %}{{ more }}{{ add_generation_prompt }}"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    text = tokenizer.apply_chat_template(chat, tools, chat_template=own, tokenize=False, more="!")
    assert text == "f!False"
    assert tokenizer.encode("true") == tokenizer("true").input_ids == TOKENIZER.encode_prompt("true")
    end = tokenizer.eos_token_id
    assert end == TOKENIZER.end_of_document_id and tokenizer.eos_token is None and tokenizer.pad_token_id is None
    assert tokenizer.decode([*ids, end]) == "user: true\n<|endoftext|>"
    assert tokenizer.batch_decode(np.array([[*ids, end]]), skip_special_tokens=True) == ["user: true\n"]
    assert tokenizer.convert_tokens_to_ids(tokenizer.tokenize("true")) == TOKENIZER.encode("true")
    assert len(tokenizer) == len(tokenizer.get_vocab()) == TOKENIZER.vocab_size
    with pytest.raises(ShardlmError, match=r"has no return_tensors .*: it gives lists of ids"):
        tokenizer.apply_chat_template(chat, return_tensors="pt")
    with pytest.raises(AttributeError, match=r"has no add_tokens; transformers.AutoTokenizer.from_pretrained"):
        tokenizer.add_tokens(["x"])


def test_prompts_of_another_salt_share_nothing(llm):
    def cached(salt):
        [output] = llm.generate({"prompt": '{"name": "ab", "tags": ["x"]}', "cache_salt": salt}, GREEDY)
        return output.num_cached_tokens

    assert [cached(salt) > 0 for salt in ("mine", "mine", "yours", None, None)] == [False, True, False, False, True]
    assert llm.reset_prefix_cache() and [cached("mine") > 0 for _ in range(2)] == [False, True]
    with pytest.raises(ShardlmError, match="no cache is kept outside of the engine"):
        llm.reset_prefix_cache(reset_connector=True)
    for salt in ("", 7):
        with pytest.raises(ShardlmError, match="give a text that is not empty, or leave it out"):
            cached(salt)


def test_what_users_of_vllm_s_class_expect(llm):
    texts, begun = ['{"name": "ab"', "né日🙂", "true"], time.monotonic()
    outputs = llm.generate(texts, GREEDY)
    assert life.last() > begun  # which a run that samples heeds
    assert [output.prompt for output in outputs] == texts and all(output.finished for output in outputs)
    for one in (outputs[0].metrics, llm.generate("true", SamplingParams(max_tokens=0))[0].metrics):
        assert one.arrival_time > 1.7e9 and 0 < one.queued_ts <= one.scheduled_ts < one.first_token_ts
        assert one.first_token_ts <= one.last_token_ts and one.first_token_latency < 60
    assert [output.metrics.num_generation_tokens for output in outputs] == [6] * 3
    by_ids = llm.generate([TOKENIZER.encode(text) for text in texts], [GREEDY] * 3)
    assert [o.outputs[0].text for o in by_ids] == [o.outputs[0].text for o in outputs]
    [alone] = llm.generate(texts[0], GREEDY)
    assert alone.outputs[0].token_ids == outputs[0].outputs[0].token_ids
    [answer] = llm.chat([{"role": "user", "content": "true"}], GREEDY)
    assert answer.prompt == "user: true\n" and len(answer.outputs[0].token_ids) == 6
    [scores] = llm.score(texts[0])
    assert len(scores) == len(TOKENIZER.encode(texts[0])) - 1 and max(scores) < 0
    assert abs(np.linalg.norm(llm.embed(texts), axis=1) - 1).max() < 1e-5
    size = len(llm.embed("true")[0])
    assert abs(np.linalg.norm(llm.embed("true", normalize=False)) - 1) > 1e-3 and llm.embed("true", dimensions=size)
    with pytest.raises(ShardlmError, match=rf"dimensions=2: this model's vectors have {size}, and it does not say"):
        llm.embed("true", dimensions=2)
    with pytest.raises(ShardlmError, match="3 prompts and 2 sampling parameters"):
        llm.generate(texts, [GREEDY] * 2)
    with pytest.raises(ShardlmError, match=r"max_model_len=64 must hold it"):
        llm.generate(["true", list(range(70))], GREEDY)
    assert not llm.engine.has_unfinished


def test_what_the_checkpoint_recommends_is_for_prompts_without_parameters(llm, monkeypatch):
    usual = llm.get_default_sampling_params()
    assert usual == SamplingParams(**RECOMMENDED)
    asked = []
    monkeypatch.setattr(llm, "_seeded", lambda params: asked.append(params) or params)
    llm.generate("true")
    llm.generate("true", GREEDY)
    assert asked == [usual, GREEDY]
    with pytest.raises(ShardlmError, match=r"generation_config.json: temperature=-1 .* --generation_config=none"):
        recommended({"temperature": -1})


def test_prompts_and_parameters_in_all_of_vllm_s_forms(llm):
    ids, short = TOKENIZER.encode("true"), SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    [wanted] = llm.generate("true", short, use_tqdm=False)
    forms = ({"prompt": "true"}, {"prompt_token_ids": ids}, np.array(ids), ids, ("true",), [{"prompt_token_ids": ids}])
    for form in forms:
        [found] = llm.generate(prompts=form, sampling_params=[short])
        assert found.outputs[0].token_ids == wanted.outputs[0].token_ids and found.prompt_token_ids == ids
    assert llm.generate({"prompt": "x", "prompt_token_ids": ids}, short)[0].prompt == "x" and not llm.generate([])
    assert len(llm.generate(["a", "b"], short, priority=[1, 0])) == 2
    with pytest.raises(ShardlmError, match="priority='x' must be an integer"):
        llm.generate(["a", "b"], short, priority=[1, "x"])
    for wrong, message in (
        (5, "a prompt is a int; give a text, token ids"),
        ([None], "a prompt is a NoneType"),
        ([b"a"], "a prompt is a bytes"),
        ({"x": 1}, "a prompt has 'x'"),
        ({"prompt": None}, "a prompt is a dict"),
        ([[1.5]], "token 1.5 of the prompt"),
        ("", "the prompt has no tokens"),
        ("a\udc80", "half of a surrogate pair"),  # as a file read with errors="surrogateescape" has it
    ):
        with pytest.raises(ShardlmError, match=message):
            llm.generate(wrong, short)
    with pytest.raises(ShardlmError, match="sampling_params has a dict"):
        llm.generate("a", {"max_tokens": 3})
    with pytest.raises(ShardlmError, match="1 prompts and 2 priorities"):
        llm.generate("a", short, priority=[0, 1])


def test_log_probabilities_are_found_by_token(llm):
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=0, ignore_eos=True)
    [output] = llm.generate("true", params)
    reply = output.outputs[0]
    told = [place[token] for place, token in zip(reply.logprobs, reply.token_ids, strict=True)]
    assert (
        reply.finished()
        and [one.rank for one in told] == [1] * 3
        and [len(place) for place in reply.logprobs] == [2] * 3
    )
    assert sum(one.logprob for one in told) == pytest.approx(reply.cumulative_logprob, abs=1e-5)
    assert "".join(one.decoded_token for one in told) == TOKENIZER.decode(reply.token_ids, skip_special=False)
    [rest] = [output.prompt_logprobs[1:]]
    assert [list(place) for place in rest] == [[token] for token in output.prompt_token_ids[1:]]


def test_no_other_tokens_are_written(llm):
    wanted = TOKENIZER.encode("xyab")[:4]
    for own in ({"temperature": 0}, {"seed": 1}, {"seed": 2, "logit_bias": {wanted[0]: -100}}):
        params = SamplingParams(max_tokens=12, allowed_token_ids=wanted, ignore_eos=True, **own)
        said = llm.generate("true", params)[0].outputs[0].token_ids
        assert len(said) == 12 and set(said) <= set(wanted)
        assert "logit_bias" not in own or wanted[0] not in said
    with pytest.raises(ShardlmError, match="allowed_token_ids has token 9999, outside the vocabulary"):
        llm.generate("true", SamplingParams(allowed_token_ids=[9999]))


def test_the_token_that_ends_a_reply_is_text_where_stops_are(llm):
    """As in vLLM, whose detokenizer leaves it out unless include_stop_str_in_output."""
    [whole] = llm.generate("true", GREEDY)
    ids = whole.outputs[0].token_ids
    for own, said in (({}, ids[:2]), ({"include_stop_str_in_output": True}, ids[:3]), ({"detokenize": False}, [])):
        params = dataclasses.replace(GREEDY, stop_token_ids=[ids[2]], **own)
        [reply] = llm.generate("true", params)[0].outputs
        assert (reply.token_ids, reply.stop_reason) == (ids[:3], ids[2]) and reply.text == TOKENIZER.decode(said)
    assert len(set(ids[:3])) == 3


def test_what_vllm_s_users_give_and_is_not_here(llm):
    user, none = [{"role": "user", "content": "né"}], {"lora_request": None, "tokenization_kwargs": None}
    assert llm.generate("true", GREEDY, **none)[0].finished
    assert llm.chat(user, GREEDY, chat_template_content_format="auto", **none)[0].finished
    for call, message in (
        (lambda: llm.generate(prompt_token_ids=[[1]]), "LLM.generate has no prompt_token_ids .* prompts that are"),
        (lambda: llm.generate(), "a prompt is a NoneType"),
        (lambda: llm.score("a", ["b"]), "takes no second text; numpy.dot of two vectors of LLM.embed"),
        (lambda: llm.generate("a", lora_request=1), "lora_request has a int; give shardlm.LoRARequest"),
        (lambda: llm.generate("a", sampling_parms=GREEDY), "did you mean sampling_params"),
        (lambda: llm.chat(user, chat_template_content_format="openai"), "templates are given contents as texts"),
    ):
        with pytest.raises(ShardlmError, match=message):
            call()
    with pytest.raises(AttributeError, match="LLM has no attribute 'encode'; embed gives a vector for each prompt"):
        llm.encode("a")
    assert not hasattr(llm, "nothing_so")
    with pytest.raises(AttributeError, match=r"stays as it was made.*dataclasses.replace\(it, max_tokens=5\) makes"):
        llm.get_default_sampling_params().max_tokens = 5


def test_chats_in_all_of_vllm_s_forms(llm):
    short, user = SamplingParams(temperature=0, max_tokens=2), {"role": "user", "content": "né"}
    for content in ("né", [{"type": "text", "text": "né"}]):
        [answer] = llm.chat([{"role": "developer", "content": content}], short, use_tqdm=False)
        assert answer.prompt == "system: né\n"
    both = llm.chat([[user], [{**user, "content": "日"}]], [short, short], chat_template_kwargs={"x": 1})
    assert [one.prompt for one in both] == ["user: né\n", "user: 日\n"]
    unended = {"add_generation_prompt": False, "continue_final_message": True}
    assert llm.chat([user, {"role": "assistant", "content": "ab "}], short, **unended)[0].prompt.endswith(
        "assistant: ab "
    )
    trims = "{% for m in messages %}{{ m.content | trim }}|{% endfor %}"
    assert llm.chat([{**user, "content": " ab "}], short, chat_template=trims, **unended)[0].prompt == "ab"
    for wrong, options, message in (
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            {},
            r"messages\[0\].content\[0\] is of type 'image_url'",
        ),
        ([{"content": "a"}], {}, r"messages\[0\].role=None must be a text"),
        (user, {}, "messages is a dict; give a list of messages"),
        ([user], {"continue_final_message": True}, "add_generation_prompt begins another; choose one"),
        ([{**user, "content": None}], unended, "does not show the content of the last message, ''"),
        ([user], {"chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs has tools"),
    ):
        with pytest.raises(ShardlmError, match=message):
            llm.chat(wrong, short, **options)


@pytest.mark.parametrize("place", ["a program", "what it gives", "the scheduler", "making it as new"])
def test_after_ctrl_c_it_says_what_it_said_before(llm, monkeypatch, place):
    """Wherever that comes: with the state in a program's hands, or a batch that is no longer waited for."""
    prompts, engine = ["true", '{"name": "ab"', "né日🙂"], llm.engine
    expected = [one.outputs[0].token_ids for one in llm.generate(prompts, GREEDY)]
    failed, runner, comes = engine.stats().failed_batches, engine.runner, iter([False, True])

    def interrupted(function, before):
        def call(*arguments):
            now = next(comes, False)
            if now and before:
                raise KeyboardInterrupt
            found = function(*arguments)
            if now:
                raise KeyboardInterrupt
            return found

        return call

    with monkeypatch.context() as patch:
        if place in ("a program", "making it as new"):
            patch.setattr(runner, "_programs", {k: interrupted(f, False) for k, f in runner._programs.items()})
        elif place == "the scheduler":
            patch.setattr(type(engine.scheduler), "_chunk_row", interrupted(type(engine.scheduler)._chunk_row, False))
        else:
            patch.setattr(Started, "sampled", interrupted(Started.sampled, True))
        if place == "making it as new":
            patch.setattr(runner, "reset", interrupted(runner.reset, True))
            comes = iter([True, True])
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, GREEDY)
    assert [one.outputs[0].token_ids for one in llm.generate(prompts, GREEDY)] == expected
    assert engine.stats().failed_batches == failed and not engine.has_unfinished and engine.stats().kv_usage == 0


def test_threads_take_turns(llm):
    """Each gets its own replies; a step that another thread took would keep them for ever."""
    texts = ["true", '{"name": "ab"', "né日🙂", "x y"]
    expected = [llm.generate(text, GREEDY)[0].outputs[0].token_ids for text in texts]
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        work = [threads.submit(llm.generate, text, GREEDY) for text in texts * 5]
        found = [future.result(60)[0].outputs[0].token_ids for future in work]
    assert found == expected * 5


def test_a_seed_of_all_replies(llm, monkeypatch):
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    said = []
    for _ in range(2):
        monkeypatch.setattr(llm, "_seeds", random.Random(3))
        said.append([one.outputs[0].token_ids for one in llm.generate(["true"] * 2, params)])
    assert said[0] == said[1] and said[0][0] != said[0][1]


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


def test_streams_of_a_folder(llm, monkeypatch):
    monkeypatch.setattr(async_llm, "build", lambda model, config: (llm.engine, None))
    served = AsyncLLM.from_model(llm.folder, block_size=4)
    assert served.template.render([{"role": "user", "content": "a"}]) == "user: a\n"
    facts, arrays = served.facts, jax.tree.leaves(llm.engine.runner.params)
    assert (facts.family, facts.held_in, facts.format, facts.on_gpu) == ("llama", "F32", "safetensors", False)
    assert facts.parameters == sum(array.size for array in arrays) and facts.nbytes == 4 * facts.parameters

    async def outputs(prompt):
        return [one async for one in served.generate(prompt, GREEDY, "one")]

    try:
        *_, last = asyncio.run(outputs({"prompt_token_ids": TOKENIZER.encode("true")}))
        with pytest.raises(PromptTooLong, match="the prompt has"):
            asyncio.run(outputs("true " * 2000))  # read beside the event loop
        with pytest.raises(ShardlmError, match="a prompt is a int"):
            asyncio.run(outputs(3))
    finally:
        served.shutdown()
    assert last.finished and len(last.outputs[0].token_ids) == 6


@contextlib.contextmanager
def serving(llm):
    """The engine over HTTP in a thread of its own; yields the address. The engine is at its end afterwards."""
    served = AsyncLLM(llm.engine, model_name="tiny", template=None)
    server, sock = Server(make_app(served, Settings()), Listen()), listening(Listen(port=0), 60)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([sock])), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
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
