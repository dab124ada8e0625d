"""The process that serves, from its command line to SIGTERM."""

import json
import os
import pathlib
import resource
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest
from absl import flags
from absl.testing import flagsaver

from launch import engine_flags, serve
from shardlm.errors import ShardlmError
from shardlm.progress_bar import compiling
from shardlm.serve.api.server import CONNECTIONS
from shardlm.serve.media import MediaRules

HERE = pathlib.Path(__file__).parent
LAUNCHER = """
import sys
from fake_llm import FakeLLM
from launch import serve
from launch.flags import run

def main():
    held = serve.hold(serve.listen(8000), serve.settings())
    serve.serve(FakeLLM(reply="word " * 20, delay=0.02), held=held)
    assert "jax" not in sys.modules

run(main, needs_config=False)
"""


@pytest.fixture
def launched(tmp_path):
    """A function that starts the launcher with some flags."""
    file = tmp_path / "launcher.py"
    file.write_text(LAUNCHER)
    path = os.pathsep.join([str(HERE.parents[2]), str(HERE)])
    environment = {**os.environ, "PYTHONPATH": path, "SHARDLM_API_KEY": "secret"}
    processes = []

    def start(*words):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        few = ["sh", "-c", 'ulimit -Sn 256; exec "$@"', "sh"]  # files
        processes.append(subprocess.Popen([*few, sys.executable, file, *words], env=environment, **pipes))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_from_the_command_line_to_sigterm(launched):
    process = launched("--port=0", "--model_names=one,two", "--max_queue=7", "--tool_style=llama", "--access_log")
    address = process.stdout.readline().strip()
    assert address.startswith("http://127.0.0.1:")
    files, most = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    assert files == (CONNECTIONS if most == resource.RLIM_INFINITY else min(CONNECTIONS, most)) > 256
    body = json.dumps({"model": "two", "prompt": "a", "max_tokens": 20, "stream": True}).encode()
    request = urllib.request.Request(f"{address}/v1/completions", body, {"authorization": "Bearer secret"})
    with urllib.request.urlopen(request, timeout=60) as response:
        first = response.readline()
        process.send_signal(signal.SIGTERM)
        rest = response.read()
    assert first.startswith(b"data: ") and b'"model":"two"' in first and rest.endswith(b"data: [DONE]\n\n")
    assert process.wait(60) == 0
    lines, log = process.communicate()
    assert "POST /v1/completions" in lines and "no new requests" in log and "Traceback" not in log


def test_a_command_line_that_cannot_be(launched):
    process = launched("--certificate=nowhere.pem")
    assert process.wait(60) == 1 and "error: https needs both files" in process.stderr.read()


def test_where_images_come_from_and_how_many():
    words = ["x", "--allowed_media_domains=a.example,b.example", f"--allowed_local_media_path={HERE}"]
    with flagsaver.flagsaver():
        flags.FLAGS(words)
        assert serve.settings().media == MediaRules(("a.example", "b.example"), str(HERE))
        assert engine_flags.engine_options()["limit_mm_per_prompt"] is None
        for given in ("image=3", '{"image": 3}'):
            flags.FLAGS(["x", f"--limit_mm_per_prompt={given}"])
            assert engine_flags.engine_options()["limit_mm_per_prompt"] == {"image": 3}
        for given in ("cats", "image=many"):
            flags.FLAGS(["x", f"--limit_mm_per_prompt={given}"])
            with pytest.raises(ShardlmError, match=f"--limit_mm_per_prompt={given}: give .* or image=N"):
                engine_flags.engine_options()
        flags.FLAGS(["x", "--allowed_local_media_path=/no/such"])
        with pytest.raises(ShardlmError, match="allowed_local_media_path=/no/such is no folder"):
            serve.settings()


def test_a_port_that_is_taken_is_said_before_a_model_is_opened():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = ["-m", "launch.serve", "--model=nothing", f"--port={port}"]
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    assert done.returncode == 1 and f"cannot listen at 127.0.0.1 port {port}" in done.stderr, done.stderr


def test_a_folder_of_batches_that_cannot_be_is_said_before_a_model_is_opened(tmp_path):
    (file := tmp_path / "file").touch()
    words = ["-m", "launch.serve", "--model=nothing", "--port=0", f"--batch_dir={file}"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    assert done.returncode == 1 and f"error: batch_dir={file} cannot be used: File exists" in done.stderr, done.stderr


def test_flags_of_vllm_are_told_their_names():
    said = {
        "--tensor-parallel-size=2": "error: there is no flag --tensor-parallel-size; here it is --tensor\n",
        "--no-enable-prefix-caching": "no flag --no-enable-prefix-caching; here it is --noenable_prefix_caching\n",
        "--enforce-eager": "no flag --enforce-eager: it is vLLM's and decides nothing here: leave it out\n",
        "FOLDER": "error: unexpected arguments: FOLDER; options begin with --, as --model=FOLDER\n",
        "--revision=x": "no flag --revision: the hub's main branch is read, into HF_HOME; fetch another one yourself",
        "--nothing-so": "Unknown command line flag 'nothing-so'",
    }
    for word, message in said.items():
        done = subprocess.run([sys.executable, "-m", "launch.serve", word], capture_output=True, text=True)
        assert done.returncode == 1 and message in done.stderr, done.stderr


def test_a_log_says_how_far_compiling_is(capsys):
    times = iter([0.0, 1.0, 16.0, 16.0, 20.0, 40.0, 40.0])
    progress = compiling(lambda: next(times))
    for done in range(1, 5):
        progress(done, 20)
    assert capsys.readouterr().err == "compiled 2 of 20 programs\ncompiled 4 of 20 programs\n"
