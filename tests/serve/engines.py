"""Small engines for tests: a random model over the tests' tokenizer, and few pages."""

import contextlib
import dataclasses
import functools
import pathlib
from unittest import mock

import jax
import numpy as np
from small import LLAMA, init, mesh_of

from shardlm import hf_files, weights
from shardlm.layers.param import Execution
from shardlm.mesh import MeshSpec
from shardlm.models import registry
from shardlm.models.llama import LlamaConfig
from shardlm.rules import Rules
from shardlm.serve.chunk_programs import Cuts
from shardlm.serve.engine import Engine
from shardlm.serve.host_pages import HostPages
from shardlm.serve.layers import taken_apart
from shardlm.serve.page_table import PageTable
from shardlm.serve.pool_size import sized
from shardlm.serve.runner import Runner
from shardlm.serve.runner_config import RunnerConfig
from shardlm.serve.scheduler import Scheduler, SchedulerConfig
from shardlm.serve.scheduler_config import most_decoded
from shardlm.serve.snapshots import Snapshots
from shardlm.serve.speculation.build import by_modules, layouts_of, make_proposer
from shardlm.state import ModelDef
from shardlm.tokenizer import train_bpe

TOKENIZER = train_bpe(['{"name": "ab", "age": 12, "tags": ["x", "y"]}\n true né日🙂'] * 8, 300)
END = TOKENIZER.end_of_document_id
CONFIG = dataclasses.replace(LLAMA, vocab_size=TOKENIZER.vocab_size + 4)


def of_model(
    model: ModelDef,
    params,
    mesh,
    *,
    rows=3,
    tokens=32,
    length=64,
    pages=20,
    steps=4,
    caching=True,
    runner_of: type[Runner] = Runner,
    speculative=None,
    draft=None,
    prefill="pages",
    in_parts=False,
    cuts=None,
    least=2,
    snapshots=0,
    bundles=0,
) -> Engine:
    """An engine with pages of 4 tokens; `pages` with the scrap page. `speculative`: a SpeculativeConfig. `least`: rows
    of the smallest decode program, two as on GPUs; where there are as many as `rows`, but one is compiled. `snapshots`:
    of memories, each of which has to save two pages. `bundles`: of pages in the host's memory."""
    drafts = speculative.num_speculative_tokens if speculative else 0
    decoded, draft = most_decoded(steps, drafts), draft or by_modules(speculative, model)
    layout, *beside = (
        dataclasses.replace(layout, num_pages=pages) for layout in layouts_of(model, draft, length, 4, decoded, drafts)
    )
    how = {"platform": "cpu", "in_parts": in_parts}
    sizes = RunnerConfig(layout, 4, rows, tokens, length, steps, prefill, least, snapshots, bundles, **how)
    beside = [sizes.as_own(layout) for layout in beside]
    proposer = make_proposer(speculative, draft, sizes, *beside) if speculative else ()
    runner = runner_of(model, params, mesh, sizes, *proposer)
    runner.compile()
    memories = layout.memories > 0
    config = SchedulerConfig(rows, tokens, length, (1, steps), drafts, cuts or Cuts(), memories)
    kept = Snapshots(rows + 1, snapshots, 4, least=8, tail=2) if snapshots else None
    caching = caching and (kept is not None or not memories)
    how = {
        "windows": layout.windows,
        "strides": layout.strides,
        "longest_step": config.longest_step,
        "caching": caching,
    }
    table = PageTable(pages, 4, **how, snapshots=kept, host=HostPages(bundles) if bundles else None)
    return Engine(runner, Scheduler(config, table), TOKENIZER, [END])


def another(engine: Engine, *, tokens: int, pages: int, caching=True) -> Engine:
    """One over the same programs, that cuts prompts into chunks of fewer tokens and has fewer pages."""
    config, sizes = dataclasses.replace(engine.scheduler.config, max_batch_tokens=tokens), engine.runner.config
    how = {
        "windows": sizes.layout.windows,
        "strides": sizes.layout.strides,
        "longest_step": config.longest_step,
        "caching": caching,
    }
    if caching and config.memories:
        how["snapshots"] = Snapshots(config.max_rows + 1, sizes.snapshots, 4, least=8, tail=2)
    table = PageTable(pages, 4, **how)
    return Engine(engine.runner, Scheduler(config, table), TOKENIZER, [END])


@contextlib.contextmanager
def decoding_from(rows: int):
    """Engines are built whose smallest decode program has so many rows: on CPUs it has one, on GPUs two."""

    def sizes(*args) -> tuple:
        own, *beside = sized(*args)
        return dataclasses.replace(own, least_rows=rows), *beside

    with mock.patch("shardlm.serve.pool_size.sized", sizes):
        yield


def random_engine(spec: MeshSpec, seed: int = 0, **options) -> tuple[Engine, ModelDef, object]:
    """(an engine, the model and the parameters it was made of)."""
    mesh = mesh_of(spec)
    with jax.set_mesh(mesh):
        model = ModelDef.make(CONFIG.transformer(), Execution(Rules.make("zero3", spec).for_decoding()))
        params, own = init(model, seed), init(model, seed)
        apart = taken_apart(model, own)
    return of_model(*apart, mesh, **options), model, params


def finished(engine: Engine) -> dict:
    """Steps to the end: the outputs by request; nothing may be left of them."""
    done = {}
    while engine.has_unfinished:
        done |= {output.request_id: output for output in engine.step() if output.finished}
        engine.scheduler.pages.check_invariants()
    assert engine.scheduler.pages.num_used == 0 and not engine._replies
    return done


def folder_of(path: pathlib.Path, seed: int = 0, shape: LlamaConfig = CONFIG, params=None) -> pathlib.Path:
    """A Hugging Face folder of these parameters or of random ones, with tokenizer and chat template."""
    with jax.set_mesh(mesh_of(MeshSpec())):
        model = ModelDef.make(shape.transformer(), Execution(Rules.make("zero3", MeshSpec())))
        params = init(model, seed) if params is None else params
    config = {**shape.to_hf(), "max_position_embeddings": 64, "eos_token_id": END, "dtype": "float32"}
    named = functools.partial(registry.names, config, model.config)
    tensors = weights.planned(model.config, params, named, np.dtype("float32"))
    hf_files.write_folder(path, tensors, config)
    TOKENIZER.save(path / "tokenizer.json")
    (path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    return path
