"""What the scheduler does in cases that a reader can follow by hand; for any order of events see
test_scheduler_properties.py."""

import numpy as np
import pytest

from shardlm.errors import ShardlmError
from shardlm.serve.chunk_programs import Cuts
from shardlm.serve.page_table import PageTable
from shardlm.serve.request import Request, Status
from shardlm.serve.sampling_params import SamplingParams, StructuredOutputs
from shardlm.serve.scheduler import Scheduler, SchedulerConfig

EOS = 0


def make(num_pages=40, page_size=4, **config) -> Scheduler:
    config = {"max_rows": 4, "max_batch_tokens": 16, "max_model_len": 64, "decode_steps": (1, 4)} | config
    return Scheduler(SchedulerConfig(**config), PageTable(num_pages, page_size))


def add(scheduler, id, prompt, priority=0, **params) -> Request:
    request = Request(id, prompt, SamplingParams(**params), eos_ids=[EOS], priority=priority)
    scheduler.add(request)
    return request


def distinct(id: int, length: int) -> list[int]:
    """A prompt that shares no page with that of another id."""
    return [id * 100 + i for i in range(1, length + 1)]


def shown(batch) -> list[tuple]:
    return [(row.request.id, row.start, row.end, row.samples) for row in batch.rows]


def step(scheduler, *tokens, prompts_first=False):
    """Schedules a batch, and lands it with the tokens of each row; 7 for all where none are given."""
    batch = scheduler.schedule(prompts_first=prompts_first)
    sampled = np.array([list(row) for row in tokens]) if tokens else np.full((len(batch.rows), batch.steps), 7)
    return batch, scheduler.land(batch, sampled)


def test_prompts_run_in_chunks_beside_decodes_and_then_several_steps_at_once():
    scheduler = make()
    add(scheduler, "a", distinct(1, 4), max_tokens=9)
    batch, landed = step(scheduler)
    assert batch.kind == "mixed" and shown(batch) == [("a", 0, 4, 1)] and landed[0].tokens == [7]
    add(scheduler, "b", distinct(2, 20), max_tokens=2)
    batch, landed = step(scheduler)
    assert batch.kind == "mixed" and batch.num_tokens == 16 and shown(batch) == [("a", 4, 5, 1), ("b", 0, 15, 0)]
    assert [(new.request.id, new.tokens) for new in landed] == [("a", [7])]  # b has none yet
    assert shown(step(scheduler)[0]) == [("a", 5, 6, 1), ("b", 15, 20, 1)]
    batch, landed = step(scheduler)
    assert (batch.kind, batch.steps, shown(batch)) == ("decode", 4, [("a", 6, 10, 4), ("b", 20, 21, 1)])
    assert landed[1].request.finish_reason == "length" and landed[1].tokens == [7]
    assert batch.page_table.dtype == np.int32 and batch.page_table.shape == (2, 1, 6)
    assert np.count_nonzero(batch.page_table[:, 0], axis=1).tolist() == [3, 6]  # scrap beyond a row's pages
    batch, _ = step(scheduler)
    assert batch.steps == 1 and not batch.rows[0].fresh  # a needs two more: a program of four would be idle for half


def test_prompts_go_first_where_nobody_waits_for_parts_of_replies():
    """But for requests of a better priority; and only where prompts have programs of their own."""
    scheduler = make(cuts=Cuts((4, 16), 4))
    add(scheduler, "a", distinct(1, 4), max_tokens=9)
    add(scheduler, "urgent", distinct(3, 4), max_tokens=9, priority=-1)
    step(scheduler, prompts_first=True)
    add(scheduler, "b", distinct(2, 16), max_tokens=2)
    assert shown(step(scheduler, prompts_first=True)[0]) == [("urgent", 4, 5, 1), ("b", 0, 16, 1)]
    batch, _ = step(scheduler, prompts_first=True)
    assert batch.kind == "decode" and {row.request.id for row in batch.rows} == {"a", "b", "urgent"}
    in_one = make()
    add(in_one, "a", distinct(1, 4), max_tokens=9)
    step(in_one, prompts_first=True)
    add(in_one, "b", distinct(2, 4), max_tokens=2)
    assert shown(step(in_one, prompts_first=True)[0]) == [("a", 4, 5, 1), ("b", 0, 4, 1)]


