"""Functions of the user's that judge replies, in the form that TRL gives them
(https://huggingface.co/docs/trl/grpo_trainer, "Using a custom reward function")."""

import asyncio
import collections
import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import math
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from shardlm.errors import ShardlmError

FORM = "package.module:function or file.py:function"


@dataclasses.dataclass(frozen=True)
class Reward:
    """A function and what it is called: `function(prompts=, completions=, completion_ids=, **columns)` gives a number
    for each reply, or None or NaN of those it does not judge. A prompt that is a text has completions that are texts,
    one of messages has messages. It may be `async`, and change the folder it is in."""

    name: str
    function: Callable[..., Sequence[float | None]]

    def judge(self, prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Sequence]) -> np.ndarray:
        """float64 [replies], NaN of those it does not judge. Raises ShardlmError for what is no reward."""
        try:
            with contextlib.chdir("."):  # which it may leave
                found = self.function(prompts=list(prompts), completions=list(completions), **columns)
                found = list(asyncio.run(found) if inspect.iscoroutine(found) else found)
        except Exception as error:
            raise ShardlmError(
                f"the reward {self.name} ended with {type(error).__name__}: {error}; it is called with prompts, "
                f"completions, {', '.join(columns)}, each a list of {len(prompts)}"
            ) from error
        if len(found) != len(prompts):
            raise ShardlmError(f"the reward {self.name} gave {len(found)} numbers for {len(prompts)} replies")
        found = [value.item() if hasattr(value, "item") else value for value in found]  # of numpy and torch
        for value in found:
            if value is not None and (not isinstance(value, int | float) or math.isinf(value)):
                raise ShardlmError(
                    f"the reward {self.name} gave {value!r}; a reward is a finite number, or None or NaN of a reply "
                    "that it does not judge"
                )
        return np.array([math.nan if value is None else float(value) for value in found])


def load_all(places: Sequence[str]) -> tuple[Reward, ...]:
    """The functions at these places, in names that differ: of those of one name the places. Raises ShardlmError where
    there is none, and for one that is named twice, whose metrics would be one."""
    names = collections.Counter(where.rpartition(":")[2] for where in places)
    if twice := [where for where, count in collections.Counter(places).items() if count > 1]:
        raise ShardlmError(f"grpo.reward={','.join(places)} has {twice[0]} twice; name each function once")
    found = [load(where) for where in places]
    return tuple(
        dataclasses.replace(reward, name=where) if names[reward.name] > 1 else reward
        for reward, where in zip(found, places, strict=True)
    )


def load(where: str) -> Reward:
    """The function at "package.module:function" or "file.py:function". Raises ShardlmError where there is none."""
    module, _, name = where.rpartition(":")
    if not module or not name:
        raise ShardlmError(f"grpo.reward={where!r} names no function; write {FORM}")
    try:
        found = _of_file(pathlib.Path(module)) if module.endswith(".py") else importlib.import_module(module)
    except ImportError as error:
        raise ShardlmError(f"grpo.reward={where}: {error}; write {FORM}") from error
    function = getattr(found, name, None)
    if not callable(function):
        others = [key for key, value in vars(found).items() if callable(value) and not key.startswith("_")]
        raise ShardlmError(
            f"grpo.reward={where}: {module} has no function {name}; it has {', '.join(others) or 'none'}"
        )
    return Reward(name, function)


@functools.cache  # of two functions one file is run once: it may load a model
def _of_file(path: pathlib.Path) -> Any:
    if not path.is_file():
        raise ShardlmError(f"grpo.reward: there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses of a module look it up
    sys.path.append(str(path.parent.resolve()))  # its neighbours are imported as where it is run
    spec.loader.exec_module(module)
    return module


def summed(judged: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """[..., functions] of what functions say -> the sum for each reply. Those that do not judge it add nothing; one
    that none judges has NaN, as in TRL (trl 1.16, GRPOTrainer: nansum over functions, NaN where all are NaN). Raises
    ShardlmError where that is every reply."""
    nobody = np.isnan(judged).all(axis=-1)
    if nobody.all():
        raise ShardlmError(
            f"none of {nobody.size} replies is judged by any of {', '.join(names)}: all gave None or NaN; what is "
            "trained on needs rewards, a number of at least some of its replies"
        )
    return np.where(nobody, np.nan, np.nansum(judged, axis=-1))


def advantages(rewards: np.ndarray, scale: bool) -> np.ndarray:
    """[prompts, group] of rewards -> how much better each reply is than its group, with `scale` in standard deviations
    of it (GRPO, https://arxiv.org/abs/2402.03300, section 4.1.2). A group whose replies are all as good has zeros; one
    that nobody judged, NaN, is none of its group, and has zero."""
    judged = ~np.isnan(rewards)
    count = np.maximum(judged.sum(axis=1, keepdims=True), 1)
    mean = np.where(judged, rewards, 0).sum(axis=1, keepdims=True) / count
    least, most = (f(rewards, axis=1, keepdims=True) for f in (np.fmin.reduce, np.fmax.reduce))
    alike = least == most  # a mean of 0.1s may not be 0.1
    centred = np.where(judged & ~alike, rewards - mean, 0.0)
    return centred / (np.sqrt((centred**2).sum(axis=1, keepdims=True) / count) + 1e-4) if scale else centred
