"""/v1/files and /v1/batches by OpenAI's own client: batches to their ends, cancelled, and over the end of a server."""

import json
import re

import openai
import pytest
from client import Client, error
from fake_llm import FakeLLM
from sockets import serving, until

from shardlm.errors import ShardlmError
from shardlm.serve.api.app import make_app
from shardlm.serve.api.batches import routes, service, store
from shardlm.serve.api.settings import Settings


def line(custom_id, url="/v1/completions", **body):
    body = {"model": "fake", "prompt": "the fox", "max_tokens": 3} | body
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}) + "\n"


@pytest.fixture
def served(tmp_path):
    llm = FakeLLM()
    with serving(llm, batch_dir=str(tmp_path / "batches")) as (_, address), client_of(address) as client:
        yield llm, client


def client_of(address):
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60)


def sent(client, *lines, name="in.jsonl"):
    return client.files.create(file=(name, "".join(lines).encode()), purpose="batch")


def begun(client, *lines, endpoint="/v1/completions", **more):
    file = sent(client, *lines)
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more)


def ended(client, batch):
    until(lambda: client.batches.retrieve(batch.id).status in ("completed", "failed", "cancelled"))
    return client.batches.retrieve(batch.id)


def records(client, id):
    return {one["custom_id"]: one for one in map(json.loads, client.files.content(id).text.splitlines())}


def test_a_batch_from_its_file_to_its_answers(served):
    _, client = served
    batch = begun(client, *(line(f"{n}") for n in range(9)), line("wrong", model="other"), metadata={"of": "me"})
    assert (batch.object, batch.endpoint, batch.metadata) == ("batch", "/v1/completions", {"of": "me"})
    batch = ended(client, batch)
    counts = batch.request_counts
    assert batch.status == "completed" and (counts.total, counts.completed, counts.failed) == (10, 9, 1)
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    found, wrong = (records(client, id) for id in (batch.output_file_id, batch.error_file_id))
    assert found.keys() == {f"{n}" for n in range(9)} and wrong.keys() == {"wrong"}
    assert found["3"]["response"]["body"]["choices"][0]["text"] == "the quick brown"
    assert wrong["wrong"]["response"]["body"]["error"]["code"] == "model_not_found"
    names = [(file.filename, file.purpose) for file in client.files.list()]
    assert names == [
        (f"{batch.id}_error.jsonl", "batch_output"),
        (f"{batch.id}_output.jsonl", "batch_output"),
        ("in.jsonl", "batch"),
    ]


