"""Plans a run before a GPU is rented: which mesh, whether it fits, how fast it is and what it costs.

python -m launch.plan --config=configs/llama3_70b.py --gpu=h100 --num_gpus=256
python -m launch.plan --config=configs/llama3_70b.py --cluster=gcp-a3-mega --num_gpus=256 '--mesh.tensor<=8'
python -m launch.plan --config=configs/llama3_8b.py --gpu=h100 --num_gpus=8 --write=plan.py --report=plan.html
python -m launch.plan --serve --model=FOLDER --gpu=h100 --num_gpus=8 --prompt_len=2048 --request_rate=20
python -m launch.plan --config=configs/tiny.py --gpu=local --cpu_devices=8 --profile=machine.json
python -m launch.plan --config=configs/tiny.py --profile=machine.json
python -m launch.plan --validate
"""

import functools
import json
import math
import pathlib
import sys

from absl import flags

from launch.auto import given, split_auto
from launch.flags import (
    OF_SERVING,
    check_writable,
    collect_rarely,
    config_name,
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

_GPU = flags.DEFINE_string("gpu", None, f"{', '.join(GPUS)}; one of --hardware; or local: the devices here, measured.")
_CLUSTER = flags.DEFINE_string("cluster", None, "A kind of cluster of clusters.py, or of --hardware; instead of --gpu.")
_NUM_GPUS = flags.DEFINE_integer("num_gpus", None, "How many GPUs.", lower_bound=1)
_GPUS_PER_HOST = flags.DEFINE_integer("gpus_per_host", 0, "0: as in NVIDIA's own systems.", lower_bound=0)
_HARDWARE = flags.DEFINE_string("hardware", None, "TOML or JSON file with further GPUs and clusters.")
_FABRIC = flags.DEFINE_enum("fabric", None, FABRICS, "What joins hosts, in place of the cluster's; --gpu: InfiniBand.")
_PROFILE = flags.DEFINE_string(
    "profile", None, "A measured machine's profile to plan with; with --gpu=local the file to save it in."
)
_CPU_DEVICES = flags.DEFINE_integer("cpu_devices", 0, "--gpu=local: so many virtual CPU devices; 0: the real ones.")
_TOP = flags.DEFINE_integer("top", 8, "How many meshes to show.", lower_bound=1)
_VERIFY = flags.DEFINE_integer(
    "verify",
    None,
    "How many of the best to compile for their GPUs; by default 2, with --serve 1, and none where that takes minutes.",
    lower_bound=0,
)
_TOKENS = define_amount("tokens", 0.0, "Length of the run, such as 15T; 0: what train.steps come to.")
_PRICE = flags.DEFINE_float("dollars_per_gpu_hour", 0, "0: the typical list price of prices.py.", lower_bound=0)
_ROW_IMAGES = flags.DEFINE_string("images_per_row", None, "Images in each row that is trained on, N@HEIGHTxWIDTH.")
_FORMAT = flags.DEFINE_enum("format", "text", ("text", "json"), "What to print.")
_REPORT = flags.DEFINE_string("report", None, "Write a page with pictures to this .html file.")
_WRITE = flags.DEFINE_string("write", None, "Write the best plan to this .py file, a configuration for launch.train.")
_SERVE = flags.DEFINE_bool("serve", False, "Plan serving the model, with the flags of launch.serve.")
_MODEL = flags.DEFINE_string("model", None, "With --serve: a Hugging Face folder, config.json or *.gguf, not --config.")
_VALIDATE = flags.DEFINE_bool("validate", False, "Predict published measurements and print the errors, instead.")

OF_WHATIF = dict.fromkeys(("target", "sweep"), "python -m launch.whatif has it, with the same configuration")


def main(resolved: Resolved, words: list[str]) -> int:
    from shardlm.plan.answer import answer
    from shardlm.plan.asked import budget_of
    from shardlm.plan.auto import fixed_fields
    from shardlm.plan.compile_time import PATIENCE
    from shardlm.plan.config_source import source
    from shardlm.plan.constraints import Constraints
    from shardlm.plan.report.data import to_json
    from shardlm.plan.report.heading import heading
    from shardlm.plan.report.html import to_html
    from shardlm.plan.report.text import to_text
    from shardlm.plan.sweep import around
    from shardlm.plan.training_images import RowImages

    _refuse_model()
    check_writable(_REPORT, ".html")
    check_writable(_WRITE, ".py")
    collect_rarely()
    config = resolved.config
    images = RowImages.asked(_ROW_IMAGES.value, config) if _ROW_IMAGES.value else None
    cluster = asked_cluster()
    budget = budget_of(config, cluster, _TOKENS.value, _PRICE.value, at=_CLUSTER.value)
    constraints = Constraints.parse([*words, *fixed_fields(given(resolved))])
    patience = PATIENCE if _VERIFY.value is None else math.inf
    how = {"compiled": _compiled(2), "patience": patience, "budget": budget, "images": images, "say": telling()}
    found = answer(config, cluster, constraints, **how)
    counts = around(config, cluster, constraints, images) if _REPORT.value else ()
    overrides = dict(given(resolved))
    told = to_json(found, config_name(), counts, most=_TOP.value, overrides=overrides)
    print(json.dumps(told, indent=2) if _FORMAT.value == "json" else to_text(told))
    if _REPORT.value:
        pathlib.Path(_REPORT.value).write_text(to_html(told), encoding="utf-8")
    if _WRITE.value and found.best is None:
        raise ShardlmError(f"{_WRITE.value} is not written: nothing fits")
    if _WRITE.value:
        pathlib.Path(_WRITE.value).write_text(source(found.best.plan.config, heading(told, _WRITE.value)))
    return 0 if found.best else 2


def serving(resolved: Resolved | None = None) -> int:
    from launch.plan_serve_flags import plan_serving, refuse_training

    if (resolved is None) == (_MODEL.value is None):
        raise ShardlmError("--serve needs either --model=FOLDER or --config=FILE, and not both")
    check_writable(_REPORT, ".html")
    check_writable(_WRITE, ".py")
    _refuse_with_serve()
    refuse_training(CONSTRAINTS, resolved)
    source = resolved.config if resolved else _MODEL.value
    said, fits = plan_serving(
        source,
        asked_cluster(),
        most=_TOP.value,
        compiled=_compiled(1),
        as_json=_FORMAT.value == "json",
        report=_REPORT.value,
        say=telling(),
    )
    print(said)
    return 0 if fits else 2


def _compiled(otherwise: int) -> int:
    """Two of training, which two cores compile side by side, and may rank otherwise than estimated; one of serving,
    whose programs take longer."""
    return otherwise if _VERIFY.value is None else _VERIFY.value


def _refuse_with_serve() -> None:
    for flag in (_WRITE, _TOKENS, _PRICE, _ROW_IMAGES):
        if flag.value:
            raise ShardlmError(f"--{flag.name} is of training and does not go with --serve; leave it out")


def _refuse_model() -> None:
    if _MODEL.value:
        raise ShardlmError(
            f"--model={_MODEL.value} goes with --serve; to plan training it, say how: --config=configs/sft.py "
            f"--config.model.folder={_MODEL.value} with --config.precision=bf16, --config.train.global_batch=N and "
            "--config.train.seq_len=N"
        )


def asked_cluster():
    """What is measured says so on stderr. Without measuring, no GPU is asked for."""
    import jax

    from launch.devices import use_cpu_devices
    from shardlm.plan.asked import LOCAL, cluster_of

    if _CPU_DEVICES.value and _GPU.value != LOCAL:
        raise ShardlmError("--cpu_devices says what --gpu=local measures; without that leave it out")
    use_cpu_devices(_CPU_DEVICES.value)
    if _GPU.value != LOCAL:
        jax.config.update("jax_platforms", "cpu")
    known = (_GPU.value, _CLUSTER.value, _NUM_GPUS.value, _GPUS_PER_HOST.value, _HARDWARE.value)
    return cluster_of(*known, profile=_PROFILE.value, say=telling(), fabric=_FABRIC.value)


def telling():
    """What takes long is said on stderr as it begins."""
    return functools.partial(print, file=sys.stderr, flush=True)


def validation() -> int:
    from shardlm.plan.validate import format_validation, validate, validation_json
    from shardlm.plan.validate_serving import format_serving, served_json, validate_serving

    trained, served = validate(), validate_serving()
    if _FORMAT.value == "json":
        print(json.dumps({"training": validation_json(trained), "serving": served_json(served)}, indent=2))
    else:
        print(format_validation(trained), format_serving(served), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.argv[:], CONSTRAINTS = split_constraints(split_auto(sys.argv)[0])
    if "--validate" in sys.argv:
        run(validation, needs_config=False)
    plain_switch("--serve")
    show_help("--serve", "launch.plan_serve_flags", "launch.engine_flags")
    refuse_without("--serve", OF_SERVING)
    if "--serve" in sys.argv:
        import launch.plan_serve_flags  # noqa: F401  its flags

        with_config = any(word.startswith("--config=") for word in sys.argv)
        run(serving, needs_config=with_config, other_names=OF_WHATIF)
    if any(word.startswith("--model") for word in sys.argv) and not any(w.startswith("--config=") for w in sys.argv):
        run(_refuse_model, needs_config=False)
    run(lambda resolved: main(resolved, CONSTRAINTS), other_names=OF_WHATIF)
