"""The flags of a serving plan, beside those of the engine."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from absl import flags

from launch.engine_flags import engine_options, fixed_axes, splits_pages
from launch.flags import config_name

_PROMPT = flags.DEFINE_integer("prompt_len", 1024, "Tokens of a prompt.", lower_bound=1)
_OUTPUT = flags.DEFINE_integer("output_len", 256, "Tokens of a reply.", lower_bound=1)
_SHARED = flags.DEFINE_integer("shared_prefix", 0, "Tokens that all prompts begin with.", lower_bound=0)
_RATIO = flags.DEFINE_float(
    "range_ratio", 0.0, "Lengths are spread evenly over 1 - RATIO to 1 + RATIO times the above."
)
_FILE = flags.DEFINE_string(
    "file",
    None,
    "JSONL of prompts, messages or ShareGPT's conversations, instead; replies without max_tokens: the above.",
)
_RATE = flags.DEFINE_float("request_rate", 0.0, "Requests a second to be served; 0: as many as possible.")
_TTFT = flags.DEFINE_float("ttft_seconds", 0.0, "The longest mean time to the first token that will do; 0: any.")
_ACCEPTED = flags.DEFINE_float(
    "acceptance_rate", 0.0, "With --speculative_config: share of the drafted tokens that are accepted."
)
_ITL = flags.DEFINE_float("itl_seconds", 0.0, "The longest time between two tokens that will do; 0: any.")

_ATTAINMENT = flags.DEFINE_float(
    "attainment", 0.0, "Share of requests that must keep --ttft_seconds and --itl_seconds; 0: they hold on average."
)
_IMAGES = flags.DEFINE_integer(
    "images_per_prompt", 0, "Images before each prompt, of a --model that sees.", lower_bound=0
)
_IMAGE_SIZE = flags.DEFINE_string("image_size", "512x512", "HEIGHTxWIDTH of these images, in pixels.")


def refuse_training(words: Sequence[str], resolved: Any = None) -> None:
    """Raises ShardlmError for what a serving plan would not heed: constraints of training's search, and fields of the
    configuration that it searches."""
    from launch.auto import given
    from shardlm.errors import ShardlmError
    from shardlm.plan.constraints import FIELDS

    fields = [f"config.{path}={value}" for path, value in (given(resolved) if resolved else []) if path in FIELDS]
    for word in (*words, *fields):
        raise ShardlmError(f"--{word} is of training; with --serve give --tensor=N and the like")


def serving_case(source: Any, cluster: Any, target: Any = None) -> Any:
    """The ServingCase that the command line asks for: `source` is a RunConfig, or the path of a Hugging Face folder or
    its config.json; `cluster` a plan.cluster.Cluster; a plan.target.ServingTarget says rate and lengths instead of
    their flags. Raises ShardlmError for what cannot be."""
    from shardlm.mesh import MeshSpec
    from shardlm.plan.asked import check_size
    from shardlm.plan.serving.case import ServedModel, ServingCase
    from shardlm.serve.bench.image_work import size_of
    from shardlm.serve.engine_config import EngineConfig
    from shardlm.serve.entries import paged
    from shardlm.train.config import RunConfig

    named = isinstance(source, RunConfig)
    options = engine_options()
    length = options["max_model_len"] or 0
    engine = paged(EngineConfig(mesh=MeshSpec(**fixed_axes()), **options), "gpu")
    sees = engine.max_images != 0
    model = ServedModel.of_config(source, config_name()) if named else ServedModel.of_folder(source, length, sees)
    draft = ServedModel.drafting(options["speculative_config"], length)
    asked = {flag.name: flag.value for flag in (_PROMPT, _OUTPUT, _RATE)}
    if target:
        _check_target(target)
        check_size(target.size, model.shape)
        said = {flag.name: getattr(target, flag.name) for flag in (_PROMPT, _OUTPUT, _RATE)}
        asked |= {name: value for name, value in said.items() if value}
    if _FILE.value:
        asked |= _listed(source, model, engine)
    asked |= {"ttft_seconds": _TTFT.value, "itl_seconds": _ITL.value, "attainment": _ATTAINMENT.value}
    asked |= {flag.name: flag.value for flag in (_ACCEPTED, _RATIO, _SHARED, _IMAGES)}
    asked |= {"image_size": size_of(_IMAGE_SIZE.value), "splits": splits_pages()}
    return ServingCase(model, cluster, engine, **asked, draft=draft)


def _check_target(target: Any) -> None:
    """Raises ShardlmError for what it says besides a flag, and for what neither says."""
    from shardlm.errors import ShardlmError
    from shardlm.plan.target import FORMS

    said = (_PROMPT, _OUTPUT, _RATE) if target.prompt_len else (_RATE,)
    if twice := [flag.name for flag in said if flag.present]:
        raise ShardlmError(f"--{twice[0]} is what the target says; leave it out")
    if not target.prompt_len and not _FILE.value:
        raise ShardlmError(f"the target does not say how long requests are: write {FORMS[1]!r}, or give --file=FILE")
    if target.prompt_len and _FILE.value:
        raise ShardlmError(
            f"the target says what requests are like, and so does --file={_FILE.value}; give one of the two "
            f"(with --file a target of {target.request_rate:g} requests/s alone)"
        )


def _listed(source: Any, model: Any, engine: Any) -> dict[str, Any]:
    """Of the requests of --file: they, and their mean lengths."""
    import pathlib

    from shardlm.errors import ShardlmError
    from shardlm.hf_files import home
    from shardlm.train.config import RunConfig

    if other := [flag.name for flag in (_PROMPT, _RATIO, _SHARED) if flag.present]:
        what = f"--{other[0]}={getattr(flags.FLAGS, other[0])}"
        raise ShardlmError(f"{what} says what requests are like, and so does --file={_FILE.value}; give one of the two")
    path = None if isinstance(source, RunConfig) else home(pathlib.Path(source))
    folder = path and (path if path.is_dir() else path.parent)
    written = pathlib.Path(_FILE.value).stat().st_mtime_ns if pathlib.Path(_FILE.value).is_file() else 0
    found = _read(_FILE.value, written, _OUTPUT.value, folder, model.shape.vocab_size, engine.block_size)
    lengths = {"prompt_len": round(found.prompt), "output_len": max(1, round(found.output))}
    return lengths | {"file": _FILE.value, "listed": found}


@functools.lru_cache(maxsize=2)
def _read(file: str, written: int, *how: Any) -> Any:
    """A file's requests, once for all clusters of an advice and all values of a sweep; `written`: when it was."""
    from shardlm.plan.serving.mix import of_file

    return of_file(file, *how)