def test_they_are_in_the_document(tmp_path):
    """And nothing else is: what the application has routes for."""
    client = Client(FakeLLM(), batch_dir=str(tmp_path))
    document = client.get("/openapi.json").json()
    told = {(path, method) for path, found in document["paths"].items() for method in found}
    asked = [route for route in client.app.routes if route.path.startswith(("/v1/files", "/v1/batches"))]
    own = {(route.path, method.lower()) for route in asked for method in route.methods - {"HEAD"}}
    assert own == {one for one in told if one[0].startswith(("/v1/files", "/v1/batches"))} and len(own) == 9
    body = document["paths"]["/v1/batches"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    [_, name] = body["$ref"].split("#/components/schemas/")
    assert document["components"]["schemas"][name]["required"] == ["input_file_id", "endpoint"]


def test_a_limit_of_more_digits_than_python_reads_is_refused(tmp_path):
    client = Client(FakeLLM(), batch_dir=str(tmp_path))
    told = error(client.get(f"/v1/files?limit={'9' * 5000}"), 400)
    assert told["param"] == "limit" and "must be a number from 1" in told["message"]


def test_a_chat_and_embeddings(served):
    _, client = served
    messages = [{"role": "user", "content": "hi"}]
    for endpoint, body in {"/v1/chat/completions": {"messages": messages}, "/v1/embeddings": {"input": "a"}}.items():
        batch = ended(client, begun(client, line("a", endpoint, **body), endpoint=endpoint))
        assert batch.status == "completed" and batch.error_file_id is None
        assert records(client, batch.output_file_id)["a"]["response"]["status_code"] == 200


def test_files_that_cannot_be_asked_fail_whole(served, monkeypatch):
    llm, client = served
    batch = ended(
        client, begun(client, line("a"), "{\n", line("a"), line("b", "/v1/embeddings"), line("c", stream=True))
    )
    assert batch.status == "failed" and batch.output_file_id is None and not llm.seen
    assert [(one.line, one.code, one.param) for one in batch.errors.data] == [
        (2, "invalid_json_line", None),
        (3, "duplicate_custom_id", "custom_id"),
        (4, "invalid_url", "url"),
        (5, "stream_not_supported", "stream"),
    ]
    monkeypatch.setattr(service, "LINES", 2)
    for lines, code in (((" \n",), "empty_file"), (map(line, "abc"), "too_many_requests")):
        assert [one.code for one in ended(client, begun(client, *lines)).errors.data] == [code]


def test_cancelled_while_it_runs_and_while_it_waits(served):
    llm, client = served

    def reply(text):
        llm.delay = 1000 * ("slow" in text)
        return text

    llm.reply, llm.max_num_seqs = reply, 2  # one line at a time
    first = begun(client, line("a", prompt="quick"), line("b", prompt="slow"))
    second, third = begun(client, line("c", prompt="quick")), begun(client, line("d", prompt="quick"))
    until(lambda: client.batches.retrieve(first.id).request_counts.completed and llm.running)
    assert client.batches.cancel(second.id).status == "cancelled"
    assert client.batches.cancel(first.id).status == "cancelling"
    first = ended(client, first)
    assert first.status == "cancelled" and first.cancelled_at >= first.cancelling_at >= first.in_progress_at
    assert records(client, first.output_file_id).keys() == {"a"} and first.error_file_id is None
    assert ended(client, third).status == "completed" and client.batches.retrieve(second.id).output_file_id is None
    with pytest.raises(openai.ConflictError, match="is cancelled and cannot be cancelled"):
        client.batches.cancel(first.id)


def test_half_of_the_places_are_left_to_others(served):
    llm, client = served
    llm.delay = 1000
    batch = begun(client, *(line(f"{n}") for n in range(9)))
    until(lambda: len(llm.running) == llm.max_num_seqs // 2)
    llm.delay = 0
    assert client.completions.create(model="fake", prompt="a", max_tokens=1).choices[0].text == "the"
    assert ended(client, batch).request_counts.completed == 9


def test_the_next_server_goes_on(tmp_path):
    folder = str(tmp_path / "batches")
    llm = FakeLLM()
    with serving(llm, batch_dir=folder) as (_, address), client_of(address) as client:
        with pytest.raises(ShardlmError, match=f"batch_dir={folder} is another server's; give each its own"):
            make_app(FakeLLM(), Settings(batch_dir=folder))
        llm.delay = 0.01
        batch = begun(client, *(line(f"{n}") for n in range(60)))
        until(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 5)
        llm.delay = 1000  # nobody waits for those
    with serving(FakeLLM(), batch_dir=folder) as (_, address), client_of(address) as client:
        batch = ended(client, batch)
        assert batch.status == "completed" and batch.request_counts.completed == batch.request_counts.total == 60
        found = client.files.content(batch.output_file_id).text.splitlines()
        assert sorted(int(json.loads(one)["custom_id"]) for one in found) == list(range(60))
    assert 5 <= len(llm.seen) < 60


def test_an_engine_that_ends_leaves_the_batch(tmp_path):
    folder = str(tmp_path / "batches")
    with serving(FakeLLM(fail_at=1), batch_dir=folder) as (_, address), client_of(address) as client:
        batch = begun(client, line("a"))
        until(lambda: client.batches.retrieve(batch.id).status == "in_progress")
    with serving(FakeLLM(), batch_dir=folder) as (_, address), client_of(address) as client:
        assert ended(client, batch).request_counts.completed == 1


@pytest.mark.parametrize(("status", "then"), [("finalizing", "completed"), ("cancelling", "cancelled")])
def test_what_a_server_did_not_say_the_next_one_does(tmp_path, status, then):
    folder = tmp_path / "batches"
    with serving(FakeLLM(), batch_dir=str(folder)) as (_, address), client_of(address) as client:
        batch = ended(client, begun(client, line("a")))
    path = folder / f"{batch.id}.batch.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"status": status, "output_file_id": None}))
    with serving(llm := FakeLLM(), batch_dir=str(folder)) as (_, address), client_of(address) as client:
        until(lambda: client.batches.retrieve(batch.id).status == then)
        assert records(client, client.batches.retrieve(batch.id).output_file_id).keys() == {"a"} and not llm.seen


def test_lists_have_pages_and_files_go(served):
    _, client = served
    made = [sent(client, line("a"), name=f"{n}.jsonl") for n in range(5)]
    assert [file.filename for file in client.files.list(limit=2)] == [f"{n}.jsonl" for n in range(4, -1, -1)]
    assert [file.filename for file in client.files.list(limit=2, order="asc")] == [f"{n}.jsonl" for n in range(5)]
    page = client.files.list(limit=2, after=made[3].id)
    assert [file.id for file in page.data] == [made[2].id, made[1].id] and page.has_more
    assert client.files.delete(made[0].id).deleted and client.files.retrieve(made[1].id).bytes == len(line("a"))
    with pytest.raises(openai.NotFoundError, match="there is no file"):
        client.files.content(made[0].id)
    batches = [ended(client, begun(client, line("a"))).id for _ in range(3)]
    assert [batch.id for batch in client.batches.list(limit=1)] == batches[::-1]


def test_what_is_refused(served, monkeypatch):
    llm, client = served
    file = sent(client, line("a"))
    with pytest.raises(openai.BadRequestError, match="purpose must be"):
        client.files.create(file=b"a", purpose="assistants")
    with pytest.raises(openai.BadRequestError, match="file is missing, or empty"):
        client.files.create(file=b"", purpose="batch")
    with pytest.raises(openai.BadRequestError, match="endpoint='/v1/moderations' must be one of /v1/chat/completions"):
        client.batches.create(input_file_id=file.id, endpoint="/v1/moderations", completion_window="24h")
    with pytest.raises(openai.NotFoundError, match="there is no file 'file-no'"):
        client.batches.create(input_file_id="file-no", endpoint="/v1/completions", completion_window="24h")
    for ask in (client.batches.retrieve, client.batches.cancel):
        with pytest.raises(openai.NotFoundError, match="there is no batch 'no'"):
            ask("no")
    with pytest.raises(openai.BadRequestError, match="limit=0 must be a number from 1"):
        client.batches.list(limit=0)
    with pytest.raises(openai.BadRequestError, match="order=up must be asc or desc"):
        client.files.list(order="up")
    with pytest.raises(openai.BadRequestError, match="after=no is not in this list"):
        client.files.list(after="no")
    llm.delay = 1000
    batch = begun(client, line("a"))
    with pytest.raises(openai.ConflictError, match=f"the batch {batch.id} reads the file"):
        client.files.delete(batch.input_file_id)
    monkeypatch.setattr(store, "UNFINISHED", 1)
    with pytest.raises(openai.RateLimitError, match="1 batches wait"):
        begun(client, line("b"))
    monkeypatch.setattr(store, "FILES", 2)
    with pytest.raises(openai.RateLimitError, match="2 files, as many as it keeps"):
        sent(client, line("b"))
    monkeypatch.setattr(store, "FILES", 99)
    monkeypatch.setattr(routes, "FILE_BYTES", 0)
    with pytest.raises(openai.APIStatusError, match="the body is above 65536 bytes"):
        sent(client, line("b") * 2000)
    client.batches.cancel(batch.id)


def test_the_oldest_that_ended_are_forgotten(served, monkeypatch):
    _, client = served
    monkeypatch.setattr(store, "BATCHES", 2)
    batches = [ended(client, begun(client, line("a"))).id for _ in range(4)]
    assert [batch.id for batch in client.batches.list()] == batches[:1:-1]


def test_without_a_folder_there_are_none():
    client = Client()
    for method, path in (
        ("GET", "/v1/files"),
        ("POST", "/v1/files"),
        ("POST", "/v1/batches"),
        ("GET", "/v1/batches/x"),
    ):
        told = error(client.get(path) if method == "GET" else client.post(path, {}), 404)
        assert re.match(f"{method} {path}: ", told["message"])


@pytest.mark.parametrize(
    ("kind", "body", "status"),
    [
        ("application/json", b"{}", 415),
        ("multipart/form-data", b"{}", 415),
        ("multipart/form-data; boundary=x", b"", 400),
        ("multipart/form-data; boundary=x", b"--x\r\ncontent-disposition: form-data; name=purpose\r\n\r\nbatch", 400),
        ("multipart/form-data; boundary=x", b"--x\r\n\r\n\r\n--x--", 400),
    ],
)
def test_bodies_that_are_no_form(tmp_path, kind, body, status):
    client = Client(batch_dir=str(tmp_path / "batches"))
    error(client.post("/v1/files", raw=body, headers={"content-type": kind}), status)


def test_a_form_s_fields_are_bytes_as_they_came():
    content = bytes(range(256)) + b"\r\n--not-x\r\n\r\n"
    body = b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    body += (
        b'--x\r\ncontent-disposition: form-data; name="file"; filename="\xc3\xa9.jsonl"\r\ncontent-type: a/b\r\n\r\n'
    )
    found = routes.form(body + content + b"\r\n--x--\r\n", 'multipart/form-data; boundary="x"')
    assert found == {"purpose": ("", b"batch"), "file": ("é.jsonl", content)}
