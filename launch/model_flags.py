"""Flags of the launchers that answer requests with a model, a server or a batch: which model, its names, adapters and
templates, and the processes that serve it together. Imports no jax."""

import math
import os
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, get_args

from absl import flags

from launch.compile_cache import use_compile_cache
from launch.engine_flags import engine_options, mesh_sizes
from launch.flags import cluster
from shardlm.distributed import ClusterArgs, detect, explicit
from shardlm.errors import ShardlmError
from shardlm.progress_bar import compiling
from shardlm.serve.api.reasoning.choose import NAMES as REASONING_PARSERS
from shardlm.serve.api.settings import ToolStyle
from shardlm.serve.media import MediaRules
from shardlm.serve.other_names import ENGINE, MEANINGLESS

_MODEL = flags.DEFINE_string("model", None, "A Hugging Face folder or name, *.gguf, adapters, or a run.")
_MODEL_NAMES = flags.DEFINE_list("model_names", [], "What clients may call the model; the first is the usual one.")
_TOOL_STYLE = flags.DEFINE_enum(
    "tool_style",
    "auto",
    get_args(ToolStyle),
    "How the model writes calls of tools; auto: see its template.",
)
_REASONING = flags.DEFINE_enum(
    "reasoning_parser",
    "auto",
    list(REASONING_PARSERS),
    "How replies mark what is thought and not answered, by vLLM's names; auto: see the chat template, else none.",
)
_GENERATION_CONFIG = flags.DEFINE_enum(
    "generation_config",
    "auto",
    ["auto", "none"],
    "Temperature and the like of requests that leave them open; auto: as the checkpoint's generation_config.json says.",
)
_LORA_MODULES = flags.DEFINE_list(
    "lora_modules", [], "Adapters beside the model, as NAME=FOLDER: of PEFT, or runs with lora.rank. Clients name one."
)
_DISTRIBUTED = flags.DEFINE_bool(
    "distributed", False, "One of several processes that serve one model together, as srun, mpirun or Kubernetes say."
)
_MEDIA_DOMAINS = flags.DEFINE_list(
    "allowed_media_domains", [], "Hosts that images are fetched from, wherever they are; by default all public ones."
)
_MEDIA_PATH = flags.DEFINE_string("allowed_local_media_path", "", "A folder for images by file:; by default none.")
OF_VLLM = {
    **ENGINE,
    "tensor_parallel_size": "tensor",
    "pipeline_parallel_size": "pipeline",
    "data_parallel_size": "data",
    "served_model_name": "model_names",
    "tool_call_parser": "tool_style",
    "chat_template": "it is the chat_template.jinja of the model's folder",
    "enable_auto_tool_choice": "the model may always call the tools that a request has: leave it out",
    "kv_cache_memory_bytes": "it is --kv_cache_gib, of all devices together",
    "kv_cache_bytes": "it is --kv_cache_gib, of all devices together",
    "kv_cache_memory": "it is --kv_cache_gib, of all devices together",
    "num_gpu_blocks_override": "--gpu_memory_utilization and --kv_cache_gib say how many pages there are",
    "cpu_offload_gb": "weights rest on GPUs: --quantization makes them smaller, --tensor splits them",
    "enable_expert_parallel": "it is --expert=N",
    "speculative_model": 'it is --speculative_config=\'{"model": FOLDER, "num_speculative_tokens": 4}\'',
    "override_generation_config": "change the folder's generation_config.json, or --generation_config=none",
    "seed": "requests have a seed of their own",
    **dict.fromkeys(
        (
            *(*MEANINGLESS, "uvicorn_log_level", "api_server_count", "response_role"),
            *("enable_prompt_tokens_details", "enable_request_id_headers", "chat_template_content_format"),
        ),
        "it is vLLM's and decides nothing here: leave it out",
    ),
}


def model() -> str:
    """Raises ShardlmError where the command line names none."""
    if not _MODEL.value:
        raise ShardlmError("--model=FOLDER_OR_RUN is needed")
    return _MODEL.value


def model_settings(sampling: Mapping[str, float] = MappingProxyType({})) -> dict[str, Any]:
    """Fields of Settings that are the model's."""
    return {
        "model_names": tuple(_MODEL_NAMES.value),
        "tool_style": _TOOL_STYLE.value,
        "reasoning_parser": _REASONING.value,
        "sampling": sampling,
        "media": MediaRules(tuple(_MEDIA_DOMAINS.value), _MEDIA_PATH.value),
    }


def lora_modules() -> dict[str, str]:
    """Folders of adapters by name. Raises ShardlmError for a module without a name or a folder."""
    modules = {}
    for given in _LORA_MODULES.value:
        name, _, path = given.partition("=")
        if not name or not path or name in modules:
            raise ShardlmError(f"--lora_modules={given}: give NAME=FOLDER, each name once")
        if name in (_MODEL_NAMES.value or [_MODEL.value]):
            raise ShardlmError(f"--lora_modules={given}: {name} is the model's own name; choose another")
        modules[name] = path
    return modules


def job() -> ClusterArgs | None:
    """The processes that serve together. Raises ShardlmError where --distributed finds none."""
    args = explicit(**cluster())
    if args or not _DISTRIBUTED.value:
        return args
    if found := detect(os.environ):
        return found
    raise ShardlmError(
        "--distributed: neither srun nor mpirun nor a Kubernetes Job of several processes is there; give "
        "--coordinator_address, --num_processes and --process_id instead"
    )


def opened(processes: int, *, paced: bool = True) -> tuple[Any, Mapping[str, float]]:
    """(an AsyncLLM, what requests that leave it open sample by), in one of so many processes. Those but the first do
    not come out of it."""
    from launch.devices import prepare_for

    sizes = mesh_sizes()
    prepare_for(_MODEL.value, math.prod(sizes.values()), processes)
    use_compile_cache(processes=processes)
    from shardlm.chat import ChatTemplate
    from shardlm.hf_files import read_generation
    from shardlm.mesh import MeshSpec
    from shardlm.opened import describe
    from shardlm.serve.async_llm import AsyncLLM
    from shardlm.serve.build import build, described
    from shardlm.serve.defaults import recommended
    from shardlm.serve.engine_config import EngineConfig

    config = EngineConfig(mesh=MeshSpec(**sizes), **engine_options(), lora_modules=lora_modules())
    folder = describe(_MODEL.value).folder
    template = ChatTemplate.find(folder)
    sampling = recommended(read_generation(folder)) if _GENERATION_CONFIG.value == "auto" else {}
    engine, _ = build(_MODEL.value, config, compiling())
    print(described(engine, (_MODEL_NAMES.value or [_MODEL.value])[0], config), file=sys.stderr)
    how = {"template": template, "limit_mm_per_prompt": config.limit_mm_per_prompt, "paced": paced}
    return AsyncLLM(engine, model_name=_MODEL.value, **how), sampling
