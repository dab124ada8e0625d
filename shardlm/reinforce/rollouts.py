"""Batches for training on rewarded replies: prompts in order, replies sampled with the weights as they are, judged,
and packed into rows."""

import dataclasses
from typing import Any

import numpy as np

from shardlm.errors import ShardlmError
from shardlm.reinforce.judged import Groups, Judges, described, totals
from shardlm.reinforce.prompts import Order
from shardlm.reinforce.rewards import advantages
from shardlm.reinforce.rows import Reply, images_of, length_of, rows_of
from shardlm.serve.sampling_params import SamplingParams
from shardlm.state import TrainState
from shardlm.train.program import Program


class Rollouts:
    """A run's batches (train/task.py, Source). Which prompts come, and the seed of each one's replies, depend on
    data.seed and on how many came before, so that a run that resumes samples what it would have sampled."""

    waits_for = "sampling"

    def __init__(self, program: Program, judges: Judges, order: Order, eyes: Any = None):
        """`eyes`: the weights that read the images of prompts, None where they have none."""
        self._program, self._judges, self._order, self._eyes = program, judges, order, eyes
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
        sizes, seeing = (train.global_batch, train.seq_len, train.accumulation), self._program.seeing
        batch = rows_of(self._replies, *sizes, grpo.loss, bool(seeing and seeing.sight.axes))
        if seeing:
            images = images_of(self._replies, *sizes, self._judges.sampler.prepare)
            batch["images"] = seeing.readers(self._program.slots)(images)
        return self._program.on_devices(batch, tuple(range(train.global_batch)), self._eyes), self._told

    def _sample(self, state: TrainState) -> tuple[list[Reply], dict[str, float]]:
        config = self._program.config
        grpo, names = config.grpo, [reward.name for reward in self._judges.rewards]
        prompts = self._order.take(self._taken, config.train.global_batch // grpo.group_size)
        asked = [
            SamplingParams(
                n=grpo.group_size, max_tokens=grpo.max_tokens, logprobs=0, seed=_seed(config.data.seed, number)
            )
            for number in range(self._taken, self._taken + len(prompts))
        ]
        groups, seconds = self._judges.replies(state.params, state.frozen, prompts, asked)
        self._taken += len(prompts)
        rewards = totals(groups, names)
        gains = advantages(rewards, grpo.scale_rewards)
        replies = [
            Reply(prompt.tokens, judged.tokens, judged.logprobs, gain, taught, prompt.images)
            for prompt, group, *of in zip(prompts, groups, gains.tolist(), self._taught(groups, rewards), strict=True)
            for judged, gain, taught in zip(group, *of, strict=True)
        ]
        told = described(groups, names) | {
            "reward_deviation": float(np.mean([_deviation(of_group) for of_group in rewards])),
            "undecided_groups": float(np.mean(~gains.any(axis=1))),
            "sampling_seconds": seconds,
        }
        return replies, told

    def _taught(self, groups: Groups, rewards: np.ndarray) -> list[list[bool]]:
        """Whether anything is learned from each reply."""
        cut = np.array([[reply.truncated for reply in group] for group in groups])
        return (~np.isnan(rewards) & ~(cut & self._program.config.grpo.mask_truncated)).tolist()

    def get_state(self) -> dict[str, Any]:
        pending = [_said(reply) for reply in self._replies] if self._left else []
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
        each = self._program.config.grpo.group_size
        prompts = self._order.take(state["taken"] - len(state["replies"]) // each, len(state["replies"]) // each)
        replies = [
            Reply(tuple(r["prompt"]), tuple(r["tokens"]), tuple(r["logprobs"]), r["advantage"], r["taught"], images)
            for r, images in zip(
                state["replies"], (prompt.images for prompt in prompts for _ in range(each)), strict=True
            )
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


def _deviation(rewards: np.ndarray) -> float:
    """Of a group, of those that were judged."""
    judged = rewards[~np.isnan(rewards)]
    return float(judged.std()) if len(judged) else 0.0


def _said(reply: Reply) -> dict[str, Any]:
    """All but its images, which its prompt has."""
    return {field.name: getattr(reply, field.name) for field in dataclasses.fields(reply) if field.name != "images"}


def _seed(seed: int, number: int) -> int:
    """Of the replies to the prompt of this number, far from those of others."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