def test_with_drafts_too_the_host_runs_ahead():
    """It holds pages as if all drafts were right, and hears later how many were."""
    scheduler = make(drafts=3, max_batch_tokens=24)
    request = add(scheduler, "a", distinct(1, 3), max_tokens=30)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert [shown(first), shown(second)] == [[("a", 0, 3, 1)], [("a", 3, 19, 16)]] and second.steps == 4
    assert scheduler.schedule() is None  # two are under way
    scheduler.land(first, np.full((1, 1), 7))
    third = scheduler.schedule()  # 4 to 16 tokens after those of the first two
    assert shown(third) == [("a", 7, 32, 16)] and len(scheduler.pages.pages("a")) == 8
    [landed] = scheduler.land(second, np.full((1, 16), 7), np.array([5]))
    assert landed.tokens == [7] * 5 and request.computed == 24
    fourth = scheduler.schedule()
    assert shown(fourth) == [("a", 12, 32, 16)]
    scheduler.land(third, np.full((1, 16), 7), np.array([16]))
    fifth = scheduler.schedule()
    assert shown(fifth) == [("a", 28, 32, 4)]
    [landed] = scheduler.land(fourth, np.full((1, 16), 7), np.array([8]))
    assert request.finish_reason == "length" and len(request.tokens) == 33 and scheduler.pages.num_used == 0
    # Its end came before the host knew: the last row was idle.
    assert scheduler.land(fifth, np.full((1, 4), 7), np.array([0])) == [] and not scheduler.has_unfinished


def test_nobody_loses_pages_to_drafts_that_may_be_wrong():
    scheduler = make(num_pages=10, drafts=3, max_batch_tokens=24, max_model_len=36)
    add(scheduler, "a", distinct(1, 12))
    add(scheduler, "b", distinct(2, 12))
    step(scheduler)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert shown(first) == [("a", 12, 16, 4), ("b", 12, 16, 4)] and first.steps == 1  # a page is left
    assert shown(second) == [("a", 13, 20, 4)] and scheduler.preemptions == 0
    scheduler.land(first, np.full((2, 4), 7), np.array([1, 1]))
    assert ("b", 13, 14, 1) in shown(scheduler.schedule())  # of its drafts one was right


def test_the_host_runs_ahead_and_drops_what_was_sampled_after_the_end():
    scheduler = make()
    request = add(scheduler, "a", distinct(1, 4), max_tokens=30)
    first, second, third = (scheduler.schedule() for _ in range(3))
    assert [shown(batch) for batch in (first, second, third)] == [
        [("a", 0, 4, 1)],
        [("a", 4, 8, 4)],
        [("a", 8, 12, 4)],
    ]
    assert request.in_flight == 9 and scheduler.num_in_flight == 3
    with pytest.raises(ValueError, match="batch 1 landed, but the oldest in flight is 0; land them in order"):
        scheduler.land(second, np.zeros((1, 4), int))
    with pytest.raises(ValueError, match=r"batch 0 landed with tokens of shape \(0, 1\); it needs \(1, 1\)"):
        scheduler.land(first, np.zeros((0, 1), int))
    scheduler.land(first, np.array([[7]]))
    (landed,) = scheduler.land(second, np.array([[7, EOS, 7, 7]]))
    assert landed.tokens == [7, EOS] and (request.finish_reason, request.stop_reason) == ("stop", None)
    assert scheduler.pages.num_used == 0 and scheduler.schedule() is None  # freed at once, under the third batch
    assert scheduler.land(third, np.full((1, 4), 7)) == [] and list(request.generated) == [7, 7, EOS]
    assert not scheduler.has_unfinished


def test_what_ends_a_reply():
    scheduler = make(max_rows=8, max_batch_tokens=64, decode_steps=(1,))
    stop = add(scheduler, "stop", distinct(1, 3), stop_token_ids=[5])
    least = add(scheduler, "least", distinct(2, 3), stop_token_ids=[5], min_tokens=1)
    ignores = add(scheduler, "ignores", distinct(3, 3), ignore_eos=True, max_tokens=1)
    read = add(scheduler, "read", distinct(4, 3), max_tokens=0)
    full = add(scheduler, "full", distinct(5, 62), max_tokens=None)
    step(scheduler, [5], [5], [EOS], [-1], [-1])
    assert (stop.finish_reason, stop.stop_reason) == ("stop", 5)
    assert ignores.finish_reason == "length" and list(ignores.generated) == [EOS]
    assert read.finish_reason == "length" and not len(read.generated)
    assert not least.finished
    step(scheduler, [5], [9])
    assert list(least.generated) == [5, 5] and least.stop_reason == 5
    step(scheduler, [9])
    assert full.finish_reason == "length" and len(full.tokens) == 64  # all that the model can hold


