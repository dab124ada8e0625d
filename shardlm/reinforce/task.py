"""What a run on rewards learns from and is measured by (train/task.py, Task)."""

import dataclasses
import pathlib
from typing import Any

import jax

from shardlm.data.chats import template_of
from shardlm.errors import ShardlmError
from shardlm.hf_files import texts_beside
from shardlm.reinforce.prompts import Order, Prompt, read
from shardlm.reinforce.rewards import Reward, load_all
from shardlm.reinforce.rollouts import Rollouts, described, judge, means
from shardlm.reinforce.sampler import Sampler
from shardlm.serve.sampling_params import SamplingParams
from shardlm.tokenizer import Tokenizer, file_of
from shardlm.train import report
from shardlm.train.program import Program


@dataclasses.dataclass(frozen=True)
class Rewards:
    """Prompts to train on, and to validate by, and what judges replies."""

    program: Program
    tokenizer: Tokenizer
    tokenizer_path: pathlib.Path
    train: tuple[Prompt, ...]
    validation: tuple[Prompt, ...]
    rewards: tuple[Reward, ...]
    sampler: Sampler

    @classmethod
    def prepared(cls, program: Program) -> "Rewards":
        """Reads the prompts and compiles what samples. Raises ShardlmError for what is missing or bad."""
        config = program.config
        if jax.process_count() > 1:
            raise ShardlmError(
                f"grpo.reward={','.join(config.grpo.reward)} with {jax.process_count()} processes: the copies that "
                "sample are one process's; run it in one process, over the GPUs of one host"
            )
        rewards = load_all(config.grpo.reward)
        tokenizer, file = tokenizer_of(config.data.tokenizer, config.model.folder)
        template = template_of(config.data.chat_template) if config.data.chat_template else None
        longest = config.train.seq_len - config.grpo.max_tokens
        train, validation = (
            read(getattr(config.data, name), tokenizer, template, longest, f"data.{name}")
            for name in ("train", "validation")
        )
        sampler = Sampler.make(config, program.model, program.mesh.size)
        return cls(program, tokenizer, file, train, validation, rewards, sampler)

    def source(self) -> Rollouts:
        order = Order(self.train, self.program.config.data.seed)
        return Rollouts(self.program, self.sampler, self.rewards, order)

    def evaluator(self, options: dict[str, Any]) -> "Validation":
        return Validation(self)

    def described(self, source: Rollouts) -> list[str]:
        config = self.program.config
        grpo, train = config.grpo, config.train
        groups = train.global_batch // grpo.group_size
        held = f"; beta {grpo.beta}, {report.reference(self.program)}" if grpo.beta else ""
        return [
            f"rewards: {', '.join(reward.name for reward in self.rewards)}; {len(self.train):,} prompts to train on, "
            f"{len(self.validation):,} to validate{held}",
            f"run: {train.steps:,} steps of {groups} prompts x {grpo.group_size} replies of up to {grpo.max_tokens} "
            f"tokens, {train.steps * groups / grpo.updates / len(self.train):.2f} epochs; sampled by "
            f"{self.program.mesh.size // grpo.tensor} copies over {grpo.tensor} devices each",
        ]


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

    def __call__(self, params: Any, frozen: Any = None) -> dict[str, float]:
        """With these weights of a training state: validation_reward, the mean, of several functions each one's too,
        validation_reply_tokens and validation_truncated_fraction; validation_loss is minus the reward, by which the
        best checkpoints are kept."""
        train, grpo = self.task.program.config.train, self.task.program.config.grpo
        count = min(len(self.task.validation), train.eval_batches * train.global_batch or len(self.task.validation))
        chosen = [self.task.validation[i * len(self.task.validation) // count] for i in range(count)]
        self.task.sampler.update(params, frozen)
        greedy = SamplingParams(temperature=0, max_tokens=grpo.max_tokens)
        groups = self.task.sampler.sample([prompt.tokens for prompt in chosen], [greedy] * count)
        judged = judge(self.task.rewards, chosen, groups)
        values = means(judged) | described(groups)
        return {f"validation_{name}": value for name, value in values.items()} | {"validation_loss": -values["reward"]}
