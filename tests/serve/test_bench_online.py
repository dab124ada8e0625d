"""The load test's client and its arithmetic, against a server whose replies and delays are known."""

import asyncio
import json
import math
import pathlib
import subprocess
import sys

import pytest
from commands import run

from shardlm.errors import ShardlmError
from shardlm.serve.bench import online, workload
from shardlm.serve.bench.client import Client
from shardlm.serve.bench.seen import TIMES, Seen, limits_of, summary
from shardlm.serve.bench.workload import Job

sys.path.append(str(pathlib.Path(__file__).parent / "api"))
from fake_llm import FakeLLM

from shardlm.serve.api.app import make_app
from shardlm.serve.api.server import Listen, Server, listening
from shardlm.serve.api.settings import Settings

ROOT = pathlib.Path(__file__).parents[2]
DELAY = 0.03
CHAT = {"messages": [{"role": "user", "content": "a"}]}
JOBS = {"prompt": Job({"prompt": "a", "max_tokens": 5}), "chat": Job(CHAT | {"max_tokens": 5})}


class Counting(FakeLLM):
    """most: requests that ran at once. together: so many must, before any ends."""

    most = together = 0

    async def _replies(self, *asked):
        self.most = max(self.most, len(self.running))
        async for outputs in super()._replies(*asked):
            yield outputs
            async with asyncio.timeout(60):
                while self.most < self.together:
                    await asyncio.sleep(0.001)


def served(work, reply="quick" * 5, template="qwen25", **settings):
    """What `work(url)` returns, a coroutine, while a server listens whose reply of 5 tokens takes 5 * DELAY or more."""

    async def both():
        llm = Counting(reply=reply, delay=DELAY, template_name=template)
        server = Server(make_app(llm, Settings(api_keys=("key",), **settings)), Listen())
        sock = listening(Listen(port=0), 60)
        serving = asyncio.create_task(server.serve([sock]))
        try:
            return await work(f"http://127.0.0.1:{sock.getsockname()[1]}/v1", llm), llm
        finally:
            server.should_exit = True
            await serving

    return asyncio.run(both())


def test_times_are_those_of_the_server():
    async def work(url, llm):
        client = Client(url, "key")
        asked, most, said = [], [], []

        def jobs(seed):
            asked.append(seed)
            most.append(llm.most)
            llm.most, llm.together = 0, {1: 6, 3: 3}.get(seed, 0)
            return [JOBS["prompt"]] * 6

        limits = {"ttft": 10 * DELAY, "e2e": 3 * DELAY}
        return (
            await online.bench(client, jobs, rates=[math.inf, 20.0], concurrency=[3], limits=limits, tell=said.append),
            asked,
            most,
            client,
            said,
        )

    ((reports, asked, most, client, said), llm) = served(work)
    at_once, poisson, three = reports
    wanted = [f"request_rate=inf: 6 requests in {at_once['seconds']:.1f} s", "request_rate=20.0: ", "concurrency=3: "]
    assert all(one.startswith(begun) for one, begun in zip(said, wanted, strict=True))
    assert client.model == "fake" and asked == [0, 1, 2, 3] and len(llm.seen) == 1 + 3 * 6
    assert at_once["request_rate"] == "inf" and poisson["request_rate"] == 20 and three["concurrency"] == 3
    for report in reports:
        assert (report["requests"], report["failed"], report["output_tokens"]) == (6, 0, 30)
        assert report["output_tokens_per_second"] * report["seconds"] == pytest.approx(30)
        assert report["ttft_seconds"]["p50"] >= DELAY and report["e2e_seconds"]["p50"] >= 5 * DELAY
        # A first token that was seen late makes what follows seem quick.
        mean = {name: report[f"{name}_seconds"]["mean"] for name in TIMES}
        assert 4 * mean["tpot"] == pytest.approx(mean["e2e"] - mean["ttft"]) and 0 < mean["itl"] < 1.001 * mean["tpot"]
        assert report["goodput"]["share"] == 0  # 5 tokens take longer than e2e's limit
    assert most[2] == 6 and llm.most == 3 and three["seconds"] >= 2 * 5 * DELAY


def test_thoughts_count_as_text():
    async def work(url, llm):
        client = Client(url, "key")
        await client.find_model()
        job = Job({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 40})
        return [event async for event in client.stream(job)]

    events, _ = served(work, "<think>" + "quick" * 3, "qwen3")
    texts = [has for has, _ in events]
    assert sum(texts) > 2 and texts[0] is False  # the mark brings none; without thoughts none would
    assert events[-1][1] > 3


def test_requests_that_fail_are_counted_and_the_others_go_on():
    async def work(url, llm):
        client = Client(url, "key", model="fake")
        bad = Job({"prompt": "a", "max_tokens": -1})
        seen = await online.at_once(client.stream, [JOBS["chat"], bad, JOBS["prompt"]], 2)
        for wrong, message in ((Client(url, "wrong"), "401"), (Client("http://127.0.0.1:9", "key"), "names no model")):
            with pytest.raises(ShardlmError, match=message):
                await online.bench(wrong, lambda seed: [JOBS["prompt"]], rates=[1.0], concurrency=[], limits={})
        with pytest.raises(ShardlmError, match=r"first request failed: RequestError.*max_tokens=-1"):
            await online.bench(client, lambda seed: [bad], rates=[1.0], concurrency=[], limits={})
        return summary(seen, 2.0, {"e2e": 60.0})

    report, _ = served(work)
    assert (report["requests"], report["failed"]) == (3, 1) and "max_tokens=-1" in report["first_error"]
    assert report["output_tokens"] == 10 and report["goodput"] == {
        "limits_seconds": {"e2e": 60.0},
        "share": 2 / 3,
        "requests_per_second": 1.0,
    }


