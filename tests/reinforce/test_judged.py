"""What several functions say of several replies, and what is logged of it."""

import math

from shardlm.reinforce.judged import Judged, described, judge, share, totals
from shardlm.reinforce.prompts import Prompt
from shardlm.reinforce.rewards import Reward
from shardlm.serve.outputs import CompletionOutput
from shardlm.train.report import describe_validation

NAMES = ["length", "of_math"]


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
    rewards = [Reward("length", length), Reward("of_math", of_math)]
    judged = judge(rewards, prompts, groups, ["answer", "level"])
    assert totals(judged, NAMES).tolist() == [[2, 1], [10, 8]]
    assert seen["prompts"] == ["a?", "a?", chat, chat] and seen["answer"] == [3, 3, 4, 4]
    assert seen["completions"] == ["xy", "z", *([{"role": "assistant", "content": text}] for text in ("uvw", "t"))]
    assert seen["ids"][2] == [117, 118, 119] and seen["more"] == {"level": [None, None, 7, 7]}
    of_tokens = {"unjudged_fraction": 0.0, "reply_tokens": 1.75, "truncated_fraction": 0.25}
    assert described(judged, NAMES) == {"reward": 5.25, "reward_length": 1.75, "reward_of_math": 7.0} | of_tokens
    one = judge(rewards[:1], prompts, groups, ["answer"])
    assert described(one, NAMES[:1]) == {"reward": 1.75} | of_tokens
    assert judge(rewards, [], [], ["answer"]) == []  # of a process with fewer prompts than others


def test_replies_that_nobody_judges_are_counted():
    of = [[Judged((1,), (), False, (1.0, math.nan)), Judged((1, 2), (), True, (math.nan, math.nan))]]
    found = described(of, NAMES)
    assert found["reward"] == found["reward_length"] == 1 and found["unjudged_fraction"] == 0.5
    assert "reward_of_math" not in found


def test_every_process_has_its_share_of_the_prompts():
    for count in (0, 1, 5, 8):
        for copies in ((1,), (4, 4), (1, 1, 1), (2, 6, 2)):
            shares = [share(count, copies, process) for process in range(len(copies))]
            assert [i for own in shares for i in range(count)[own]] == list(range(count))
    assert [share(8, (2, 6), process) for process in range(2)] == [slice(0, 2), slice(2, 8)]


def test_validation_is_told_in_a_line():
    values = {"validation_reward": 0.5, "validation_reply_tokens": 12.0, "validation_truncated_fraction": 0.25}
    assert describe_validation(values) == "validation reward 0.5000, 12 tokens a reply, 25.0% cut off"
    averaged = describe_validation(values | {"validation_loss_ema": -0.75})
    assert averaged == "validation reward 0.5000, of averaged weights 0.7500, 12 tokens a reply, 25.0% cut off"
