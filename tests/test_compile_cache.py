"""Where compiled programs are kept between two starts."""

import os
import pathlib
import subprocess
import sys

import jax
import pytest
from absl import flags
from absl.testing import flagsaver

from launch.compile_cache import processor, use_compile_cache

ROOT = pathlib.Path(__file__).parent.parent
LAUNCHER = """
from launch.compile_cache import use_compile_cache
from launch.flags import run

def main():
    use_compile_cache()
    import jax
    jax.jit(lambda x: x + 1)(1)

run(main, needs_config=False)
"""


@pytest.fixture
def told(monkeypatch):
    """What jax is told of its cache."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    found = {}
    monkeypatch.setattr(jax.config, "update", found.__setitem__)
    return found


def test_which_folder(told, tmp_path, capsys):
    own = tmp_path / "shardlm" / "compiled" / processor()
    small = {"jax_persistent_cache_min_compile_time_secs": 0, "jax_persistent_cache_min_entry_size_bytes": -1}
    use_compile_cache({"XDG_CACHE_HOME": str(tmp_path)})
    assert told == {"jax_compilation_cache_dir": str(own)} | small and own.is_dir()
    told.clear()
    use_compile_cache({"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "given"), "XDG_CACHE_HOME": str(tmp_path)})
    assert told == {"jax_compilation_cache_dir": str(tmp_path / "given")}
    told.clear()
    with flagsaver.flagsaver(compile_cache=str(tmp_path / "flag")):
        use_compile_cache({"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "given")})
    assert told == {"jax_compilation_cache_dir": str(tmp_path / "flag")} | small
    told.clear()
    use_compile_cache({"XDG_CACHE_HOME": str(tmp_path)}, processes=2)  # not one that each host has for itself
    assert told == {"jax_enable_compilation_cache": False}
    told.clear()
    use_compile_cache({"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "given")}, processes=2)
    assert told == {"jax_compilation_cache_dir": str(tmp_path / "given")}
    (tmp_path / "file").touch()
    for name, message in (("none", ""), (str(tmp_path / "file"), "no compiled programs are kept (")):
        told.clear()
        with flagsaver.flagsaver(compile_cache=name):
            use_compile_cache({})
        assert told == {"jax_enable_compilation_cache": False} and message in capsys.readouterr().err


def test_programs_are_kept(tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_COMPILATION")}
    environment |= {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", LAUNCHER], env=environment, check=True)
    assert [*(tmp_path / "shardlm" / "compiled" / processor()).glob("jit*-cache")]
