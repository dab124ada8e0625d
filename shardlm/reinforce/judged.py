"""Replies with what was said of them, in every process of a run: each samples and judges those to its share of the
prompts, once, and all come to know all of them."""

import dataclasses
import pickle
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from shardlm.distributed import texts_of_all
from shardlm.reinforce.prompts import Prompt
from shardlm.reinforce.rewards import Reward, summed
from shardlm.reinforce.sampler import Sampler
from shardlm.serve.outputs import CompletionOutput
from shardlm.serve.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True)
class Judged:
    """A reply.

    logprobs   of each token, with which it was sampled; empty where they were not asked for
    truncated  whether max_tokens ended it
    rewards    of each function, NaN where it does not judge it
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    truncated: bool
    rewards: tuple[float, ...]


Groups = Sequence[Sequence[Judged]]
"""The replies to each prompt."""


@dataclasses.dataclass(frozen=True)
class Judges:
    """What samples in this process, and the functions that judge."""

    sampler: Sampler
    rewards: tuple[Reward, ...]

    def replies(
        self, params: Any, frozen: Any, prompts: Sequence[Prompt], asked: Sequence[SamplingParams]
    ) -> tuple[list[list[Judged]], float]:
        """(the replies to all prompts by these weights of a training state, seconds that the slowest process took). All
        processes must call it with the same, and have the same of it."""
        begun = time.monotonic()
        own = share(len(prompts), self.sampler.copies, jax.process_index())
        with self.sampler.holding(params, frozen):
            outputs = self.sampler.sample([prompt.asked for prompt in prompts[own]], asked[own])
        names = dict.fromkeys(name for prompt in prompts for name in prompt.columns)  # of all, whoever has which
        found = judge(self.rewards, prompts[own], outputs, list(names)), time.monotonic() - begun
        every = [pickle.loads(said) for said in texts_of_all(pickle.dumps(found))]
        return [group for groups, _ in every for group in groups], max(seconds for _, seconds in every)


def share(count: int, copies: Sequence[int], process: int) -> slice:
    """Which of `count` prompts a process has, by how many copies each has."""
    before, after = sum(copies[:process]), sum(copies[: process + 1])
    return slice(count * before // sum(copies), count * after // sum(copies))


def judge(
    rewards: Sequence[Reward],
    prompts: Sequence[Prompt],
    groups: Sequence[Sequence[CompletionOutput]],
    names: Sequence[str],
) -> list[list[Judged]]:
    """What functions say of the replies to each prompt, which they are given with the columns of these names."""
    pairs = [(prompt, output) for prompt, outputs in zip(prompts, groups, strict=True) for output in outputs]
    columns: Mapping[str, list] = {name: [prompt.columns.get(name) for prompt, _ in pairs] for name in names}
    columns |= {"completion_ids": [list(output.token_ids) for _, output in pairs]}
    given = [prompt.given for prompt, _ in pairs]
    completions = [prompt.completion(output.text) for prompt, output in pairs]
    said = [reward.judge(given, completions, columns).tolist() for reward in rewards] if pairs else []
    each = iter(zip(*said, strict=True))
    return [[_judged(output, next(each)) for output in outputs] for outputs in groups]


def _judged(output: CompletionOutput, rewards: tuple[float, ...]) -> Judged:
    logprobs = tuple(place.chosen.logprob for place in output.logprobs or ())
    return Judged(tuple(output.token_ids), logprobs, output.finish_reason == "length", rewards)


def totals(groups: Groups, names: Sequence[str]) -> np.ndarray:
    """[prompts, group], the sum of what the functions of these names say of each reply; NaN where none judges it."""
    return summed(_rewards(groups), names)


def described(groups: Groups, names: Sequence[str]) -> dict[str, float]:
    """Means over replies: reward and, of several functions, what each gave to those that it judged, if any;
    unjudged_fraction, of which no function said anything; reply_tokens, and truncated_fraction, how many max_tokens
    ended."""
    each, total = _rewards(groups), totals(groups, names)
    found = {"reward": float(np.nanmean(total))}
    if len(names) > 1:
        one = {f"reward_{name}": each[..., i] for i, name in enumerate(names)}
        found |= {name: float(np.nanmean(said)) for name, said in one.items() if not np.isnan(said).all()}
    replies = [reply for group in groups for reply in group]
    return found | {
        "unjudged_fraction": float(np.isnan(total).mean()),
        "reply_tokens": float(np.mean([len(reply.tokens) for reply in replies])),
        "truncated_fraction": float(np.mean([reply.truncated for reply in replies])),
    }


def _rewards(groups: Groups) -> np.ndarray:
    return np.array([[reply.rewards for reply in group] for group in groups])
