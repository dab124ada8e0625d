"""Pages to the host's memory and back (serve/host_pages.py), against what the link to the host allows."""

import statistics
import time
from typing import Any

import jax

from shardlm.hardware import Gpu
from shardlm.serve.engine import Engine
from shardlm.serve.host_copies import Bundles, PageCopies
from shardlm.serve.host_pages import BUNDLE, Move

MOVED, ROUNDS = 16, 4  # bundles of a round; the first round, which makes room in the host's memory, is not counted


def moved(engine: Engine, gpu: Gpu | None, saves: bool) -> dict[str, Any]:
    """Seconds of a bundle on its way there or back, the median of rounds. The engine is idle; its pages keep what they
    hold."""
    runner, bundles = engine.runner, Bundles()
    own = PageCopies(runner.config.layout.num_pages, None, runner.platform == "gpu")
    work = own.shapes(runner._state, runner.mesh)
    programs = {(name, 0): runner.lower((name, 0), *one).compile() for name, one in work.items()}
    pages = tuple(min(1 + place, runner.config.layout.num_pages - 1) for place in range(BUNDLE))
    times: dict[bool, list[float]] = {True: [], False: []}
    for way in (True, False) * ROUNDS:
        started = time.perf_counter()
        moves = [Move(way, bundle, pages) for bundle in range(MOVED)]
        runner._state = jax.block_until_ready(bundles.moved(programs, 0, runner._state, moves))
        times[way].append((time.perf_counter() - started) / MOVED)
    seconds, nbytes = statistics.median(times[saves][1:]), bundles.nbytes // MOVED
    bound = nbytes / gpu.pcie_bytes_per_second / seconds if gpu else None
    return {"seconds": seconds, "bundle_bytes": nbytes, "bytes_per_second": nbytes / seconds, "of_bound": bound}
