"""The processes that serve and route, from their command lines to kill -9 and SIGTERM."""

import concurrent.futures
import json
import os
import pathlib
import signal
import subprocess
import sys
import urllib.request

import openai
import pytest
from fake_llm import FakeLLM
from replicas import serving
from sockets import until

HERE = pathlib.Path(__file__).parent
REPLICA = """
from fake_llm import FakeLLM
from launch import serve
from launch.flags import run

# Ten times as slow as the one that stays: when it is killed its streams have begun and none has ended.
run(lambda: serve.serve(FakeLLM(reply="word " * 20, delay=0.2)), needs_config=False)
"""
ROUTER = """
import sys
from launch import router
from launch.flags import run

def main():
    router.main()
    assert "jax" not in sys.modules

run(main, needs_config=False)
"""


@pytest.fixture
def launched():
    """A function that starts a program with some flags: the process."""
    path = os.pathsep.join([str(HERE.parents[2]), str(HERE.parent / "api")])
    environment = {**os.environ, "PYTHONPATH": path, "SHARDLM_ADMIN_KEY": "root", "SHARDLM_API_KEY": ""}
    processes = []

    def start(program, *words):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes.append(subprocess.Popen([sys.executable, "-c", program, *words], env=environment, **pipes))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def address_of(process):
    return process.stdout.readline().strip() or pytest.fail(process.communicate()[1])


def admin(address, body=None):
    """How many replicas are ready; with a body one is added."""
    data = body and json.dumps(body).encode()
    request = urllib.request.Request(f"{address}/admin/replicas", data, {"authorization": "Bearer root"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return sum(one["ready"] for one in json.load(response)["data"])


def test_a_replica_is_killed_under_load(launched):
    """What had produced nothing is answered by the other; what had begun ends with an error that says so."""
    with serving(FakeLLM(reply="word " * 20, delay=0.02)) as (_, stays):
        router = launched(ROUTER, "--port=0", "--poll_seconds=0.1", f"--replica={stays}")
        replica = launched(REPLICA, "--port=0")
        address = address_of(router)
        admin(address, {"url": address_of(replica)})
        until(lambda: admin(address) == 2)
        ends = under_load(address, replica.kill)
        assert {end for seen, end in ends if not seen} == set()
        broken = [end for _, end in ends if end]
        assert set(broken) <= {"the replica was lost; ask again", "Connection error."} and 0 < len(broken) <= 16
        until(lambda: admin(address) == 1)
        router.send_signal(signal.SIGTERM)
        assert router.wait(60) == 0
    log = router.communicate()[1]
    assert "is taken out" in log and "Traceback" not in log


def under_load(address, kill):
    """(whether a reply's first part came, what ended it) of each request; `kill` is called in their midst."""

    def one(number):
        seen = False
        ask = {"model": "fake", "prompt": f"{number}", "max_tokens": 20}
        try:
            for _ in client.completions.create(**ask, stream=bool(number % 2)):
                seen = True
        except openai.APIError as error:
            return seen, str(error)
        return True, ""

    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60)
    with client, concurrent.futures.ThreadPoolExecutor(16) as pool:
        work = [pool.submit(one, number) for number in range(64)]
        until(lambda: sum(future.done() for future in work) >= 16)  # the threads are in their second requests
        kill()
        return [future.result() for future in work]


def test_a_command_line_that_cannot_be(launched):
    process = launched(ROUTER, "--port=0", "--replica=http://a", "--replica_ca=nowhere.pem")
    assert process.wait(60) == 1
    assert "error: replica_ca=nowhere.pem is no file of certificates" in process.communicate()[1]
