"""Files of requests: what is asked, what comes of lines that cannot be, and runs that end early and go on."""

import asyncio
import collections
import gzip
import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest
from client import Client
from fake_llm import FakeLLM
from sockets import until

from shardlm.errors import ShardlmError
from shardlm.serve.api.app import POSTS, endpoints
from shardlm.serve.api.batches.files import Input, Output, numbered
from shardlm.serve.api.batches.run import Counts, run
from shardlm.serve.api.service import Service
from shardlm.serve.api.settings import Settings
from shardlm.serve.outputs import EngineError

HERE = pathlib.Path(__file__).parent
LAUNCHER = """
import signal
import sys
from fake_llm import FakeLLM
from launch import model_flags, run_batch
from launch.flags import run

def opened(processes, paced):
    assert processes == 1 and not paced and "jax" not in sys.modules
    return FakeLLM(**{options}), {{}}

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell starts in the background
model_flags.opened = opened
run(run_batch.main, needs_config=False, processes=True, other_names=run_batch.OF_VLLM)
"""
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


def line(custom_id, url="/v1/completions", body=None, **more):
    body = {"prompt": "the fox", "max_tokens": 3} if body is None else body
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body} | more


def written(path, lines):
    """A file of these lines, JSON or as they are."""
    path.write_bytes(b"".join((x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n" for x in lines))
    return path


def answers(path):
    found = [json.loads(one) for one in path.read_text().splitlines()]
    assert all(one.keys() == {"id", "custom_id", "response", "error"} for one in found)
    assert len({one["id"] for one in found}) == len(found)
    return found


def batch(source, target, llm=None, resume=False, most=4, **settings):
    """The counts of a run."""
    llm, counts = llm or FakeLLM(), Counts()
    service, output = Service(llm, Settings(**settings)), Output(str(target), resume)
    requests = Input(str(source), 2**20)
    how = {"most": most, "check": llm.check_health}
    write = lambda record, _: output.write(record)  # noqa: E731
    try:
        asyncio.run(run(requests.lines(), endpoints(service), write, output.known, counts, **how))
    finally:
        output.close()
    return counts


def test_each_address_answers_as_the_server_does(tmp_path):
    bodies = {
        "/v1/chat/completions": CHAT,
        "/v1/completions": {"prompt": ["a", "b"], "max_tokens": 2, "logprobs": 1},
        "/v1/responses": {"input": "hi", "max_output_tokens": 3},
        "/v1/responses/input_tokens": {"input": "hi"},
        "/v1/messages": {"model": "fake", "max_tokens": 3, "messages": CHAT["messages"]},
        "/v1/messages/count_tokens": {"model": "fake", "messages": CHAT["messages"]},
        "/v1/embeddings": {"input": ["a", "b"], "encoding_format": "base64"},
        "/pooling": {"input": "a"},
        "/classify": {"input": "a"},
        "/score": {"text_1": "a", "text_2": ["b", "c"]},
        "/rerank": {"query": "a", "documents": ["b", "c"]},
        "/tokenize": {"prompt": "a"},
        "/detokenize": {"tokens": [65]},
    }
    aliases = {"/v1/score": "/score", "/v1/rerank": "/rerank", "/v2/rerank": "/rerank"}
    bodies |= {path: bodies[own] for path, own in aliases.items()}
    assert bodies.keys() == POSTS.keys()
    source = written(tmp_path / "in", [line(url, url + "/" * (url == "/score"), body) for url, body in bodies.items()])
    counts = batch(source, tmp_path / "out")
    found = {one["custom_id"]: one for one in answers(tmp_path / "out")}
    assert found.keys() == bodies.keys() and counts.running == 0
    client = Client()
    for url, body in bodies.items():
        response, error = found[url]["response"], found[url]["error"]
        own = client.post(url, body)
        assert error is None and response["status_code"] == own.status_code == (400 if url == "/classify" else 200)
        assert response["body"].keys() == own.json().keys() and response["request_id"]
    assert (counts.done, counts.failed) == (len(bodies) - 1, 1)
    chat = found["/v1/chat/completions"]["response"]
    assert chat["body"]["choices"][0]["message"]["content"] == "the quick brown"
    assert chat["request_id"] in chat["body"]["id"]


REFUSED = {
    b'{"custom_id": "x", ': "invalid_json_line",
    b'["custom_id"]': "invalid_json_line",
    b'{"custom_id": "\xff"}': "invalid_json_line",
    b"[" * 5000: "invalid_json_line",
    json.dumps(line(7)).encode(): "invalid_custom_id",
    json.dumps(line("")).encode(): "invalid_custom_id",
    json.dumps(line("get", method="GET")).encode(): "invalid_method",
    json.dumps(line("url", url="/v1/moderations")).encode(): "invalid_url",
    json.dumps(line("admin", url="/update_weights")).encode(): "invalid_url",
    b'{"custom_id": "none", "method": "POST", "url": "/v1/completions"}': "missing_required_parameter",
    json.dumps(line("stream", body={"prompt": "a", "stream": True})).encode(): "stream_not_supported",
    json.dumps(line("good")).encode(): "duplicate_custom_id",
    json.dumps(line("long", body={"prompt": "a" * 2**20})).encode(): "line_too_long",
}


def test_lines_that_cannot_be_asked_have_an_error_and_end_nothing(tmp_path):
    source = written(tmp_path / "in", [line("good"), b"  ", *REFUSED, line("last")])
    counts = batch(source, tmp_path / "out")
    found = answers(tmp_path / "out")
    errors = {one["error"]["line"]: one for one in found if one["error"]}
    assert [errors[3 + i]["error"]["code"] for i in range(len(REFUSED))] == list(REFUSED.values())
    assert all(one["response"] is None and one["error"]["message"] for one in errors.values())
    assert {one["custom_id"] for one in found if one["response"]} == {"good", "last"}
    assert {one["custom_id"] for one in errors.values()} == {None, "get", "url", "admin", "none", "stream", "good"}
    assert (counts.done, counts.failed) == (2, len(REFUSED))


def test_what_a_handler_refuses_is_its_answer(tmp_path):
    wrong = [line("model", body={"model": "other", "prompt": "a"}), line("type", body={"prompt": 7.5})]
    wrong += [line("text", body="a"), line("n", body={"prompt": "a", "n": 99999}), line("t", body={"temperature": -1})]
    counts = batch(written(tmp_path / "in", wrong), tmp_path / "out")
    found = {one["custom_id"]: one["response"] for one in answers(tmp_path / "out")}
    assert {name: one["status_code"] for name, one in found.items()} == {
        "model": 404,
        "type": 400,
        "text": 400,
        "n": 400,
        "t": 400,
    }
    assert found["model"]["body"]["error"]["code"] == "model_not_found" and (counts.done, counts.failed) == (0, 5)


class Watched(FakeLLM):
    """Counts how many run at once."""

    most = 0

    async def generate(self, *args, **kwargs):
        async for output in super().generate(*args, **kwargs):
            self.most = max(self.most, len(self.running))
            yield output


def test_so_many_at_once_and_as_they_end(tmp_path):
    llm = Watched(reply=lambda text: "word " * (1 if "short" in text else 200))
    lines = [line("0", body={"prompt": "long", "max_tokens": 200})]
    lines += [line(str(i), body={"prompt": "short", "max_tokens": 1}) for i in range(1, 30)]
    batch(written(tmp_path / "in", lines), tmp_path / "out", llm, most=5)
    order = [one["custom_id"] for one in answers(tmp_path / "out")]
    assert llm.most == 5 and sorted(order, key=int) == [str(i) for i in range(30)] and order[-1] == "0"


def test_no_room_is_asked_again(tmp_path, monkeypatch):
    monkeypatch.setattr("shardlm.serve.api.batches.run.AGAIN_SECONDS", 0.001)
    counts = batch(written(tmp_path / "in", [line(str(i)) for i in range(20)]), tmp_path / "out", max_queue=1, most=20)
    assert (counts.done, counts.failed) == (20, 0)


TOLD = [
    *(("a", None), ("b", None), ("c", None), (None, "invalid_json_line"), ("d", "invalid_method")),
    *(("a", "duplicate_custom_id"), ("c", "duplicate_custom_id")),
]


def test_a_run_goes_on(tmp_path):
    """Whatever was refused, and half a line at the end of what was killed."""
    lines = [line("a"), b"{", line("b"), line("a", url="/no"), line("c"), line("c"), line("d", method="GET")]
    source, target = written(tmp_path / "in", lines), tmp_path / "out"
    batch(source, target)
    whole = target.read_bytes().splitlines(keepends=True)
    with pytest.raises(ShardlmError, match=r"out is there and has [\d,]+ bytes: --resume"):
        Output(str(target), resume=False)
    assert batch(source, target, resume=True) == Counts(before=7)
    for kept in range(len(whole)):
        target.write_bytes(b"".join(whole[:kept]) + whole[kept][: 1 + len(whole[kept]) // 2])
        counts = batch(source, target, resume=True)
        assert counts.before == kept and counts.done + counts.failed == 7 - kept
        told = [(one["custom_id"], (one["error"] or {}).get("code")) for one in answers(target)]
        assert collections.Counter(told) == collections.Counter(TOLD)


def test_lines_that_were_mended_are_asked(tmp_path):
    source, target = written(tmp_path / "in", [line("a"), b"{"]), tmp_path / "out"
    batch(source, target)
    assert batch(written(source, [line("a"), line("b")]), target, resume=True) == Counts(done=1, before=1)


def test_an_engine_that_ends_leaves_its_lines_for_later(tmp_path):
    source, target = written(tmp_path / "in", [line(str(i)) for i in range(9)]), tmp_path / "out"
    llm = FakeLLM(reply=lambda text: "word " * 3)
    counted = 0

    def breaks(text):
        nonlocal counted
        counted += 1
        llm.fail_at = 1 if counted > 5 else None
        return "word " * 3

    llm.reply = breaks
    with pytest.raises(EngineError, match="the device is lost"):
        batch(source, target, llm, most=1)
    assert [one["response"]["status_code"] for one in answers(target)] == [200] * 5
    assert batch(source, target, resume=True) == Counts(done=4, before=5)


def test_files_that_cannot_be(tmp_path):
    for path in (tmp_path, tmp_path / "none", tmp_path / "none.gz"):
        with pytest.raises(ShardlmError, match=f"cannot read {path}: "):
            Input(str(path), 9)
    with pytest.raises(ShardlmError, match=r"cannot write .*/none/out: No such file"):
        Output(str(tmp_path / "none" / "out"), resume=False)
    with pytest.raises(ShardlmError, match="--resume reads what an earlier run wrote: give a file"):
        Output("-", resume=True)
    source = written(tmp_path / "in", [line("a")])
    with pytest.raises(ShardlmError, match=r"line 1 of .*in is no answer of a batch"):
        Output(str(source), resume=True)
    first = Output(str(tmp_path / "out"), resume=False)
    with pytest.raises(ShardlmError, match="out is being written by another run"):
        Output(str(tmp_path / "out"), resume=False)
    first.close()
    Output(str(tmp_path / "out"), resume=False).close()  # nothing is in it


def test_a_disk_without_room_leaves_whole_lines(tmp_path, monkeypatch):
    output, write = Output(str(tmp_path / "out"), resume=False), os.write
    output.write(b"whole\n")
    calls = iter([lambda file, data: write(file, data[:3]), lambda *_: (_ for _ in ()).throw(OSError(28, "No space"))])
    monkeypatch.setattr(os, "write", lambda file, data: next(calls)(file, data))
    with pytest.raises(ShardlmError, match=r"cannot write .*out: No space \(.* free on its file system\)"):
        output.write(b"second\n")
    assert (tmp_path / "out").read_bytes() == b"whole\n"
    output.close()


def test_compressed_and_cut_off(tmp_path):
    lines = [line(str(i), body={"prompt": os.urandom(200).hex(), "max_tokens": 1}) for i in range(2000)]
    whole = gzip.compress(written(tmp_path / "in", lines).read_bytes())
    (tmp_path / "in.gz").write_bytes(whole)
    assert batch(tmp_path / "in.gz", tmp_path / "out", most=16) == Counts(done=2000)
    (tmp_path / "in.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ShardlmError, match=r"cannot read .*in\.gz: "):
        batch(tmp_path / "in.gz", tmp_path / "half", most=16)
    assert 500 < sum(one["response"]["status_code"] == 200 for one in answers(tmp_path / "half")) < 1500


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_lines_in_pieces_of_any_size(size):
    text = b"\xef\xbb\xbfone\r\n\n  \ntoo long, this\nfour\n" + b"x" * 50 + b"\nlast"
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    found = [one for some in numbered(iter([*pieces, b""]).__next__, 9) for one in some]
    assert found == [(1, b"one"), (4, None), (5, b"four"), (6, None), (7, b"last")]


@pytest.fixture
def launched(tmp_path):
    """A function that starts the launcher over a FakeLLM of these options."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parents[2]), str(HERE)])}
    processes = []

    def start(*words, stdin=subprocess.DEVNULL, **options):
        (tmp_path / "launcher.py").write_text(LAUNCHER.format(options=options))
        command = [sys.executable, tmp_path / "launcher.py", "--model=fake", *map(str, words)]
        pipes = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes.append(subprocess.Popen(command, env=environment, **pipes))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_the_command(launched, tmp_path):
    source = written(tmp_path / "in", [line("a"), b"{", line("b", body={"model": "x", "prompt": "a"})])
    process = launched("-i", source, "-o", tmp_path / "out")
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0 and len(answers(tmp_path / "out")) == 3, said
    assert "lines: 1 answered, 2 failed; 0 under way, 100% of the input read; " in said and " 3 written in " in said
    for words, message in {
        ("-i", source): "--input_file=REQUESTS.jsonl and --output_file=ANSWERS.jsonl are needed",
        ("-i", source, "-o", tmp_path / "out"): "out is there and has",
        ("-i", tmp_path / "none", "-o", tmp_path / "new"): "cannot read",
        ("--served-model-name=x",): "here it is --model_names",
        ("--enable-metrics",): "launch.serve has metrics",
    }.items():
        process = launched(*words)
        _, said = process.communicate(timeout=60)
        assert process.returncode == 1 and message in said and "Traceback" not in said
    process = launched("-i", source, "-o", tmp_path / "dead", fail_at=1)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "error: the device is lost; lines written: 2, and --resume goes on with the others" in said


def test_through_pipes_each_answer_comes_when_it_is_there(launched):
    process = launched("-i", "-", "-o", "-", "--model_names=m", stdin=subprocess.PIPE)
    for name in "abc":
        process.stdin.write(json.dumps(line(name, "/v1/chat/completions", {"model": "m", **CHAT})) + "\n")
        process.stdin.flush()
        found = json.loads(process.stdout.readline())
        assert (found["custom_id"], found["response"]["body"]["model"]) == (name, "m")
    said, told = process.communicate(timeout=60)  # which closes the pipe
    assert (said, process.returncode) == ("", 0) and "lines: 3 answered, 0 failed; 0 under way; " in told


def test_killed_and_resumed(launched, tmp_path):
    source, target = written(tmp_path / "in", [line(str(i)) for i in range(60)]), tmp_path / "out"
    process = launched("-i", source, "-o", target, delay=0.02)
    until(lambda: target.exists() and target.read_bytes().count(b"\n") >= 10)
    process.kill()
    process.wait()
    assert target.read_bytes().endswith(b"\n") and 10 <= (had := len(answers(target))) < 60
    process = launched("-i", source, "-o", target, "--resume")
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0 and f"lines: {60 - had} answered, 0 failed, {had} before" in said, said
    assert sorted(int(one["custom_id"]) for one in answers(target)) == list(range(60))


def test_interrupted(launched, tmp_path):
    source, target = written(tmp_path / "in", [b"{", line("a")]), tmp_path / "out"
    process = launched("-i", source, "-o", target, delay=1000)
    until(lambda: target.exists() and target.read_bytes())
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and said.endswith("interrupted\n") and "Traceback" not in said
    assert [one["error"]["code"] for one in answers(target)] == ["invalid_json_line"]
