"""Eight virtual CPU devices, one persistent compilation cache for the whole session and XLA's quickest way to compile,
set before jax is imported."""

import contextlib
import functools
import gc
import os
import pathlib
import sys
import time

import hypothesis
import psutil
import pytest
from cases import begin_in_time, cases_of, make_wide

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The older emitters of fused loops make the same loops in half the time; XLA ignores the option where it has but one.
# Instructions before AVX2 round each product before it is added, so that numbers do not depend on how loops are cut.
# A program is one module of LLVM: in up to 32, which busy cores do not speed up, it took 1 to 10% more CPU.
# Work stands in one order, or programs of several devices that are read back from the cache go wrong (xla_options.py).
COMPILE = (
    "--xla_backend_optimization_level=0 --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters "
    "--xla_cpu_max_isa=AVX --xla_cpu_parallel_codegen_split_count=1 "
    "--xla_cpu_enable_concurrency_optimized_scheduler=false"
)
if "cuda" in os.environ["JAX_PLATFORMS"]:  # tests/gpu: programs as they are used, and room for processes beside this
    COMPILE = ""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8 {COMPILE}"
CACHE = pathlib.Path(os.environ.get("SHARDLM_TEST_CACHE", pathlib.Path(__file__).parent.parent / ".jax_cache"))
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# Sources are compiled once and not by each process, where the environment says otherwise as well, as in containers.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Tracing makes many objects and hardly any cycles: looking for them after every 700 took a tenth of its time.
gc.set_threshold(20_000, 20, 20)

# Examples are the same each time and none is too slow: chance, or a busy machine, is no fault of what is tested.
# --hypothesis-profile=explore looks at others.
for name in ("same", "explore"):
    hypothesis.settings.register_profile(
        name, deadline=None, derandomize=name == "same", suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
hypothesis.settings.load_profile("same")

# The files that take longest, with what is wide of them or without it, the longest first: a worker that begins one of
# these last leaves the others idle.
LONGEST = (
    "test_families_served",
    "test_families",
    "test_learned_encoder",
    "test_matrix",
    "test_multi_token",
    "test_eagle",
    "test_references",
    "test_learned_runs",
    "test_family_parity",
    "test_moments",
    "test_grouped_weights",
    "test_one_forward",
    "test_parallel_hybrid",
    "test_diloco",
    "test_parallel_parity",
    "test_parallel_pipeline",
    "test_serving_load",
    "test_meshes",
    "test_paged_attention",
    "test_resume",
    "test_offload",
    "test_ring_attention",
    "test_replicas",
    "test_parallel_moe",
    "test_try_out",
    "test_served_images",
    "test_reinforced_copies",
    "test_parallel_context",
    "test_gated_delta",
    "test_processes",
    "test_optim",
    "test_reinforced_run",
    "test_gated_delta_rows",
    "test_speculation",
    "test_fused",
    "test_serving_advice",
    "test_serving_memory",
    "test_engine",
    "test_convert",
    "test_low_precision",
    "test_rotating",
    "test_entries",
    "test_rounded_training",
    "test_snapshots",
    "test_adapters",
    "test_dynamic",
    "test_deterministic",
    "test_prefill",
    "test_kv_cache",
    "test_lora",
    "test_mtp",
    "test_compression",
    "test_preference",
    "test_step",
    "test_bench_gpu",
    "test_opening",
    "test_as_published",
    "test_train_cli",
)


STARTED = pytest.StashKey[float]()


def pytest_xdist_auto_num_workers() -> int | None:
    """One more than cores where these are few and memory is enough (4 GiB a worker and the system's): of two workers,
    which wait for files, sockets and the processes that they start, a sixth of the time was idle (18:13 for 30:34 of
    CPU). None: xdist's own answer, which PYTEST_XDIST_AUTO_NUM_WORKERS decides too."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    few = cores <= 4 and psutil.virtual_memory().total > (cores + 2) * 4 * 2**30
    return cores + 1 if few and "PYTEST_XDIST_AUTO_NUM_WORKERS" not in os.environ else None


def pytest_addoption(parser):
    parser.addoption(
        "--cases",
        metavar="K/N",
        help="of each test's cases, as those of each family, every N-th from K (modulo N), and one at least",
    )
    parser.addoption("--seconds", type=float, help="tests that would begin later are skipped")


def pytest_sessionstart(session):
    session.config.stash[STARTED] = time.monotonic()


def pytest_runtest_setup(item):
    begin_in_time(item.config.stash[STARTED], item.config.option.seconds)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config, items):
    """Makes cases of sampled tests wide, leaves those that --cases asks for, and puts the longest files first;
    pytest-xdist hands files out in this order (--no-loadscope-reorder)."""
    make_wide(items)
    yield  # -m chooses
    if config.option.cases:
        first, step = map(int, config.option.cases.split("/"))
        kept = cases_of(items, first, step)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]
    place = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


@pytest.fixture(scope="session", autouse=True)
def programs_when_called():
    """Of engines; on GPUs all are compiled first, as users have them."""
    from lazy_programs import compile_when_called, compiling_by

    with contextlib.nullcontext() if "cuda" in os.environ["JAX_PLATFORMS"] else compiling_by(compile_when_called):
        yield


@pytest.fixture(scope="session", autouse=True)
def programs_of_any_devices():
    """A program that is another's but for its devices, as a replica's is, is read from the cache: jax does so on GPUs
    alone."""
    from jax._src import cache_key

    hashed = cache_key._hash_serialized_compile_options
    anywhere = functools.partial(hashed, strip_device_assignment=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_key, hashed.__name__, lambda of, options, **_: anywhere(of, options))
        yield
