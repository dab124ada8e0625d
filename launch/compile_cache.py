"""Where compiled programs are kept, so that a second start reads what the first one compiled. jax's key of a program
covers the program, its options, the versions of jax and XLA and the kind of accelerator; the folder covers the host's
processor, for whose instructions XLA compiles on CPUs and which a home on a network may have several of."""

import hashlib
import os
import pathlib
import platform
import sys
from collections.abc import Mapping

from absl import flags

_COMPILE_CACHE = flags.DEFINE_string(
    "compile_cache",
    None,
    "Folder of compiled programs, or none; by default JAX_COMPILATION_CACHE_DIR, else one in the user's cache folder. "
    "Of several processes one that all of them share, by default none.",
)


def use_compile_cache(environment: Mapping[str, str] = os.environ, processes: int = 1) -> None:
    """As the command line and the environment say; before the first program. What cannot be written to is said and left
    out.

    Process 0 alone writes, and XLA on GPUs tries kernels out in turns with the other processes: where it finds a
    program in a folder of its own, those would wait for it."""
    import jax

    wanted, given = _COMPILE_CACHE.value, environment.get("JAX_COMPILATION_CACHE_DIR")
    if wanted == "none" or (processes > 1 and not (wanted or given)):
        jax.config.update("jax_enable_compilation_cache", False)
        return
    try:
        folder = pathlib.Path(wanted or given or default_folder(environment))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".writable").touch()
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        print(f"no compiled programs are kept ({error}); --compile_cache=FOLDER names another place", file=sys.stderr)
        jax.config.update("jax_enable_compilation_cache", False)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if wanted or not given:  # else what jax's own variables say of sizes and times stays
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def default_folder(environment: Mapping[str, str]) -> pathlib.Path:
    """XDG_CACHE_HOME, by default ~/.cache, and in it shardlm/compiled/PROCESSOR. Raises RuntimeError without a home."""
    home = environment.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(home, "shardlm", "compiled", processor())


def processor() -> str:
    """A name for what instructions this host has."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:  # no Linux
        features = platform.processor()
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:8]}"
