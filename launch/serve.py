"""Serves a model over OpenAI's HTTP API.

python -m launch.serve --model=runs/tiny
python -m launch.serve --model=FOLDER --tensor=4 --max_model_len=8192 --port=8000

One model over several hosts: the same command on each, with --distributed where srun, mpirun or Kubernetes starts them,
or with

  --coordinator_address=host0:1234 --num_processes=2 --process_id=0   # and 1 on host1

Process 0 has the port.

Clients: OpenAI(base_url="http://localhost:8000/v1", api_key="none"), and Ollama's with OLLAMA_HOST=localhost:8000. A
page to chat with the model is at /. A key is better given as SHARDLM_API_KEY than on the command line, which others on
the machine can read.
"""

import socket
import sys
from collections.abc import Mapping
from types import MappingProxyType

from absl import flags

from launch.flags import run as run_main
from shardlm.distributed import joined

try:
    from launch import model_flags
    from launch.http_flags import http_settings, listen
    from shardlm.serve.api.batches.store import Store
    from shardlm.serve.api.server import hold, run
    from shardlm.serve.api.settings import Settings
except ModuleNotFoundError as error:
    sys.exit(f"error: serving needs {error.name}; pip install 'shardlm[serve]'")

_MAX_QUEUE = flags.DEFINE_integer("max_queue", 1024, "Requests that may wait for their first token.", lower_bound=1)
_REQUEST_SECONDS = flags.DEFINE_float("request_seconds", None, "End a request after so long.")
_BATCH_DIR = flags.DEFINE_string("batch_dir", "", "A folder for OpenAI's /v1/files and /v1/batches; by default none.")
OF_VLLM = {
    **model_flags.OF_VLLM,
    "ssl_certfile": "certificate",
    "ssl_keyfile": "private_key",
    "allowed_origins": "cors_origins",
    "enable_server_load_tracking": "/load always tells it: leave it out",
    "root_path": "a proxy before the server takes its prefix off",
    "disable_uvicorn_access_log": "no line is written for a request without --access_log: leave it out",
}


def settings(sampling: Mapping[str, float] = MappingProxyType({})) -> Settings:
    """What the command line, SHARDLM_API_KEY and SHARDLM_ADMIN_KEY say."""
    limits = {"max_queue": _MAX_QUEUE.value, "request_seconds": _REQUEST_SECONDS.value}
    limits["batch_dir"] = _BATCH_DIR.value
    return Settings(**http_settings(), **model_flags.model_settings(sampling), **limits)


def serve(llm, sampling: Mapping[str, float] = MappingProxyType({}), held: socket.socket | None = None) -> None:
    """Serves an AsyncLLM as the command line says, until SIGTERM or Ctrl-C. Raises ShardlmError for what cannot be."""
    run(llm, settings(sampling), listen(8000), held)


def main() -> int:
    model_flags.model()
    processes = model_flags.job()
    first = processes is None or processes.process_id == 0
    held = hold(listen(8000), settings()) if first else None
    if first and _BATCH_DIR.value:
        Store(_BATCH_DIR.value).close()  # a folder that cannot be is said before the minutes that a model takes
    with joined(processes):
        serve(*model_flags.opened(processes.num_processes if processes else 1), held)
    return 0


if __name__ == "__main__":
    run_main(main, needs_config=False, processes=True, other_names=OF_VLLM)
