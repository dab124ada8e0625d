"""What if: the best plan for each value of one thing that is varied, or the hardware for a target. All figures are
estimates, and no GPU is needed; launch.plan compiles a plan.

python -m launch.whatif --config=configs/llama3_70b.py --gpu=h100 --sweep=num_gpus=64,128,256,512 --png=sweep.png
python -m launch.whatif --config=configs/llama3_70b.py --num_gpus=256 --sweep=gpu=a100,h100,h200,b200 '--mesh.tensor<=8'
python -m launch.whatif --config=configs/llama3_8b.py --profile=machine.json --sweep=num_gpus=8,16,32
python -m launch.whatif --config=configs/llama3_70b.py --target='train 70B on 2T tokens in 30 days' --clusters=aws-p5
python -m launch.whatif --serve --model=FOLDER --target='serve 500 requests/s at 2k in, 200 out' --ttft_seconds=2
python -m launch.whatif --serve --model=FOLDER --gpu=h100 --num_gpus=8 --sweep=prompt_len=512,2048,8192
"""

import functools
import json
import sys

from absl import flags

from launch.auto import given, split_auto
from launch.flags import (
    OF_SERVING,
    check_writable,
    collect_rarely,
    define_amount,
    plain_switch,
    refuse_without,
    run,
    show_help,
    split_constraints,
)
from shardlm.clusters import FABRICS
from shardlm.config import Resolved
from shardlm.errors import ShardlmError
from shardlm.hardware import GPUS

_SWEEP = flags.DEFINE_string("sweep", None, "FIELD=VALUE,VALUE: num_gpus, gpu, cluster, a field; --serve: a flag.")
_SCALE = flags.DEFINE_bool("scale_batch", False, "Sweep of num_gpus: keep rows per GPU and not the global batch.")
_PNG = flags.DEFINE_string("png", None, "Draw the sweep into this .png file.")
_GPU = flags.DEFINE_string("gpu", None, f"{', '.join(GPUS)}; or one of --hardware.")
_CLUSTER = flags.DEFINE_string("cluster", None, "A kind of cluster of clusters.py, or of --hardware; instead of --gpu.")
_NUM_GPUS = flags.DEFINE_integer("num_gpus", None, "How many GPUs.", lower_bound=1)
_GPUS_PER_HOST = flags.DEFINE_integer("gpus_per_host", 0, "0: as in NVIDIA's own systems.", lower_bound=0)
_FABRIC = flags.DEFINE_enum("fabric", None, FABRICS, "What joins hosts, in place of the cluster's; --gpu: InfiniBand.")
_PROFILE = flags.DEFINE_string("profile", None, "A measured machine's profile, by launch.topology, instead of --gpu.")
_TOKENS = define_amount("tokens", 0.0, "Length of the run, such as 15T; 0: what train.steps come to.")

_TARGET = flags.DEFINE_string(
    "target", None, "As above; K to T for thousands to trillions, minutes to years, /s to /day."
)
_SERVE = flags.DEFINE_bool("serve", False, "The target is of serving; with the flags of launch.plan --serve.")
_MODEL = flags.DEFINE_string("model", None, "With --serve: a Hugging Face folder, config.json or *.gguf, not --config.")
_CLUSTERS = flags.DEFINE_list("clusters", None, "Kinds of clusters or GPUs that may serve a target.")
_DOLLARS = flags.DEFINE_float("max_dollars", 0, "What a run may cost; 0: anything.", lower_bound=0)
_BATCH = define_amount("max_batch_tokens", 0.0, "How far the global batch may be raised, such as 32M; 0: 16 M.")

_HARDWARE = flags.DEFINE_string("hardware", None, "TOML or JSON file with further GPUs and clusters.")
_PRICE = flags.DEFINE_float("dollars_per_gpu_hour", 0, "0: the typical list price of prices.py.", lower_bound=0)
_FORMAT = flags.DEFINE_enum("format", "text", ("text", "json"), "What to print.")
OF_SWEEPS = (_SCALE, _PNG, _GPU, _CLUSTER, _NUM_GPUS, _GPUS_PER_HOST, _FABRIC, _PROFILE, _TOKENS)
OF_TARGETS = (_CLUSTERS, _DOLLARS, _BATCH)
OF_TRAINING = (_DOLLARS, _BATCH, _SCALE, _PNG, _PROFILE, _TOKENS)


def main(words: list[str], resolved: Resolved | None = None) -> int:
    import jax

    from shardlm.hardware_file import SHIPPED, load_hardware
    from shardlm.plan.auto import fixed_fields
    from shardlm.plan.constraints import Constraints

    if bool(_SWEEP.value) == bool(_TARGET.value):
        raise ShardlmError("one of --sweep=FIELD=VALUE,VALUE and --target='2T tokens in 30 days' is needed")
    _refuse(OF_TARGETS if _SWEEP.value else OF_SWEEPS, "a sweep" if _SWEEP.value else "a target")
    jax.config.update("jax_platforms", "cpu")
    collect_rarely()
    hardware = load_hardware(_HARDWARE.value) if _HARDWARE.value else SHIPPED
    if _SERVE.value:
        from launch.plan_serve_flags import refuse_training

        _refuse(OF_TRAINING, "--serve")
        refuse_training(words, resolved)
        if (resolved is None) == (_MODEL.value is None):
            raise ShardlmError("--serve needs either --model=FOLDER or --config=FILE, and not both")
        source = resolved.config if resolved else _MODEL.value
        return (_sweep_serving if _SWEEP.value else _advise_serving)(source, hardware)
    if _MODEL.value:
        raise ShardlmError(f"--model={_MODEL.value} goes with --serve: add that, or plan training with --config=FILE")
    return (_sweep if _SWEEP.value else _advise)(
        resolved.config, Constraints.parse([*words, *fixed_fields(given(resolved))]), hardware
    )


