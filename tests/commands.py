"""Command lines of shardlm, each in a process of its own that is forked from one that has imported jax: a start costs
the command's work and not two seconds of imports. What only a process from nothing shows is tested by `subprocess`."""

import multiprocessing
import os
import pathlib
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping

_FORKS = multiprocessing.get_context("forkserver")
# No launcher: it would define its flags twice. No import makes threads or devices, which a fork would not take along.
_FORKS.set_forkserver_preload(["optax", "shardlm.generate", "shardlm.opened", "shardlm.train.loop"])


def run(
    module: str, *words: str, env: Mapping[str, str] = os.environ, timeout: float = 200
) -> subprocess.CompletedProcess:
    """`python -m module words` to its end, as subprocess.run with captured text.

    Raises: subprocess.TimeoutExpired after `timeout` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        paths = [pathlib.Path(folder, name) for name in ("stdout", "stderr")]
        process = _FORKS.Process(target=_main, args=(module, words, dict(env), *paths))
        process.start()
        process.join(timeout)
        late = process.is_alive()
        if late:
            process.kill()
            process.join()
        texts = [path.read_text() if path.exists() else "" for path in paths]
    if late:
        raise subprocess.TimeoutExpired([module, *words], timeout, *texts)
    return subprocess.CompletedProcess([module, *words], process.exitcode, *texts)


def _main(module: str, words: tuple[str, ...], env: dict[str, str], out: pathlib.Path, err: pathlib.Path) -> None:
    os.environ.clear()
    os.environ.update(env)
    for path, stream in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
