"""The flags of a serving plan. Those of the engine have the names and meaning that launch.serve gives them."""

from typing import Any

from absl import flags

_AXES = ("tensor", "expert", "pipeline", "data")
_SIZES = {
    axis: flags.DEFINE_integer(axis, None, f"Of a served model's mesh, as launch.serve's; none: {axis} is searched.")
    for axis in _AXES
}
_DTYPE = flags.DEFINE_string("dtype", None, "That a served model is computed in; by default the checkpoint's.")
_QUANTIZATION = flags.DEFINE_enum("quantization", None, ["fp8", "int8", "int4"], "Of weights; by default none.")
_KV_CACHE = flags.DEFINE_enum(
    "kv_cache_dtype", "auto", ["auto", "bfloat16", "fp8", "int8"], "Of keys and values that are kept; auto: dtype."
)
_MAX_MODEL_LEN = flags.DEFINE_integer("max_model_len", None, "Tokens of prompt and reply together.", lower_bound=1)
_BLOCK_SIZE = flags.DEFINE_integer("block_size", 16, "Tokens of a page.", lower_bound=1)
_MEMORY = flags.DEFINE_float("gpu_memory_utilization", 0.9, "Share of a GPU's memory that is used.")
_CACHE_GIB = flags.DEFINE_float("kv_cache_gib", None, "Of all pages; by default what is left.")
_MAX_SEQS = flags.DEFINE_integer("max_num_seqs", None, "Requests at once; by default 256.", lower_bound=1)
_MAX_TOKENS = flags.DEFINE_integer("max_num_batched_tokens", None, "Of prompts in a step; by default 2048.")
_PROMPT = flags.DEFINE_integer("prompt_len", 1024, "Tokens of a prompt.", lower_bound=1)
_OUTPUT = flags.DEFINE_integer("output_len", 256, "Tokens of a reply.", lower_bound=1)
_RATE = flags.DEFINE_float("request_rate", 0.0, "Requests a second to be served; 0: as many as possible.")
_TTFT = flags.DEFINE_float("ttft_seconds", 0.0, "The longest mean time to the first token that will do; 0: any.")
_ITL = flags.DEFINE_float("itl_seconds", 0.0, "The longest time between two tokens that will do; 0: any.")


def serving_case(source: Any, cluster: Any, target: Any = None) -> Any:
    """The ServingCase that the command line asks for: `source` is a RunConfig, or the path of a Hugging Face folder or
    its config.json; `cluster` a plan.cluster.Cluster; a plan.target.ServingTarget says rate and lengths instead of
    their flags. Raises ShardlmError for what cannot be."""
    from shardlm.errors import ShardlmError
    from shardlm.mesh import MeshSpec
    from shardlm.plan.serving_case import ServedModel, ServingCase
    from shardlm.serve.build import EngineConfig
    from shardlm.train.config import RunConfig

    named = isinstance(source, RunConfig)
    model = ServedModel.of_config(source) if named else ServedModel.of_folder(source, _MAX_MODEL_LEN.value or 0)
    engine = EngineConfig(
        mesh=MeshSpec(**fixed_axes()),
        dtype=_DTYPE.value,
        quantization=_QUANTIZATION.value,
        kv_cache_dtype=_KV_CACHE.value,
        max_model_len=_MAX_MODEL_LEN.value,
        block_size=_BLOCK_SIZE.value,
        gpu_memory_utilization=_MEMORY.value,
        kv_cache_bytes=int(_CACHE_GIB.value * 2**30) if _CACHE_GIB.value else None,
        max_num_seqs=_MAX_SEQS.value,
        max_num_batched_tokens=_MAX_TOKENS.value,
    )
    asked = {flag.name: flag.value for flag in (_PROMPT, _OUTPUT, _RATE)}
    if target:
        twice = [flag.name for flag in (_PROMPT, _OUTPUT, _RATE) if flag.present]
        if twice:
            raise ShardlmError(f"--{twice[0]} is what the target says; leave it out")
        asked = {name: getattr(target, name) for name in asked}
    return ServingCase(model, cluster, engine, **asked, ttft_seconds=_TTFT.value, itl_seconds=_ITL.value)


def fixed_axes() -> dict[str, int]:
    """Of the mesh, what the command line says; the others are searched."""
    return {axis: flag.value for axis, flag in _SIZES.items() if flag.value is not None}


def plan_serving(source: Any, cluster: Any, *, most: int, compiled: bool, as_json: bool) -> str:
    """What `--serve` prints: the best meshes, and the plan of the first one; compiled too where asked for."""
    import json

    from shardlm.plan.serving import search
    from shardlm.plan.serving_report import format_found, format_serving, to_json
    from shardlm.plan.serving_verify import verify_serving

    found = search(serving_case(source, cluster), fixed_axes())
    best = found.plans[0]
    verified = verify_serving(best) if compiled else None
    if as_json:
        others = [to_json(plan) for plan in found.plans[1:most]]
        return json.dumps({"best": to_json(best, verified), "others": others}, indent=2, allow_nan=False)
    return f"{format_found(found, most)}\n\n{format_serving(best, verified)}"
