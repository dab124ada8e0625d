"""Requests of equal lengths, all at once or so many at a time, through an engine whose steps read prompts and decode in
one pass: step by step, and where no prompt is read up to the next reply's end. Times of steps are others' work."""

import collections
import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Part:
    """Of `rows` prompts, `tokens` each behind those `before` are read in a step; `ends`: no more are left."""

    rows: int
    tokens: int
    before: int
    ends: bool


@dataclasses.dataclass(frozen=True)
class Step:
    """decoding  replies that get a token, and their context on average
    parts        of prompts that are read
    """

    decoding: int
    context: float
    parts: tuple[Part, ...]


@dataclasses.dataclass(frozen=True)
class Requests:
    """count    in all
    at_once     so many at a time, each followed by the next
    slots       of these, the most that have begun
    room        tokens of a step
    chunked     whether a prompt may be read in several steps; else it is read whole, also where `room` is less
    """

    count: int
    at_once: int
    prompt: int
    output: int
    slots: int
    room: int
    chunked: bool


@dataclasses.dataclass(frozen=True)
class Done:
    """seconds  until the last reply ends
    ttft, itl   means over all requests
    running     replies that decode in a step, on average over the time
    reading     share of the time that steps with prompts take
    """

    seconds: float
    ttft: float
    itl: float
    running: float
    reading: float


@dataclasses.dataclass(frozen=True)
class _Group:
    """Replies that began together, after so many steps."""

    rows: int
    step: int
    began: float


def closed_loop(asked: Requests, seconds: Callable[[Step], float]) -> Done:
    """First come, first served; `seconds` of a step."""
    P, O = asked.prompt, asked.output
    now = waited = between = ran = reading = 0.0
    started, ended = min(asked.at_once, asked.count), 0
    waiting = collections.deque([(started, 0.0)])  # (requests, when they came)
    left = started  # of them
    groups: collections.deque[_Group] = collections.deque()  # the oldest first: it ends first
    rows = made = step = 0  # replies under way, tokens of them
    done = 0  # tokens that are read of the first that waits
    while ended < asked.count:
        parts, done = _parts(asked, rows, left, done)
        steps = 1 if parts else O - 1 - (step - groups[0].step)
        context = P + (made / rows + (steps - 1) / 2 if rows else 0.0)
        taken = steps * seconds(Step(rows, context, parts))
        now, ran, reading = now + taken, ran + rows * taken, reading + taken * bool(parts)
        step, made = step + steps, made + rows * steps
        begun = sum(part.rows for part in parts if part.ends)
        if begun:
            groups.append(_Group(begun, step, now))
            waited += _taken(waiting, begun, now)
            rows, made, left = rows + begun, made + begun, left - begun
        while groups and step - groups[0].step >= O - 1:
            group = groups.popleft()
            rows, made, ended = rows - group.rows, made - group.rows * O, ended + group.rows
            between += group.rows * (now - group.began) / max(1, O - 1)
            follow = min(group.rows, asked.count - started)
            if follow:
                waiting.append((follow, now))
                started, left = started + follow, left + follow
    return Done(now, waited / ended, between / ended, ran / now, reading / now)


def _parts(asked: Requests, rows: int, waiting: int, done: int) -> tuple[tuple[Part, ...], int]:
    """(what is read in a step beside so many replies, tokens that are then read of the first that still waits)."""
    free, room, P = min(waiting, asked.slots - rows), asked.room - rows, asked.prompt
    found = []
    if done and room > 0:
        tokens = min(P - done, room)
        found.append(Part(1, tokens, done, done + tokens == P))
        free, room, done = free - 1, room - tokens, (done + tokens) % P
    if done:
        return tuple(found), done
    whole = min(free, max(0, room) // P)
    if not asked.chunked and not whole and free > 0:
        whole = 1
    if whole > 0:
        found.append(Part(whole, P, 0, True))
        free, room = free - whole, room - whole * P
    if asked.chunked and free > 0 and room > 0:
        found.append(Part(1, room, 0, False))
        done = room
    return tuple(found), done


def _taken(waiting: collections.deque[tuple[int, float]], count: int, now: float) -> float:
    """The time that the first `count` have waited, together."""
    waited = 0.0
    while count:
        here, came = waiting.popleft()
        own = min(here, count)
        waited += own * (now - came)
        count -= own
        if here > own:
            waiting.appendleft((here - own, came))
    return waited
