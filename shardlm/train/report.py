"""What a training run tells its user: what it is about to do, how it ended, and the commands that go on from there."""

import math
import pathlib
import shlex
import sys
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from shardlm.data.loader import Loader
from shardlm.data.ngram import Baselines
from shardlm.data.prepare import Prepared
from shardlm.generate import Sampling, generate
from shardlm.layers.param import Execution
from shardlm.mesh import crossing_axes
from shardlm.metrics.curves import plot_curves
from shardlm.metrics.log import BY_SOURCE
from shardlm.ops.weight_format import AsPublished
from shardlm.run_files import CHECKPOINTS
from shardlm.state import TEACHER, TrainState
from shardlm.train.offload import saving
from shardlm.train.program import Program

if TYPE_CHECKING:
    from shardlm.train.loop import Run

SAMPLE_TOKENS = 120


def python() -> str:
    """This interpreter as its user may type it again: relative where it lies below the current directory."""
    here, executable = pathlib.Path.cwd(), pathlib.Path(sys.executable)
    return str(executable.relative_to(here) if executable.is_relative_to(here) else executable)


class Preparing:
    """A progress bar for each stage of preparing the data: calls are (stage, done, total)."""

    def __init__(self, enabled: bool):
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
        )
        self._bar = Progress(*columns, console=Console(), disable=not enabled)
        self._tasks: dict[str, int] = {}

    def __enter__(self) -> "Preparing":
        return self

    def __exit__(self, *_) -> None:
        if self._tasks:
            self._bar.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        if not self._tasks:
            self._bar.start()  # not before: a bar without stages ends in an empty line
        if stage not in self._tasks:
            self._tasks[stage] = self._bar.add_task(stage, total=total)
        self._bar.update(self._tasks[stage], completed=done, total=total)


def opening(program: Program, of_data: list[str], changes: list[str], step: int = 0) -> str:
    """The run, which has `step` steps behind it, in a few lines: model, mesh, `of_data`, and what changed since its
    last start."""
    config, model = program.config, program.model
    parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model.shapes))
    size = f"{parameters / 1e6:,.{1 if parameters >= 1e5 else 3}f}M parameters"
    if config.lora.rank:
        frozen = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(model.frozen_shapes))
        size = (
            f"{parameters / 1e6:,.3f}M parameters in adapters of rank {config.lora.rank}, on {config.model.folder} "
            f"({frozen / 2**30:,.3f} GiB{frozen_in(model.execution)})"
        )
    train = config.train
    lines = [
        f"model: {size}, {config.precision}, attention by {model.execution.attention}"
        + (f", {config.matmul} matmuls" if config.matmul != "dtype" else ""),
        f"mesh: {program.rules.mesh} over {program.mesh.size} {program.mesh.devices.flat[0].device_kind} devices, "
        f"rules {config.rules}",
        *of_data,
    ]
    if step >= train.steps:
        lines.append(f"the run has {step:,} steps behind it, so none is left to do: it is evaluated as it is")
    if program.rules.mesh.pipeline > 1:
        idle = program.schedule().bubble_fraction()
        lines.append(
            f"pipeline: {config.pipeline.schedule}, {train.accumulation} microbatches through "
            f"{program.rules.mesh.pipeline} stages, {config.pipeline.laps} rounds; "
            f"bubble fraction {idle:.1%} of the layers' time (computed)"
        )
        if "pipeline" not in program.rules.rest.axes("embed"):
            lines.append(
                f"weights rest whole over pipeline={program.rules.mesh.pipeline}, over which the embedding of "
                f"{model.config.embed_dim} does not divide"
            )
    offloaded = saving(program.state_shapes(), model.execution.dtype, program.mesh.devices.flat[0])
    if offloaded:
        lines.append(offloaded)
    if program.strategy.traffic:
        lines.append(program.strategy.traffic)
    crossing = crossing_axes(program.rules.mesh, jax.local_device_count())
    if "tensor" in crossing:
        lines.append(f"warning: tensor={program.rules.mesh.tensor} spans hosts; it is fastest within one host's GPUs")
    return "\n".join(lines + [f"changed since the last start: {change}" for change in changes])


