"""Serves a model over OpenAI's HTTP API.

python -m launch.serve --model=runs/tiny
python -m launch.serve --model=FOLDER --tensor=4 --max_model_len=8192 --port=8000

Clients: OpenAI(base_url="http://localhost:8000/v1", api_key="none"). A page to chat with the model is at /. A key is
better given as SHARDLM_API_KEY than on the command line, which others on the machine can read.
"""

import math
import sys

from absl import flags

from launch.flags import run as run_main
from shardlm.errors import ShardlmError

try:
    from launch.http_flags import http_settings, listen
    from shardlm.serve.api.server import run
    from shardlm.serve.api.settings import Settings
except ModuleNotFoundError as error:
    sys.exit(f"error: serving needs {error.name}; pip install 'shardlm[serve]'")

_MODEL = flags.DEFINE_string("model", None, "A Hugging Face folder or name, adapters, or a run.")
_TENSOR = flags.DEFINE_integer("tensor", 1, "Devices to split heads, MLPs and vocabulary over.", lower_bound=1)
_EXPERT = flags.DEFINE_integer("expert", 1, "Devices to split experts over.", lower_bound=1)
_PIPELINE = flags.DEFINE_integer("pipeline", 1, "Stages to split the layers into.", lower_bound=1)
_DATA = flags.DEFINE_integer("data", 1, "Replicas, each on devices of its own.", lower_bound=1)
_DTYPE = flags.DEFINE_string("dtype", None, "That is computed in; by default the checkpoint's, on a CPU float32.")
_QUANTIZATION = flags.DEFINE_enum("quantization", None, ["fp8", "int8", "int4"], "Of weights; by default none.")
_KV_CACHE = flags.DEFINE_enum(
    "kv_cache_dtype", "auto", ["auto", "bfloat16", "fp8", "int8"], "Of keys and values that are kept; auto: dtype."
)
_MAX_MODEL_LEN = flags.DEFINE_integer("max_model_len", None, "Tokens of prompt and reply together.", lower_bound=1)
_BLOCK_SIZE = flags.DEFINE_integer("block_size", 16, "Tokens of a page.", lower_bound=1)
_MEMORY = flags.DEFINE_float("gpu_memory_utilization", 0.9, "Share of a GPU's memory that is used.")
_CACHE_GIB = flags.DEFINE_float("kv_cache_gib", None, "Of all pages; by default what is left, on a CPU 1.")
_MAX_SEQS = flags.DEFINE_integer("max_num_seqs", None, "Requests at once; by default 256, on a CPU 32.", lower_bound=1)
_MAX_TOKENS = flags.DEFINE_integer("max_num_batched_tokens", None, "Of prompts in a step; 2048, on a CPU 512.")
_PREFIX = flags.DEFINE_bool("enable_prefix_caching", True, "Equal beginnings of prompts are computed once.")
_DETERMINISTIC = flags.DEFINE_bool("deterministic", False, "A reply is the same bits whatever else runs; slower.")
_SPECULATIVE = flags.DEFINE_string(
    "speculative_config",
    None,
    "JSON of drafts to verify: {method: ngram, draft_model or mtp, num_speculative_tokens, ...}.",
)

_MODEL_NAMES = flags.DEFINE_list("model_names", [], "What clients may call the model; the first is the usual one.")
_TOOL_STYLE = flags.DEFINE_enum(
    "tool_style", "auto", ["auto", "hermes", "llama"], "How the model writes calls of tools; auto: see its template."
)
_MAX_QUEUE = flags.DEFINE_integer("max_queue", 1024, "Requests that may wait for their first token.", lower_bound=1)
_REQUEST_SECONDS = flags.DEFINE_float("request_seconds", None, "End a request after so long.")


def settings() -> Settings:
    """What the command line, SHARDLM_API_KEY and SHARDLM_ADMIN_KEY say."""
    return Settings(
        **http_settings(),
        model_names=tuple(_MODEL_NAMES.value),
        tool_style=_TOOL_STYLE.value,
        max_queue=_MAX_QUEUE.value,
        request_seconds=_REQUEST_SECONDS.value,
    )


def serve(llm) -> None:
    """Serves an AsyncLLM as the command line says, until SIGTERM or Ctrl-C. Raises ShardlmError for what cannot be."""
    run(llm, settings(), listen(8000))


def main() -> int:
    if not _MODEL.value:
        raise ShardlmError("--model=FOLDER_OR_RUN is needed")
    from launch.devices import prepare_for

    sizes = {"tensor": _TENSOR, "expert": _EXPERT, "pipeline": _PIPELINE, "data": _DATA}
    sizes = {axis: flag.value for axis, flag in sizes.items()}
    prepare_for(_MODEL.value, math.prod(sizes.values()))
    from shardlm.chat import ChatTemplate
    from shardlm.mesh import MeshSpec
    from shardlm.serve.async_llm import AsyncLLM
    from shardlm.serve.build import EngineConfig, build, described
    from shardlm.serve.speculation.config import SpeculativeConfig

    config = EngineConfig(
        mesh=MeshSpec(**sizes),
        dtype=_DTYPE.value,
        quantization=_QUANTIZATION.value,
        kv_cache_dtype=_KV_CACHE.value,
        max_model_len=_MAX_MODEL_LEN.value,
        block_size=_BLOCK_SIZE.value,
        gpu_memory_utilization=_MEMORY.value,
        kv_cache_bytes=int(_CACHE_GIB.value * 2**30) if _CACHE_GIB.value else None,
        max_num_seqs=_MAX_SEQS.value,
        max_num_batched_tokens=_MAX_TOKENS.value,
        enable_prefix_caching=_PREFIX.value,
        deterministic=_DETERMINISTIC.value,
        speculative_config=SpeculativeConfig.from_json(_SPECULATIVE.value) if _SPECULATIVE.value else None,
    )
    engine, opened = build(_MODEL.value, config)
    try:
        template = ChatTemplate.load(opened.folder)
    except ShardlmError:
        template = None  # /v1/chat/completions says so
    print(described(opened, engine), file=sys.stderr)
    serve(AsyncLLM(engine, model_name=_MODEL.value, template=template))
    return 0


if __name__ == "__main__":
    run_main(main, needs_config=False)