def _refuse(those, what: str) -> None:
    for flag in those:
        if flag.value:
            raise ShardlmError(f"--{flag.name} does not go with {what}; leave it out")


def _sweep(config, constraints, hardware) -> int:
    from shardlm.plan.sweep import Over, base_cluster, sweep
    from shardlm.plan.sweep_output import to_json, to_text
    from shardlm.plan.sweep_picture import plot

    check_writable(_PNG, ".png")
    _refuse((_PRICE,), "a sweep of serving")
    over = Over.parse(_SWEEP.value)
    named = (_GPU.value, _CLUSTER.value, _NUM_GPUS.value, _GPUS_PER_HOST.value, _HARDWARE.value, _PROFILE.value)
    cluster = base_cluster(over, *named, fabric=_FABRIC.value)
    found = sweep(
        config,
        cluster,
        over,
        constraints,
        tokens=_TOKENS.value,
        dollars_per_gpu_hour=_PRICE.value,
        scale_batch=_SCALE.value,
        hardware=hardware,
    )
    print(json.dumps(to_json(found), indent=2) if _FORMAT.value == "json" else to_text(found))
    if _PNG.value:
        plot(found, _PNG.value)
    return 0 if found.fits else 2


def _advise(config, constraints, hardware) -> int:
    from shardlm.plan.advice import SYSTEMS, advise
    from shardlm.plan.advice_output import to_json, to_text
    from shardlm.plan.asked import check_size
    from shardlm.plan.target import TrainingTarget, parse_target

    target = parse_target(_TARGET.value)
    if not isinstance(target, TrainingTarget):
        raise ShardlmError(f"target {_TARGET.value!r} is one of serving; add --serve")
    check_size(target.size, config.model.transformer())
    found = advise(
        config,
        target,
        constraints,
        names=_CLUSTERS.value or SYSTEMS,
        max_dollars=_DOLLARS.value,
        max_batch_tokens=int(_BATCH.value),
        dollars_per_gpu_hour=_PRICE.value,
        hardware=hardware,
        say=_telling,
    )
    print(json.dumps(to_json(found), indent=2) if _FORMAT.value == "json" else to_text(found))
    return 0 if found.best else 2


def _advise_serving(source, hardware) -> int:
    from launch.engine_flags import fixed_axes
    from launch.plan_serve_flags import serving_case
    from shardlm.plan.serving.advice import KINDS, advise_serving
    from shardlm.plan.serving.advice_output import to_json, to_text
    from shardlm.plan.target import ServingTarget, parse_target

    target, fixed = parse_target(_TARGET.value), fixed_axes()
    if not isinstance(target, ServingTarget):
        raise ShardlmError(f"target {_TARGET.value!r} is one of training; leave out --serve")
    if "data" in fixed:
        raise ShardlmError("--data is the number of replicas, which the target decides; leave it out")
    found = advise_serving(
        lambda cluster: serving_case(source, cluster, target),
        names=_CLUSTERS.value or KINDS,
        fixed=fixed,
        dollars_per_gpu_hour=_PRICE.value,
        hardware=hardware,
        say=_telling,
    )
    print(json.dumps(to_json(found, target), indent=2) if _FORMAT.value == "json" else to_text(found))
    return 0 if found.offers else 2


def _sweep_serving(source, hardware) -> int:
    from launch.engine_flags import fixed_axes
    from launch.plan_serve_flags import serving_case, set_to
    from shardlm.plan.asked import cluster_of
    from shardlm.plan.serving.sweep import Asked, sweep_serving
    from shardlm.plan.serving.sweep_output import to_json, to_text
    from shardlm.plan.sweep import HARDWARE_FIELDS, Over, base_cluster

    _refuse((_PRICE,), "a sweep of serving")
    over = Over.parse(_SWEEP.value)
    named = {flag.name: flag.value for flag in (_GPU, _CLUSTER, _NUM_GPUS)}
    rest = {"gpus_per_host": _GPUS_PER_HOST.value, "file": _HARDWARE.value, "fabric": _FABRIC.value}
    cluster, every = base_cluster(over, **named, **rest), []
    for value in over.values:
        if over.field in HARDWARE_FIELDS:
            number = over.field == _NUM_GPUS.name
            if number and not (value.isdigit() and int(value)):
                raise ShardlmError(f"num_gpus={value}: a number of GPUs is a whole number of at least 1")
            there = cluster_of(**named | {over.field: int(value) if number else value}, **rest)
            every.append(Asked(value, serving_case(source, there), fixed_axes()))
            continue
        with set_to(over.field, value):
            every.append(Asked(value, serving_case(source, cluster), fixed_axes()))
    found = sweep_serving(over.field, every, _telling)
    print(json.dumps(to_json(found), indent=2) if _FORMAT.value == "json" else to_text(found))
    return 0 if found.fits else 2


def _telling(what: str) -> None:
    """What takes long is said on stderr as it begins."""
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.argv[:], CONSTRAINTS = split_constraints(split_auto(sys.argv)[0])
    plain_switch("--serve")
    show_help("--serve", "launch.plan_serve_flags", "launch.engine_flags")
    refuse_without("--serve", OF_SERVING)
    if "--serve" in sys.argv:
        import launch.plan_serve_flags  # noqa: F401  its flags

        with_config = any(word.startswith("--config=") for word in sys.argv)
        run(functools.partial(main, CONSTRAINTS), needs_config=with_config)
    if any(word.startswith("--model") for word in sys.argv) and not any(w.startswith("--config=") for w in sys.argv):
        run(functools.partial(main, CONSTRAINTS), needs_config=False)
    run(functools.partial(main, CONSTRAINTS))