def of_texts(program: Program, data: Prepared, loader: Loader) -> list[str]:
    """The data of a run in a few lines."""
    config, train = program.config, program.config.train
    tokens, drawn = train.steps * train.global_batch * train.seq_len, loader.drawn(train.steps)
    lines = [
        f"data: {data.train.num_tokens:,} training tokens, {data.validation.num_tokens:,} validation tokens, "
        f"vocabulary {data.tokenizer.vocab_size:,}, {loader.padding_fraction:.2%} padding",
        f"run: {train.steps:,} steps of {train.global_batch} x {train.seq_len} tokens"
        + ("" if drawn else f", {tokens / data.train.num_tokens:.2f} epochs"),
    ]
    for one in drawn:
        what = f"source {one.name}: {one.num_tokens:,} tokens, weight {one.share:.4g}"
        lines.append(f"{what}, {one.epochs:.2f} epochs over this run")
    if program.seeing:
        lines.append(_of_images(program))
    if config.preference.beta:
        pairs, held_out = (shards.num_documents // 2 for shards in (data.train, data.validation))
        held = reference(program) if config.preference.compares else "no reference"
        lines.append(
            f"preferences: {pairs:,} {program.objective.counted} to train on, {held_out:,} to validate; "
            f"{config.preference.loss}, beta {config.preference.beta}, {held}"
        )
    if program.teacher:
        lines.append(_of_teacher(program))
    return lines


def _of_teacher(program: Program) -> str:
    distill, leaves = program.config.distill, jax.tree.leaves(program.frozen_shapes()[TEACHER])
    count = sum(math.prod(leaf.shape) for leaf in leaves)
    held = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    of_jsd = f" of beta {distill.beta}" if distill.kind == "jsd" else ""
    return (
        f"teacher: {distill.teacher}, {count / 1e6:,.1f}M parameters ({held / 2**30:,.3f} GiB over all devices); its "
        f"loss, {distill.kind}{of_jsd} at temperature {distill.temperature}, weighs {distill.weight}, that of the data "
        f"{1 - distill.weight:.3g}"
    )


def _of_images(program: Program) -> str:
    where, learned = program.config.model.folder, program.seeing.learned
    if not learned:
        return f"images: read by the encoder in {where}, which is not trained; the run sees while that is there"
    count = sum(math.prod(s.shape) for s in jax.tree.leaves(learned.shapes))
    part = "all of it" if program.config.train.encoder == "all" else "its projector"
    return (
        f"images: read by the encoder in {where}, of which {part} is trained, {count / 1e6:,.3f}M parameters "
        f"({learned.bytes / 2**20:,.1f} MiB of weights on each device, the optimizer's state beside it); the run sees "
        "while the folder is there"
    )


def reference(program: Program) -> str:
    """What the model is held to, and where it is."""
    held = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(program.frozen_shapes()))
    where = "which adapters stand on" if program.config.lora.rank else f"{held / 2**30:,.3f} GiB over all devices"
    return f"reference {program.config.model.folder}, {where}"


def frozen_in(execution: Execution) -> str:
    """What the frozen weights of projections are in, with those of a checkpoint's few bits that cannot be; "" where all
    are in the compute dtype."""
    held = execution.weights
    if not isinstance(held, AsPublished):
        return f", projections in {held}" if held != "dtype" else ""
    left = f" but for {', '.join(held.left)}, which are in {jnp.dtype(execution.dtype).name}" if held.left else ""
    return f", projections in {held.text}{left}"


def describe_validation(values: dict[str, float]) -> str:
    """One line of validation metrics."""
    ema = f", averaged weights {values['validation_loss_ema']:.4f}" if "validation_loss_ema" in values else ""
    if "validation_reward" in values:
        tokens, cut = values["validation_reply_tokens"], values["validation_truncated_fraction"]
        ema = f", of averaged weights {-values['validation_loss_ema']:.4f}" if ema else ""
        reward = values["validation_reward"]
        return f"validation reward {reward:.4f}{ema}, {tokens:,.0f} tokens a reply, {cut:.1%} cut off"
    own = [f"{name.removeprefix(BY_SOURCE)} {loss:.4f}" for name, loss in values.items() if name.startswith(BY_SOURCE)]
    more = (f" ({', '.join(own)})" if own else "") + ema
    loss = values["validation_loss"]
    if "validation_reward_accuracy" in values:
        margin, accuracy = values["validation_reward_margin"], values["validation_reward_accuracy"]
        unit = "" if "validation_kl" in values else " nats/pair"
        return f"validation loss {loss:.4f}{unit}{more}, reward margin {margin:.4f}, accuracy {accuracy:.1%}"
    bits = f", {values['bits_per_byte']:.3f} bits/byte" if "bits_per_byte" in values else ""
    if "validation_divergence" in values:
        bits += f", {values['validation_divergence']:.4f} nats/token from the teacher"
    perplexity = values["perplexity"]
    return f"validation loss {loss:.4f} nats/token{more}, perplexity {perplexity:,.1f}{bits}"


