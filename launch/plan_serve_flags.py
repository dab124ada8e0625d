"""The flags of a serving plan, beside those of the engine."""

from typing import Any

from absl import flags

from launch.engine_flags import engine_options, fixed_axes

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
    from shardlm.plan.serving.case import ServedModel, ServingCase
    from shardlm.serve.build import EngineConfig
    from shardlm.train.config import RunConfig

    named = isinstance(source, RunConfig)
    options = engine_options()
    model = ServedModel.of_config(source) if named else ServedModel.of_folder(source, options["max_model_len"] or 0)
    engine = EngineConfig(mesh=MeshSpec(**fixed_axes()), **options)
    asked = {flag.name: flag.value for flag in (_PROMPT, _OUTPUT, _RATE)}
    if target:
        twice = [flag.name for flag in (_PROMPT, _OUTPUT, _RATE) if flag.present]
        if twice:
            raise ShardlmError(f"--{twice[0]} is what the target says; leave it out")
        asked = {name: getattr(target, name) for name in asked}
    return ServingCase(model, cluster, engine, **asked, ttft_seconds=_TTFT.value, itl_seconds=_ITL.value)


def plan_serving(source: Any, cluster: Any, *, most: int, compiled: bool, as_json: bool) -> str:
    """What `--serve` prints: the best meshes, and the plan of the first one; compiled too where asked for."""
    import json

    from shardlm.plan.serving.report import format_found, format_serving, to_json
    from shardlm.plan.serving.search import search
    from shardlm.plan.serving.verify import verify_serving

    found = search(serving_case(source, cluster), fixed_axes())
    best = found.plans[0]
    verified = verify_serving(best) if compiled else None
    if as_json:
        others = [to_json(plan) for plan in found.plans[1:most]]
        return json.dumps({"best": to_json(best, verified), "others": others}, indent=2, allow_nan=False)
    return f"{format_found(found, most)}\n\n{format_serving(best, verified)}"