def test_equal_prompts_share_pages_also_in_the_batch_that_writes_them():
    scheduler = make(max_rows=3, max_batch_tokens=32)
    a, b = (add(scheduler, id, distinct(1, 10), max_tokens=4) for id in "ab")
    exact = add(scheduler, "exact", distinct(1, 8), priority=1, max_tokens=4)
    told = add(scheduler, "told", distinct(1, 10), priority=2, max_tokens=4, prompt_logprobs=1)
    batch, _ = step(scheduler)
    assert shown(batch) == [("a", 0, 10, 1), ("b", 8, 10, 1), ("exact", 4, 8, 1)]  # the last token always runs
    table = batch.page_table[:, 0]
    assert (table[0, :2] == table[1, :2]).all() and table[0, 2] != table[1, 2]
    assert table[2, 0] == table[0, 0] and table[2, 1] != table[0, 1]
    assert (a.cached_tokens, b.cached_tokens, exact.cached_tokens) == (0, 8, 4)
    while not a.finished:
        step(scheduler)
    assert a.finished and shown(step(scheduler)[0]) == [("told", 0, 10, 1)] and told.cached_tokens == 0


def test_no_page_is_shared_in_which_a_wrong_draft_may_stand():
    scheduler = make(drafts=3, max_batch_tokens=24)
    first = add(scheduler, "first", distinct(1, 3))
    step(scheduler)
    batch = scheduler.schedule()
    scheduler.land(batch, np.array([[7, 8, 9, EOS] + [7] * 12]), np.array([4]))
    assert first.finished and len(first.tokens) == 8  # another draft than EOS is in the last place of the second page
    again = add(scheduler, "again", [*first.tokens, 8, 9])
    step(scheduler)
    assert again.cached_tokens == 4


def test_a_reply_is_found_when_it_comes_back_as_a_prompt():
    scheduler = make(decode_steps=(1,))
    first = add(scheduler, "first", distinct(1, 6), max_tokens=7)
    while not first.finished:
        step(scheduler)
    again = add(scheduler, "again", [*first.tokens, 8, 9])  # 13 tokens known, of which 12 have been written
    step(scheduler)
    assert again.cached_tokens == 12


def test_preemption_takes_from_the_last_and_it_comes_back_in_its_turn():
    # Four pages of four. Each holds one for its prompt, and needs another after four tokens of reply.
    scheduler = make(num_pages=5, max_model_len=16, decode_steps=(1,))
    a, b = add(scheduler, "a", distinct(1, 4), max_tokens=9), add(scheduler, "b", distinct(2, 4), max_tokens=9)
    c = add(scheduler, "c", distinct(3, 4), max_tokens=1)
    assert shown(step(scheduler)[0]) == [("a", 0, 4, 1), ("b", 0, 4, 1)]  # c would leave none for a and b to grow
    while not scheduler.preemptions:
        batch = scheduler.schedule()
        scheduler.land(batch, np.full((len(batch.rows), 1), 7))
        scheduler.pages.check_invariants()
    assert shown(batch) == [("a", 8, 9, 1)] and b.status is Status.WAITING and b.preemptions == 1
    while not a.finished:
        assert shown(step(scheduler)[0])[0][0] == "a"
    assert not b.finished and not c.finished
    while scheduler.has_unfinished:
        step(scheduler)
    assert list(b.generated) == [7] * 9 and list(c.generated) == [7] and scheduler.pages.num_used == 0


def test_what_is_preempted_waits_for_its_tokens_in_flight():
    scheduler = make(decode_steps=(1,))
    request = add(scheduler, "a", distinct(1, 4), max_tokens=9)
    first, second = scheduler.schedule(), scheduler.schedule()
    scheduler.reset()
    assert request.status is Status.WAITING and scheduler.pages.num_used == 0 and scheduler.schedule() is None
    scheduler.land(first, np.array([[7]]))
    assert scheduler.schedule() is None
    scheduler.land(second, np.array([[8]]))
    (row,) = scheduler.schedule().rows
    assert row.fresh and row.start == 0 and list(row.tokens) == [*distinct(1, 4), 7, 8]  # nothing is cached after reset


def test_a_better_priority_goes_first_and_takes_what_it_needs():
    scheduler = make(max_rows=2, decode_steps=(1,))
    low, lower = (add(scheduler, str(p), distinct(p, 4), priority=p, max_tokens=9) for p in (1, 2))
    step(scheduler)
    equal = add(scheduler, "equal", distinct(3, 4), priority=2, max_tokens=9)
    urgent = add(scheduler, "urgent", distinct(4, 4), priority=-1, max_tokens=1)
    batch, _ = step(scheduler)
    assert shown(batch) == [("1", 4, 5, 1), ("urgent", 0, 4, 1)]
    assert urgent.finished and lower.status is Status.WAITING and low.preemptions == 0
    batch, _ = step(scheduler)
    assert [row.request for row in batch.rows] == [low, lower] and not equal.preemptions  # it came before its equal


