"""Functions that judge replies: how they are found and called, what is no reward, and what becomes of their numbers."""

import math
import os

import numpy as np
import pytest

from shardlm.errors import ShardlmError
from shardlm.reinforce.rewards import Reward, advantages, load, load_all, summed

FILE = """
import dataclasses
from beside_the_judges import exact

@dataclasses.dataclass
class Told:
    text: str

def length(prompts, completions, **columns):
    return [float(len(Told(text).text)) for text in completions]

def right(prompts, completions, answer, **columns):
    return [exact(text, wanted) for text, wanted in zip(completions, answer)]
"""


def test_a_function_of_a_file_or_a_package_is_called_as_in_trl(tmp_path):
    (tmp_path / "judges.py").write_text(FILE)
    (tmp_path / "beside_the_judges.py").write_text("def exact(a, b):\n    return float(a == b)\n")
    length, right = (load(f"{tmp_path}/judges.py:{name}") for name in ("length", "right"))
    columns = {"answer": ["ab", "x"], "completion_ids": [[1, 2], [3]]}
    assert length.judge(["p", "q"], ["ab", "abc"], columns).tolist() == [2, 3]
    assert right.judge(["p", "q"], ["ab", "abc"], columns).tolist() == [1, 0]
    assert load("math:prod").name == "prod"


def test_functions_of_one_name_are_told_apart_and_a_file_is_run_once(tmp_path):
    for name in ("one", "two"):
        text = "def score(prompts, **_):\n    return [1.0]\n\ndef other(prompts, **_):\n    return [2.0]\n"
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('{name} ')\n{text}")
    places = [f"{tmp_path}/{name}" for name in ("one.py:score", "two.py:score", "two.py:other")]
    assert [reward.name for reward in load_all(places)] == [*places[:2], "other"]
    assert (tmp_path / "ran").read_text() == "one two "
    with pytest.raises(ShardlmError, match="has math:prod twice; name each function once"):
        load_all(["math:prod", "math:prod"])


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("length", "names no function; write package.module:function or file.py:function"),
        ("nowhere.py:length", "there is no file nowhere.py"),
        ("no_such_module:length", "No module named 'no_such_module'"),
        ("math:length", "math has no function length; it has acos, "),
    ],
)
def test_what_is_not_there(where, message):
    with pytest.raises(ShardlmError, match=message):
        load(where)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda prompts, **_: [1.0], "gave 1 numbers for 2 replies"),
        (lambda prompts, **_: [1.0, -math.inf], "gave -inf; a reward is a finite number, or None or NaN"),
        (lambda prompts, **_: [1.0, "good"], "gave 'good'; a reward is a finite number, or None or NaN"),
        (lambda prompts: [1.0, 2.0], "ended with TypeError: .* it is called with prompts, completions, answer, each a"),
    ],
)
def test_what_is_no_reward(function, message):
    with pytest.raises(ShardlmError, match=message):
        Reward("judge", function).judge(["p", "q"], ["a", "b"], {"answer": [1, 2]})


def test_numbers_of_arrays_and_of_coroutines_are_numbers():
    async def later(prompts, **_):
        return np.array([True, False])

    assert Reward("later", later).judge(["p", "q"], ["a", "b"], {}).tolist() == [1, 0]
    found = Reward("bits", lambda prompts, **_: np.float32([0.5, 2])).judge(["p", "q"], ["a", "b"], {})
    assert found.tolist() == [0.5, 2]


def test_a_reward_that_changes_the_folder_leaves_the_runs(tmp_path):
    here = os.getcwd()
    Reward("away", lambda prompts, **_: [os.chdir(tmp_path) or 1.0]).judge(["p"], ["a"], {})
    assert os.getcwd() == here


def test_what_is_not_judged_is_none_or_no_number_as_in_trl():
    """trl 1.16, GRPOTrainer._calculate_rewards: None becomes NaN, and functions are summed by nansum."""
    found = Reward("judge", lambda prompts, **_: [None, np.float32("nan")]).judge(["p", "q"], ["a", "b"], {})
    assert np.isnan(found).all()
    judged = np.array([[1.0, 0.5], [math.nan, 3.0], [2.0, math.nan], [math.nan, math.nan]])
    assert summed(judged, ["a", "b"]).tolist()[:3] == [1.5, 3.0, 2.0] and np.isnan(summed(judged, ["a", "b"])[3])
    with pytest.raises(ShardlmError, match="none of 1 replies is judged by any of a, b: all gave None or NaN"):
        summed(judged[3:], ["a", "b"])


def test_a_reply_that_nobody_judges_is_none_of_its_group():
    rewards = np.array([[0.0, math.nan, 1.0], [math.nan, 2.0, math.nan], [math.nan] * 3])
    np.testing.assert_allclose(advantages(rewards, scale=True), [[-1, 0, 1], [0] * 3, [0] * 3], rtol=1e-3)
    assert advantages(rewards, scale=False)[0].tolist() == [-0.5, 0, 0.5]


def test_advantages_are_those_of_the_paper():
    """(r - mean) / std of each group (https://arxiv.org/abs/2402.03300, section 4.1.2)."""
    rewards = np.array([[0.0, 0.0, 1.0, 3.0], [2.0, 2.0, 2.0, 2.0]])
    found = advantages(rewards, scale=True)
    np.testing.assert_allclose(found[0], np.array([-1, -1, 0, 2]) / np.sqrt(1.5), rtol=1e-3)
    assert not found[1].any()
    assert advantages(rewards, scale=False)[0].tolist() == [-1, -1, 0, 2]
    assert np.mean([0.1] * 6) != 0.1 and not advantages(np.full((1, 6), 0.1), scale=True).any()
