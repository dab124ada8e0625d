"""What several functions say of several replies, and what is logged of it."""

import numpy as np

from shardlm.reinforce.prompts import Prompt
from shardlm.reinforce.rewards import Reward
from shardlm.reinforce.rollouts import described, judge, means
from shardlm.serve.outputs import CompletionOutput
from shardlm.train.report import describe_validation


def reply(text: str, finish: str = "stop") -> CompletionOutput:
    return CompletionOutput(0, text, [ord(letter) for letter in text], finish_reason=finish)


def test_functions_see_every_reply_with_its_prompt_and_columns():
    seen = {}

    def length(prompts, completions, completion_ids, answer, **columns):
        seen.update(prompts=prompts, completions=completions, ids=completion_ids, answer=answer, more=columns)
        return [len(ids) for ids in completion_ids]

    def of_math(prompts, level, **columns):
        return [None if one is None else float(one) for one in level]

    chat = [{"role": "user", "content": "b?"}]
    prompts = [Prompt("a?", (1,), {"answer": 3}), Prompt(chat, (2,), {"answer": 4, "level": 7})]
    groups = [[reply("xy"), reply("z", "length")], [reply("uvw"), reply("t")]]
    judged = judge([Reward("length", length), Reward("of_math", of_math)], prompts, groups)
    assert judged["reward"].tolist() == [2, 1, 10, 8] and judged["reward_length"].tolist() == [2, 1, 3, 1]
    assert seen["prompts"] == ["a?", "a?", chat, chat] and seen["answer"] == [3, 3, 4, 4]
    assert seen["completions"] == ["xy", "z", *([{"role": "assistant", "content": text}] for text in ("uvw", "t"))]
    assert seen["ids"][2] == [117, 118, 119] and seen["more"] == {"level": [None, None, 7, 7]}
    assert means(judged) == {"reward": 5.25, "reward_length": 1.75, "reward_of_math": 7.0}
    assert described(groups) == {"reply_tokens": 1.75, "truncated_fraction": 0.25}
    assert means({"reward": np.array([1.0]), "reward_other": np.array([np.nan])}) == {"reward": 1.0}
    assert set(judge([Reward("length", length)], prompts, groups)) == {"reward"}


def test_validation_is_told_in_a_line():
    values = {"validation_reward": 0.5, "validation_reply_tokens": 12.0, "validation_truncated_fraction": 0.25}
    assert describe_validation(values) == "validation reward 0.5000, 12 tokens a reply, 25.0% cut off"
    averaged = describe_validation(values | {"validation_loss_ema": -0.75})
    assert averaged == "validation reward 0.5000, of averaged weights 0.7500, 12 tokens a reply, 25.0% cut off"
