"""Whose prompt is read first: shorter ones pass a longer one that came before them, but not for ever."""

import random

import numpy as np
import pytest

from shardlm.serve.page_table import PageTable
from shardlm.serve.request import Request, Status
from shardlm.serve.sampling_params import SamplingParams
from shardlm.serve.scheduler import Scheduler, SchedulerConfig
from shardlm.serve.turns import PASSES

BUDGET = 16


def make(num_pages=400, max_rows=4, **config) -> Scheduler:
    config = {"max_batch_tokens": BUDGET, "max_model_len": 400, "decode_steps": (1,)} | config
    return Scheduler(SchedulerConfig(max_rows, **config), PageTable(num_pages, 4))


def add(scheduler, id, prompt, priority=0, max_tokens=1) -> Request:
    request = Request(id, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True), priority=priority)
    scheduler.add(request)
    return request


def prompt(id: int, length: int) -> list[int]:
    """Shares no page with that of another id."""
    return [id * 1000 + i for i in range(length)]


def step(scheduler) -> dict[str, int]:
    """Runs a batch. Returns the tokens of prompts that it read, by request."""
    batch = scheduler.schedule()
    scheduler.land(batch, np.full((len(batch.rows), batch.width), 7))
    return {row.request.id: len(row.tokens) for row in batch.rows if row.tokens is not None}


def test_prompts_of_one_length_are_read_in_the_order_of_arrival():
    scheduler = make()
    for i in range(4):
        add(scheduler, str(i), prompt(i, 48))
    assert [list(step(scheduler)) for _ in range(12)] == [[str(i)] for i in range(4) for _ in range(3)]


def test_a_short_prompt_does_not_wait_for_all_of_a_long_one():
    scheduler = make()
    long = add(scheduler, "long", prompt(0, 160))
    assert step(scheduler) == {"long": 16}
    short = add(scheduler, "short", prompt(1, 6))
    assert step(scheduler) == {"short": 6, "long": 10} and short.finished
    assert long.status is Status.RUNNING and long.preemptions == 0


def test_a_long_prompt_waits_for_a_bounded_number_of_later_tokens():
    """Short ones come faster than they are read; the later of them wait behind the long one."""
    scheduler, read, came = make(num_pages=4000), 0, 0
    long = add(scheduler, "long", prompt(0, 100))
    while not long.finished:
        for _ in range(3):
            came += 1
            add(scheduler, str(came), prompt(came, 8))
        read += sum(count for id, count in step(scheduler).items() if id != "long")
        # Those that came before so much was read pass it, and are 3/2 of that here.
        assert read <= 1.5 * PASSES * 100 + 2 * BUDGET
    assert read >= PASSES * (100 - 8) and scheduler.num_waiting


@pytest.mark.parametrize("seed", range(20))
def test_nobody_passes_who_came_too_late(seed):
    """Whoever is read before one that came earlier is shorter, and came before that was due."""
    rng, scheduler = random.Random(seed), make(max_rows=8)
    read, came, ended, requests = 0, {}, [], []
    while len(requests) < 40 or scheduler.has_unfinished:
        for _ in range(rng.choice((0, 0, 1, 2)) if len(requests) < 40 else 0):
            requests.append(add(scheduler, str(len(requests)), prompt(len(requests), rng.choice((3, 9, 30, 90)))))
            came[requests[-1]] = read
        if scheduler.has_unfinished:
            read += sum(step(scheduler).values())
        ended += [request for request in requests if request.finished and request not in ended]
    for place, request in enumerate(ended):
        for earlier in ended[place + 1 :]:
            if came[earlier] < came[request]:
                due = came[earlier] + PASSES * earlier.prompt_len
                assert request.prompt_len < earlier.prompt_len and came[request] < due


def test_what_is_being_read_for_one_is_read_once():
    """Who would share pages that another is about to write waits for it, however little it would be by itself."""
    scheduler, shared = make(), prompt(0, 96)
    long = add(scheduler, "long", shared + prompt(1, 64))
    assert step(scheduler) == {"long": 16}
    follows = add(scheduler, "follows", shared + prompt(2, 8))
    other = add(scheduler, "other", prompt(3, 5))
    assert step(scheduler) == {"other": 5, "long": 11} and other.finished
    while not long.finished:
        assert "follows" not in step(scheduler) or long.finished
    while not follows.finished:
        step(scheduler)
    assert follows.cached_tokens == 96


def test_prompts_that_come_together_share_what_the_shorter_reads_first():
    scheduler, shared = make(), prompt(0, 32)
    long, short = add(scheduler, "long", shared + prompt(1, 64)), add(scheduler, "short", shared + prompt(2, 4))
    while not long.finished:
        step(scheduler)
    assert (short.cached_tokens, long.cached_tokens) == (0, 32)


def test_what_is_cached_is_not_counted():
    scheduler = make()
    add(scheduler, "first", prompt(0, 96))
    for _ in range(6):
        step(scheduler)
    add(scheduler, "new", prompt(1, 24))
    again = add(scheduler, "again", [*prompt(0, 96), 1, 2])
    assert list(step(scheduler)) == ["again", "new"] and again.cached_tokens == 96


def test_whose_prompt_was_read_keeps_the_place_of_its_arrival():
    """The one that came last loses its pages, not the one that has cost most."""
    scheduler = make(num_pages=43, max_model_len=150)
    long = add(scheduler, "long", prompt(0, 144), max_tokens=6)
    while not len(long.generated):
        step(scheduler)
    short = add(scheduler, "short", prompt(1, 16), max_tokens=9)
    while not long.finished:
        step(scheduler)
    assert long.preemptions == 0 and short.preemptions == 1


def test_a_better_priority_goes_first_however_long():
    scheduler = make()
    add(scheduler, "short", prompt(0, 5), priority=1)
    add(scheduler, "urgent", prompt(1, 64))
    assert [list(step(scheduler)) for _ in range(5)] == [["urgent"]] * 4 + [["short"]]