def test_nobody_is_turned_out_in_vain():
    scheduler = make(num_pages=17, decode_steps=(1,), max_batch_tokens=64)  # 16 pages
    add(scheduler, "large", distinct(1, 40), max_tokens=9)
    low = add(scheduler, "low", distinct(2, 8), priority=1, max_tokens=9)
    step(scheduler)
    add(scheduler, "waits", distinct(3, 60), max_tokens=1)  # the pages of low would not do
    batch, _ = step(scheduler)
    assert [row.request.id for row in batch.rows] == ["large", "low"] and low.preemptions == 0


def test_nobody_passes_the_one_that_waits_for_pages():
    scheduler = make(num_pages=17, max_batch_tokens=64)
    add(scheduler, "large", distinct(1, 40), max_tokens=9)
    step(scheduler)
    add(scheduler, "waits", distinct(2, 40), max_tokens=1)
    small = add(scheduler, "small", distinct(3, 4), priority=1, max_tokens=1)
    assert [row.request.id for row in step(scheduler)[0].rows] == ["large"] and small.status is Status.WAITING
    assert scheduler.num_waiting == 2


def test_nobody_passes_the_one_that_turned_itself_out():
    scheduler = make(num_pages=7, max_model_len=24, max_batch_tokens=32, decode_steps=(1,))
    add(scheduler, "a", distinct(1, 12))
    add(scheduler, "b", distinct(2, 8))
    step(scheduler)
    add(scheduler, "c", distinct(3, 3))
    batch, _ = step(scheduler)  # a takes the last page; b is the last in order, and its two pages would do for c
    assert [row.request.id for row in batch.rows] == ["a"]
    assert (scheduler.num_waiting, scheduler.preemptions, scheduler.pages.num_free) == (2, 1, 2)


def test_a_masked_request_samples_a_token_at_a_time_and_only_known_ones():
    scheduler = make()
    add(scheduler, "masked", distinct(1, 4), structured_outputs=StructuredOutputs(regex="a+"))
    add(scheduler, "free", distinct(2, 4))
    step(scheduler)
    batch = scheduler.schedule()
    assert batch.steps == 4 and [row.samples for row in batch.rows] == [1, 4]
    assert [row.request.id for row in scheduler.schedule().rows] == ["free"]


def test_aborting_gives_pages_and_slot_on_at_once():
    scheduler = make(max_rows=1, decode_steps=(1,))
    a, b = add(scheduler, "a", distinct(1, 4)), add(scheduler, "b", distinct(2, 4))
    first = scheduler.schedule()
    assert scheduler.abort("a") is a and a.finish_reason == "abort" and scheduler.pages.num_used == 0
    assert scheduler.abort("a") is None and scheduler.abort("never") is None
    second = scheduler.schedule()
    assert second.rows[0].request is b and second.rows[0].slot == first.rows[0].slot and second.rows[0].fresh
    assert scheduler.land(first, np.array([[7]])) == [] and not len(a.generated)
    assert scheduler.abort("b") is b and not scheduler.has_unfinished


def test_a_stop_text_cuts_the_reply_also_where_it_ended_later():
    scheduler = make()
    request = add(scheduler, "a", distinct(1, 4), max_tokens=5)
    step(scheduler)
    step(scheduler, [7, 8, 9, 7])
    assert request.finish_reason == "length"
    scheduler.finish(request, "stop", stop_reason="eight", num_generated=3)
    assert list(request.generated) == [7, 7, 8] and (request.finish_reason, request.stop_reason) == ("stop", "eight")


def test_refusals_name_the_numbers():
    scheduler = make()
    space = " and at least one new token"
    for length, wanted, needs, excess in ((70, 1, space, 7), (64, None, space, 1), (65, 0, "", 1)):
        message = f"the prompt has {length} tokens; max_model_len=64 must hold it{needs}. Shorten it by {excess}, ask"
        with pytest.raises(ShardlmError, match=message):
            add(scheduler, "a", distinct(1, length), max_tokens=wanted)
    add(scheduler, "a", distinct(1, 64), max_tokens=0)
    with pytest.raises(ShardlmError, match="there is an unfinished request with the id 'a'; give each its own"):
        add(scheduler, "a", [1])
    with pytest.raises(ShardlmError, match="max_rows=0 and max_model_len=64 must be at least 1"):
        make(max_rows=0)
    with pytest.raises(ShardlmError, match=r"max_batch_tokens=4 must be above max_rows=4: .* Raise it, or lower"):
        make(max_batch_tokens=4)
    with pytest.raises(ShardlmError, match=r"decode_steps=\(4, 8\) must be numbers of steps, each at least 1, with 1"):
        make(decode_steps=(4, 8))
    with pytest.raises(ShardlmError, match=r"needs 16 pages of 4, and the pool has 15, for 60 tokens. .* to 60$"):
        make(num_pages=16)
