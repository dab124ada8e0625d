"""A law: a file imports only from lower floors, and from its own floor only within its folder."""

import ast
import os
import pathlib
import subprocess
import sys

import pytest

import shardlm
from shardlm import no_driver

ROOT = pathlib.Path(__file__).parent.parent
FLOORS = [
    # Host code that knows nothing of models; no jax.
    {"errors"},
    {"tokenizer_files"},
    {
        "compiled_together",
        "config",
        "config_tree",
        "config_json",
        "files",
        "unread",
        "no_driver",
        "run_files",
        "run_lock",
        "host_memory",
        *("hardware", "clusters", "hardware_file", "prices"),
        "flops",
        "token_bound",
        "tokenizer",
        *("chat", "progress_bar", "versions", "life"),
    },
    {"gguf_files"},
    {"hf_files", "frozen_weights", "weight_files", "safetensors_files", "torch_files", "torch_pickle", "stored"},
    {"hub"},
    {"mesh", "rules", "distributed", "xla_options", "topology", "hf_quantised"},
    {"ops"},
    {"layers"},
    {"models"},
    {
        "state",
        "muon",
        "moments",
        "optim",
        "precision",
        "checkpoint",
        "checkpoint_files",
        *("checkpoint_slices", "checkpoint_messages"),
        "metrics",
        "generate",
        "hlo",
        *("weights", "text_names", "weight_copies", "held_weights", "published_weights", "written_few_bits"),
        *("merge", "peft", "peft_folder", "peft_modules"),
        *("execution", "opened", "serving_rules"),
        "network",
    },
    {"profile", "vision"},
    {"data"},
    {"train", "serve"},
    {"reinforce"},
    {"plan"},
    {"bench"},
]
NO_JAX = [*(room for rooms in FLOORS[:5] for room in rooms), "hub", "data", "metrics", "hlo", "hf_quantised"]
NO_JAX_IN_SERVE = [
    "ahead.py",
    "gbnf.py",
    "gbnf_lexemes.py",
    "sampling_params.py",
    "request.py",
    "batch.py",
    "page_groups.py",
    "page_table.py",
    "scheduler.py",
    "scheduler_config.py",
    "chunk_programs.py",
    "option_types.py",
    "outputs.py",
    *("batch_images.py", "images.py", "media.py", "media_http.py", "video_forms.py"),
]
NO_JAX_IN_VISION = [
    *("axes.py", "picture.py", "sight.py", "read.py", "images.py", "image_parts.py", "image_places.py"),
    *("video.py", "video_files.py", "qwen_videos.py"),
    *("pixtral_images.py", "gemma4_images.py", "kimi_images.py", "qwen_images.py", "square_images.py"),
    *("llama4_images.py", "internvl_images.py", "clip_images.py", "smolvlm_images.py", "tiles.py"),
]
FILES = sorted((ROOT / "shardlm").rglob("*.py"))


def floor(room: str) -> int:
    found = [number for number, rooms in enumerate(FLOORS) if room in rooms]
    assert found, f"shardlm.{room} stands on no floor; give it one in tests/test_floors.py"
    return found[0]


def imports(path: pathlib.Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the floor"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(path: pathlib.Path) -> str:
    return path.relative_to(ROOT / "shardlm").parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_only_from_below(path):
    room = room_of(path)
    if room == "__init__":
        return
    for name in imports(path):
        parts = name.split(".")
        assert parts[0] not in ("launch", "configs", "tests"), f"{path} imports {name} from above"
        if parts[0] != "shardlm" or len(parts) == 1:
            continue
        other = parts[1]
        same_folder = path.parent == ROOT / "shardlm" and not (ROOT / "shardlm" / other).is_dir()
        allowed = other == room or floor(other) < floor(room) or (floor(other) == floor(room) and same_folder)
        assert allowed, f"{path.relative_to(ROOT)} (floor {floor(room)}) imports shardlm.{other} (floor {floor(other)})"


HOST_FILES = [p for p in FILES if room_of(p) in NO_JAX] + [ROOT / "shardlm/serve" / name for name in NO_JAX_IN_SERVE]
HOST_FILES += [ROOT / "shardlm/vision" / name for name in NO_JAX_IN_VISION]
HOST_FILES += [ROOT / f"shardlm/network/{name}.py" for name in ("links", "peaks", "fit", "rates", "profile", "report")]
HOST_FILES += [path for folder in ("api", "router") for path in sorted((ROOT / "shardlm/serve" / folder).rglob("*.py"))]


@pytest.mark.parametrize("path", HOST_FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_host_code_imports_no_jax(path):
    assert not [name for name in imports(path) if name.split(".")[0] in ("jax", "jaxlib", "flax", "optax")]


def test_importing_the_package_is_cheap_and_starts_no_backend():
    clock = "time.process_time()"  # of its own: others may have the cores
    code = f"import time; t = {clock}; import shardlm, sys; print({clock} - t, 'jax' in sys.modules)"
    seconds, has_jax = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True).split()
    assert float(seconds) < 1 and has_jax == "False"
    assert {"LLM", "AsyncLLM", "SamplingParams", "load"} <= set(dir(shardlm))  # what a prompt completes


def test_importing_every_module_starts_no_backend():
    modules = [".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for p in FILES]
    code = (
        f"import importlib; [importlib.import_module(m) for m in {modules}]\n"
        "from jax._src import xla_bridge; print(xla_bridge.backends_are_initialized())"
    )
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True).strip() == "False"


def test_conversations_are_prepared_without_jax():
    """What `data` takes of `vision` too; batches are grain's, which imports it."""
    code = "import sys, shardlm.data.prepare, shardlm.data.packing; print('jax' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True).strip() == "False"


def test_what_python_calls_looks_for_a_driver_first(monkeypatch):
    """The extra for GPUs on a machine without any: jax reported a traceback."""
    name = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
    for device in ("null", "nothing-so"):
        monkeypatch.setenv(name, "")  # so that it is as before in the end
        monkeypatch.delenv(name)
        monkeypatch.setattr(no_driver, "_DEVICES", (device,))
        assert shardlm.SamplingParams and (name in os.environ) == (device != "null")