def test_percentiles_and_goodput_by_hand():
    seen = [Seen(first=0.1 * i, gaps=[0.1, 0.3], whole=0.1 * i + 0.4, tokens=5) for i in (1, 2, 3)]
    report = summary([*seen, Seen(error="x")], 10.0, {"ttft": 0.25, "itl": 0.3})
    assert report["ttft_seconds"] == pytest.approx({"mean": 0.2, "p50": 0.2, "p90": 0.28, "p99": 0.298})
    assert report["tpot_seconds"]["p50"] == pytest.approx(0.1) and report["itl_seconds"]["mean"] == pytest.approx(0.2)
    assert report["goodput"]["share"] == 0.5 and report["goodput"]["requests_per_second"] == 0.2
    assert summary([Seen(error="x")], 1.0, {})["ttft_seconds"] == {}


def test_workloads(tmp_path):
    a, b = workload.prompts(2, 9, 4, 50, seed=1)
    assert a[:4] == b[:4] and a[4:] != b[4:] and len(b) == 9 and workload.prompts(2, 9, 4, 50, seed=1) == [a, b]
    file = tmp_path / "chats.jsonl"
    talk = [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    entries = [
        {"prompt": "p", "max_tokens": 3},
        {"messages": [{"role": "user", "content": "m"}]},
        {"conversations": talk},
    ]
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    jobs = workload.file_jobs(file, 4, 7, seed=0)
    assert len(jobs) == 4 and jobs[3] == jobs[0]
    by_path = {(job.path, job.body["max_tokens"]): job for job in jobs}
    assert by_path.keys() == {("/v1/completions", 3), ("/v1/chat/completions", 7)}
    asked = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    assert any(job.body.get("messages") == asked for job in jobs)
    file.write_text(json.dumps(entries))  # as one list
    assert workload.file_jobs(file, 4, 7, seed=0) == jobs
    for text, message in (
        ("{", "cannot be read"),
        ("", "holds no requests"),
        ('{"text": 1}', "entry 1: an entry is an"),
    ):
        file.write_text(text)
        with pytest.raises(ShardlmError, match=message):
            workload.file_jobs(file, 1, 1, 0)
    with pytest.raises(ShardlmError, match="above prompt_len=3"):
        workload.prompts(1, 3, 4, 9)


def test_lengths_are_spread_evenly():
    assert workload.spread(100, 0.1) == range(90, 111) and workload.spread(9, 0) == range(9, 10)
    assert workload.spread(1, 0.9) == range(1, 3)
    jobs = workload.random_jobs(400, 10, 20, 4, 50, seed=1, ratio=0.5)
    both = [(len(job.body["prompt"]), job.body["max_tokens"]) for job in jobs]
    assert both == workload.lengths(400, 10, 20, 0.5, seed=1) != workload.lengths(400, 10, 20, 0.5, seed=2)
    assert {asked for asked, _ in both} == set(range(5, 16)) and {told for _, told in both} == set(range(10, 31))
    assert len({tuple(job.body["prompt"][:4]) for job in jobs}) == 1
    equal = workload.random_jobs(2, 10, 20, 4, 50, seed=1)
    assert [job.body["prompt"] for job in equal] == workload.prompts(2, 10, 4, 50, seed=1)
    with pytest.raises(ShardlmError, match="range_ratio=1 is a share of the lengths"):
        workload.random_jobs(1, 10, 20, 0, 50, 0, ratio=1.0)
    with pytest.raises(ShardlmError, match=r"prompt_len=10, of which range_ratio=0\.5 makes the shortest 5"):
        workload.random_jobs(1, 10, 20, 6, 50, 0, ratio=0.5)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("serve", "--url=http://a", "--rates=1", "--tensor=2"),
            "--tensor is of an engine in this process, and a server",
        ),
        (
            ("serve", "--url=http://a", "--rates=1", "--turns=2"),
            "--turns is of an engine in this process, and a server",
        ),
        (
            ("train", "--config=configs/tiny.py", "--quantization=int8"),
            "--quantization is of an engine in this process",
        ),
        (("serve", "--config=configs/tiny.py", "--rates=1", "--vocab=9"), "--vocab=9 goes with --url; of a model of"),
    ],
    ids=["engine", "turns", "train", "vocab"],
)
def test_flags_that_nothing_heeds(words, told):
    done = run("launch.bench", *words)
    assert done.returncode == 1 and f"error: {told}" in done.stderr


def test_command_lines_that_cannot_be(tmp_path):
    with pytest.raises(ShardlmError, match="a limit is NAME:SECONDS, of ttft, tpot"):
        limits_of(["ttft:1", "tfft:1"])
    with pytest.raises(ShardlmError, match="is no address of a server"):
        Client("nowhere")
    command = [sys.executable, "-m", "launch.bench", "serve", "--url=http://a", "--rates=x"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == "error: rates=x must be numbers above 0\n"
    done = run("launch.bench", "serve", "--config=configs/tiny.py", "--rates=1", "--plot=x.txt")
    assert done.returncode == 1 and "--plot=x.txt: the name must end in .png" in done.stderr
    (tmp_path / "f.jsonl").write_text('{"prompt": "all words of which would be one token"}')
    asked = ("--config=configs/bench_768x12.py", "--rates=1", f"--file={tmp_path / 'f.jsonl'}")
    done = run("launch.bench", "serve", *asked)
    assert done.returncode == 1 and "f.jsonl has texts, and a model of random weights has no tokenizer" in done.stderr