def stopped(run: "Run", signal_name: str | None, command: str) -> None:
    """After a signal: goodput so far, where the run was saved and how to go on; from the first process."""
    if jax.process_index() != 0:
        return
    run.say(str(run.goodput.summary()))
    run.say(
        f"{signal_name or 'another process was told to stop'}: saved after step {run.step} in "
        f"{run.checkpoints.directory / str(run.step)}\n"
        f"resume with: {command}"
    )


def finished(run: "Run", state: TrainState, command: str) -> None:
    """The end of a run: curves, baselines, a sample, goodput and the commands that go on. Every process calls it,
    since sampling runs on the whole mesh."""
    config = run.program.config
    sample = _sample(run, state) if config.train.sample_prompt else None
    if jax.process_index() != 0:
        return
    references: dict[str, float] = {}
    if config.train.baselines:
        baselines = run.evaluator.baselines()
        references = {"unigram": baselines.unigram, "smoothed bigram": baselines.bigram}
        run.say(_comparison(baselines, run.validation["validation_loss"]))
    if sample is not None:
        run.say(f"sample:\n{sample}")
    curve = plot_curves(config.run_dir, references, run.program.objective.counted.removesuffix("s"))
    run.say(str(run.goodput.summary()))
    run_dir = pathlib.Path(config.run_dir)
    sees = run.program.seeing is not None
    prompt = config.train.sample_prompt or ("What is in the picture?" if sees else "Once upon a time")
    chat, shown = "--chat " if config.data.chat_template else "", "--image=FILE " if sees else ""
    run.say(
        f"checkpoint: {run_dir / CHECKPOINTS / str(run.step)}\n"
        f"curves:     {curve} and {run_dir / 'metrics.jsonl'}; "
        f"tensorboard --logdir {shlex.quote(str(run_dir / 'tensorboard'))} (pip install tensorboard)\n"
        f"resume:     {with_steps(command, 2 * run.step)}\n"
        f"generate:   {python()} -m launch.generate --checkpoint={shlex.quote(str(run_dir))} {chat}{shown}"
        f"--prompt={shlex.quote(prompt)}"
    )


def with_steps(command: str, steps: int) -> str:
    """The command line of a run, to train for so many steps instead."""
    flag = "--config.train.steps"
    words = shlex.split(command)
    kept = [
        word
        for before, word in zip(["", *words], words, strict=False)
        if word != flag and before != flag and not word.startswith(f"{flag}=")
    ]
    return f"{shlex.join(kept)} {flag}={steps}"


def _comparison(baselines: Baselines, loss: float) -> str:
    rows = (("unigram", baselines.unigram), ("smoothed bigram", baselines.bigram), ("model", loss))
    table = "\n".join(f"  {name:<16} {nats:.4f}" for name, nats in rows)
    verdict = "below" if loss < baselines.bigram else "not below"
    title = f"validation loss in nats/token over {baselines.num_tokens:,} tokens:"
    return f"{title}\n{table}\nthe model is {verdict} the bigram"


def _sample(run: "Run", state: TrainState) -> str:
    """Text that the model continues the configured prompt with."""
    tokenizer, prompt = run.task.tokenizer, run.program.config.train.sample_prompt
    tokens = generate(
        run.program.decoder(),
        run.program.model.bound(state.frozen).whole(state.params),
        tokenizer.encode(prompt),
        max_new_tokens=SAMPLE_TOKENS,
        sampling=Sampling(temperature=0.8, top_k=40),
        stop_ids=(tokenizer.end_of_document_id,),
    )
    stream = tokenizer.stream()
    return prompt + "".join([stream.step(token) for token in tokens]) + stream.finish()
