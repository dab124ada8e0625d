"""Batches for training on rewarded replies: prompts in order, replies sampled with the weights as they are, judged,
and packed into rows."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardlm.errors import ShardlmError
from shardlm.reinforce.prompts import Order, Prompt
from shardlm.reinforce.rewards import Reward, advantages, summed
from shardlm.reinforce.rows import Reply, length_of, rows_of
from shardlm.reinforce.sampler import Sampler
from shardlm.serve.outputs import CompletionOutput
from shardlm.serve.sampling_params import SamplingParams
from shardlm.state import TrainState
from shardlm.train.batches import to_devices
from shardlm.train.program import Program


class Rollouts:
    """A run's batches (train/task.py, Source). Which prompts come, and the seed of each one's replies, depend on
    data.seed and on how many came before, so that a run that resumes samples what it would have sampled."""

    waits_for = "sampling"

    def __init__(self, program: Program, sampler: Sampler, rewards: Sequence[Reward], order: Order):
        self._program, self._sampler, self._rewards, self._order = program, sampler, rewards, order
        self._taken = 0  # prompts
        self._replies: list[Reply] = []
        self._left = 0  # updates that are still made with them
        self._told: dict[str, float] = {}

    @property
    def follows(self) -> bool:
        return not self._left

    @property
    def epoch(self) -> float:
        return self._taken / len(self._order.prompts)

    def next(self, state: TrainState) -> tuple[dict, dict[str, float]]:
        """Replies of this state's weights, or once more those of the last time (config.grpo.updates)."""
        config = self._program.config
        train, grpo = config.train, config.grpo
        if not self._left:
            self._replies, self._told = self._sample(state)
            self._left = grpo.updates
        self._left -= 1
        batch = rows_of(self._replies, train.global_batch, train.seq_len, train.accumulation, grpo.loss)
        rows = tuple(range(train.global_batch))
        return to_devices(batch, rows, self._program.batch_sharding, self._program.slots), self._told

    def _sample(self, state: TrainState) -> tuple[list[Reply], dict[str, float]]:
        config, begun = self._program.config, time.monotonic()
        grpo = config.grpo
        prompts = self._order.take(self._taken, config.train.global_batch // grpo.group_size)
        params = [
            SamplingParams(
                n=grpo.group_size, max_tokens=grpo.max_tokens, logprobs=0, seed=_seed(config.data.seed, number)
            )
            for number in range(self._taken, self._taken + len(prompts))
        ]
        self._sampler.update(state.params, state.frozen)
        groups = self._sampler.sample([prompt.tokens for prompt in prompts], params)
        self._taken += len(prompts)
        judged = judge(self._rewards, prompts, groups)
        shape = len(prompts), grpo.group_size
        gains = advantages(judged["reward"].reshape(shape), grpo.scale_rewards)
        replies = [
            _reply(prompt, output, gain, grpo.mask_truncated)
            for prompt, outputs, gained in zip(prompts, groups, gains.tolist(), strict=True)
            for output, gain in zip(outputs, gained, strict=True)
        ]
        seconds = time.monotonic() - begun
        told = means(judged) | described(groups)
        told |= {
            "reward_deviation": float(judged["reward"].reshape(shape).std(axis=1).mean()),
            "undecided_groups": float(np.mean(~gains.any(axis=1))),
            "sampling_seconds": seconds,
        }
        return replies, told

    def get_state(self) -> dict[str, Any]:
        pending = [dataclasses.asdict(reply) for reply in self._replies] if self._left else []
        told = self._told if self._left else {}
        return {"taken": self._taken, "left": self._left, "replies": pending, "told": told} | self._identity()

    def set_state(self, state: dict[str, Any]) -> None:
        own = self._identity()
        differing = [
            f"{name} was {state.get(name)!r}, is {own[name]!r}" for name in own if state.get(name) != own[name]
        ]
        if differing:
            raise ShardlmError(
                f"the saved position in the prompts does not fit this run: {'; '.join(differing)}. Restore those "
                "settings, or start a new run from the checkpoint's weights"
            )
        replies = [
            Reply(tuple(r["prompt"]), tuple(r["tokens"]), tuple(r["logprobs"]), r["advantage"], r["taught"])
            for r in state["replies"]
        ]
        longest, seq_len = max((length_of(reply) for reply in replies), default=0), self._program.config.train.seq_len
        if longest > seq_len:
            raise ShardlmError(
                f"train.seq_len={seq_len}: {state['left']} updates are left with replies that were sampled before, and "
                f"the longest takes {longest} places of a row; set train.seq_len to that or more until they are made"
            )
        self._replies = replies
        self._taken, self._left, self._told = state["taken"], state["left"], state["told"]

    def close(self) -> None:
        pass

    def _identity(self) -> dict[str, Any]:
        """What decides the sequence of batches beside the weights."""
        config = self._program.config
        return {
            "prompts": self._order.fingerprint,
            "global_batch": config.train.global_batch,
            "group_size": config.grpo.group_size,
        }


def judge(
    rewards: Sequence[Reward], prompts: Sequence[Prompt], groups: Sequence[Sequence[CompletionOutput]]
) -> dict[str, np.ndarray]:
    """[replies], one prompt's after the other's: the "reward" of each and, of several functions, what each gave."""
    pairs = [(prompt, output) for prompt, outputs in zip(prompts, groups, strict=True) for output in outputs]
    names = dict.fromkeys(name for prompt, _ in pairs for name in prompt.columns)
    columns: Mapping[str, list] = {name: [prompt.columns.get(name) for prompt, _ in pairs] for name in names}
    columns |= {"completion_ids": [list(output.token_ids) for _, output in pairs]}
    given = [prompt.given for prompt, _ in pairs]
    completions = [prompt.completion(output.text) for prompt, output in pairs]
    each = {reward.name: reward.judge(given, completions, columns) for reward in rewards}
    total = {"reward": summed(list(each.values()), list(each))}
    return total | ({f"reward_{name}": values for name, values in each.items()} if len(each) > 1 else {})


def means(judged: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Of the replies that each function judged; nothing of one that judged none of them."""
    return {name: float(np.nanmean(values)) for name, values in judged.items() if not np.isnan(values).all()}


def described(groups: Sequence[Sequence[CompletionOutput]]) -> dict[str, float]:
    """Of replies: reply_tokens, their mean length, and truncated_fraction, how many max_tokens ended."""
    outputs = [output for outputs in groups for output in outputs]
    return {
        "reply_tokens": float(np.mean([len(output.token_ids) for output in outputs])),
        "truncated_fraction": float(np.mean([output.finish_reason == "length" for output in outputs])),
    }


def _reply(prompt: Prompt, output: CompletionOutput, advantage: float, mask_truncated: bool) -> Reply:
    logprobs = tuple(place.chosen.logprob for place in output.logprobs)
    taught = not (mask_truncated and output.finish_reason == "length")
    return Reply(prompt.tokens, tuple(output.token_ids), logprobs, advantage, taught)


def _seed(seed: int, number: int) -> int:
    """Of the replies to the prompt of this number, far from those of others."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
