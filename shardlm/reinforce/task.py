"""What a run on rewards learns from and is measured by (train/task.py, Task)."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from shardlm.data.chats import template_of
from shardlm.distributed import of_all
from shardlm.errors import ShardlmError
from shardlm.hf_files import texts_beside
from shardlm.progress_bar import waiting
from shardlm.reinforce.judged import Judges, described
from shardlm.reinforce.prompts import Order, Prompt, digest, may_show, read
from shardlm.reinforce.rewards import load_all
from shardlm.reinforce.rollouts import Rollouts
from shardlm.reinforce.sampler import Sampler
from shardlm.serve.sampling_params import SamplingParams
from shardlm.tokenizer import Tokenizer, file_of
from shardlm.train import report
from shardlm.train.program import Program
from shardlm.train.seeing import sight_of_run


@dataclasses.dataclass(frozen=True)
class Rewards:
    """Prompts to train on, and to validate by, and what judges replies. `eyes`: the weights that read the images of
    prompts, those of the copies that sample; None where there are none."""

    program: Program
    tokenizer: Tokenizer
    tokenizer_path: pathlib.Path
    train: tuple[Prompt, ...]
    validation: tuple[Prompt, ...]
    judges: Judges
    eyes: Any = None

    @classmethod
    def prepared(cls, program: Program) -> "Rewards":
        """Reads the prompts and compiles what samples. Raises ShardlmError for what is missing or bad."""
        config = program.config
        rewards = load_all(config.grpo.reward)
        tokenizer, file = tokenizer_of(config.data.tokenizer, config.model.folder)
        template = template_of(config.data.chat_template) if config.data.chat_template else None
        longest = config.train.seq_len - config.grpo.max_tokens
        sight = sight_of_run(config) if any(map(may_show, (config.data.train, config.data.validation))) else None
        with waiting("reading prompts", jax.process_index() == 0):
            train, validation = (
                read(getattr(config.data, name), tokenizer, template, longest, f"data.{name}", sight)
                for name in ("train", "validation")
            )
        check_alike({"data.train": train, "data.validation": validation})
        sees = any(prompt.images for prompt in (*train, *validation))
        program = program.that_sees(sight) if sees else program
        sampler = Sampler.make(config, program.model, program.mesh, sees)
        eyes = sampler.eyes(program.mesh) if sees else None
        return cls(program, tokenizer, file, train, validation, Judges(sampler, rewards), eyes)

    def source(self) -> Rollouts:
        order = Order(self.train, self.program.config.data.seed)
        return Rollouts(self.program, self.judges, order, self.eyes)

    def evaluator(self, options: dict[str, Any]) -> "Validation":
        return Validation(self)

    def described(self, source: Rollouts) -> list[str]:
        config = self.program.config
        grpo, train = config.grpo, config.train
        groups, copies = train.global_batch // grpo.group_size, self.judges.sampler.copies
        processes = f", of {len(copies)} processes" if len(copies) > 1 else ""
        held = f"; beta {grpo.beta}, {report.reference(self.program)}" if grpo.beta else ""
        names = ", ".join(reward.name for reward in self.judges.rewards)
        images = sum(len(prompt.images) for prompt in self.train)
        seen = f"; {images:,} images in prompts to train on" if self.program.seeing else ""
        return [
            f"rewards: {names}; {len(self.train):,} prompts to train on, {len(self.validation):,} to validate"
            f"{seen}{held}",
            f"run: {train.steps:,} steps of {groups} prompts x {grpo.group_size} replies of up to {grpo.max_tokens} "
            f"tokens, {train.steps * groups / grpo.updates / len(self.train):.2f} epochs; sampled by "
            f"{sum(copies)} copies over {grpo.tensor} devices each{processes}",
        ]


def check_alike(prompts: Mapping[str, Sequence[Prompt]]) -> None:
    """Refuses prompts that are others in another process, by what they are called. All processes must call it."""
    for what, own in prompts.items():
        found = of_all(digest(own))
        if others := [process for process, said in enumerate(found) if said != found[0]]:
            raise ShardlmError(
                f"{what}: process {others[0]} of {len(found)} has other prompts than process 0; give all hosts the "
                "same files"
            )


def tokenizer_of(tokenizer: str, folder: str) -> tuple[Tokenizer, pathlib.Path]:
    """The one that data.tokenizer names, and its file. Raises ShardlmError where the checkpoint in `folder`, which
    reads what it says and writes what rewards see, has another."""
    if not tokenizer.startswith("bpe:"):
        path = texts_beside(pathlib.Path(tokenizer))
        found, own = (Tokenizer.load(one) for one in (path, texts_beside(pathlib.Path(folder))))
        if found.fingerprint == own.fingerprint:
            return found, file_of(path)
    raise ShardlmError(
        f"data.tokenizer={tokenizer} is another tokenizer than that of {folder}, which samples the replies; set "
        f"data.tokenizer to {folder}"
    )


@dataclasses.dataclass(frozen=True)
class Validation:
    """Judges greedy replies to the validation prompts."""

    task: Rewards

    def __call__(self, params: Any, frozen: Any = None, stops: Callable[[], bool] = lambda: False) -> dict[str, float]:
        """With these weights of a training state what `described` says of replies, as validation_reward and so on;
        validation_loss is minus the reward, by which the best checkpoints are kept. All are sampled at once: `stops` is
        asked before."""
        if stops():
            return {}
        train, grpo = self.task.program.config.train, self.task.program.config.grpo
        count = min(len(self.task.validation), train.eval_batches * train.global_batch or len(self.task.validation))
        chosen = [self.task.validation[i * len(self.task.validation) // count] for i in range(count)]
        greedy = SamplingParams(temperature=0, max_tokens=grpo.max_tokens)
        groups, _ = self.task.judges.replies(params, frozen, chosen, [greedy] * count)
        values = described(groups, [reward.name for reward in self.task.judges.rewards])
        return {f"validation_{name}": value for name, value in values.items()} | {"validation_loss": -values["reward"]}