@contextlib.contextmanager
def set_to(name: str, word: str) -> Iterator[None]:
    """A flag of this module or of the engine's with another value for a while, as a sweep has it: none for what is not
    asked for. Raises ShardlmError for a flag that is not there or is given besides, and for no value of it."""
    from shardlm.errors import ShardlmError

    modules = flags.FLAGS.flags_by_module_dict()
    own = {flag.name: flag for module in (__name__, "launch.engine_flags") for flag in modules[module]}
    if name not in own:
        raise ShardlmError(f"sweep of {name}: it is one of num_gpus, gpu, cluster, {', '.join(own)}")
    flag = own[name]
    if flag.present:
        raise ShardlmError(f"--{name}={flag.value} is what the sweep varies; leave it out")
    before = flag.value
    try:
        flag.value = None if word == "none" and flag.default is None else flag.parser.parse(word)
    except ValueError as error:
        raise ShardlmError(f"sweep of {name}: {word!r} is no value of --{name}: {error}") from None
    try:
        yield
    finally:
        flag.value = before


def plan_serving(
    source: Any, cluster: Any, *, most: int, compiled: int, as_json: bool, say: Any, report: str | None = None
) -> tuple[str, bool]:
    """What `--serve` prints, with the `compiled` best compiled, what takes long told to `say`, and a page written to
    `report`; and whether the first plan fits."""
    import json
    import pathlib

    from shardlm.plan.serving.answer import answer_serving
    from shardlm.plan.serving.report.data import to_json
    from shardlm.plan.serving.report.html import to_html
    from shardlm.plan.serving.report.text import to_text

    found = answer_serving(serving_case(source, cluster), fixed_axes(), compiled, say)
    told = to_json(found, most)
    if report:
        pathlib.Path(report).write_text(to_html(told), encoding="utf-8")
    said = json.dumps(told, indent=2, allow_nan=False) if as_json else to_text(told)
    return said, found.first.fits
