"""What a replica does under continuous batching at a rate of requests, as a fluid and a queue: prompts take a share of
the device's time and replies the rest; a prompt waits for those before it. Estimates, from formulas.

Replies: of R requests a second with O tokens each, B = R O t run at once (Little's law), where t is the time between
two tokens of one, a decode step over the share of time that prompts leave. Prompts: a queue with random arrivals and
equal service, M/D/1, whose mean wait is R S^2 / 2 (1 - R S); DistServe (https://arxiv.org/abs/2401.09670, section 3.1)
takes the same for the time to the first token. Longer bursts than Poisson's wait longer.

Where lengths differ, all is by means: of the time of a prompt, of its square for the wait (the Pollaczek-Khinchine
formula, of which M/D/1 is the case of equal service), of the context of replies under way; shorter prompts pass longer
ones (serve/turns.py), so that the wait is less. Tokens that the prefix cache has are not computed; it is taken to have
all that another request brought before, which arrivals.py finds out.

Batches are made before those under way have landed: on top of the queue a request finds a cycle of decoding and, where
a prompt leaves room in a program, of the prompts that came meanwhile, as one finds a server on vacation whose gate
shuts behind those that are there (gated vacations: H. Takagi, Queueing Analysis, volume 1, 1991).

Against the scheduler itself with random arrivals and these times of programs (arrivals.py), of requests of one length
the time between tokens is within 15% up to half of the most and 18% at HEADROOM, the mean time to the first token
within 2% all but idle, 10% at half of the most and 8% at HEADROOM. Where lengths vary by 60%, what prompts cost in a
crowd is the scheduler's (crowd.py): for prompts of 1,024 to 6,000 tokens 13% at half of the most and 17% at HEADROOM,
for 200 to 16,000 (lognormal) 6 and 3%, where first come first served would be 61% too long. Between tokens 11 to 34% at
HEADROOM, more for long prompts, always too short.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import numpy as np

from shardlm.plan.serving.case import ServingCase
from shardlm.plan.serving.crowd import crowded_seconds
from shardlm.plan.serving.time import Speed
from shardlm.serve.engine import AHEAD
from shardlm.serve.pace import all_steps_of
from shardlm.serve.turns import PASSES

HEADROOM = 0.8  # of the most that a replica sustains; nearer to it waits grow without bound


@dataclasses.dataclass(frozen=True)
class Load:
    """A replica at `rate` requests a second.

    running       requests whose replies are under way, on average; fewer than the slots also where those limit it
    itl_seconds   between two tokens of a reply
    ttft_seconds  mean, from arrival to the first token; infinite where prompts come faster than they are read
    prompts       share of the time that goes to prompts
    limit         what keeps it from more
    """

    rate: float
    running: float
    itl_seconds: float
    ttft_seconds: float
    prompts: float
    limit: str

    def tokens_per_second(self, output_len: float) -> float:
        return self.rate * output_len


@dataclasses.dataclass(frozen=True)
class Replica:
    """A replica of a case, as the fluid sees it.

    alone    seconds of one prompt with nothing beside it
    each     of every kind of prompt, in order
    uneven   the mean of its square, of that of the mean
    crowded  its share of programs that are full of others to read: of its chunks, as long as the programs that hold
             them
    parts    chunks of a prompt that leave room for others beside them, on average
    full     seconds of a program that is full of prompts
    """

    case: ServingCase
    speed: Speed
    alone: float
    each: tuple[float, ...]
    uneven: float
    crowded: float
    parts: float
    full: float
    slots: int

    @classmethod
    def of(cls, case: ServingCase, speed: Speed) -> "Replica":
        mix, whole = case.mix, speed.memory.sizes.max_batch_tokens
        each = np.array([speed.prefill(kind.prompt, mix.cached(kind)) for kind in mix.kinds])
        fresh = mix.prompt - mix.found
        chunk = speed.chunk(whole, int(mix.found + max(0.0, (fresh - whole) // 2)))
        alone, uneven = float(np.mean(each)), float(np.mean(each**2) / np.mean(each) ** 2)
        read = [list(speed.chunks(kind.prompt - mix.cached(kind), speed.memory.sizes.max_rows)) for kind in mix.kinds]
        if len({sum(own) for own in read}) > 1:
            crowded = speed.images_seconds + crowded_seconds(mix, speed)
        else:
            crowded = speed.images_seconds + sum(map(speed.padded, read[0])) / (FILLED * whole) * chunk
        parts = float(np.mean([sum(speed.padded(count) < whole for count in own) for own in read]))
        slots, each = speed.memory.at_once_of(mix), tuple(sorted(each.tolist()))
        return cls(case, speed, alone, each, uneven, crowded, max(1.0, parts), chunk, slots)

    @property
    def context(self) -> float:
        """Of a reply under way, on average."""
        return self.case.mix.context

    def running(self, batch: float) -> Load:
        """At the rate at which so many replies, all the time, are under way."""
        P, O = self.case.mix.prompt - self.case.mix.found, self.case.mix.output
        sizes, made = self.speed.memory.sizes, self.case.tokens_a_step
        step = float(np.interp(batch, *self._steps))
        budget = sizes.max_batch_tokens
        prompt = self.alone
        for _ in range(4):  # how often prompts meet others depends on how long they take
            rate = batch / (O * step / made + batch * prompt)
            running, met, program = self._under_way(rate, rate * prompt)
            service = prompt + P / budget * met  # several short prompts share a step
            busy = rate * service
            prompt = self.alone + min(1.0, busy) ** 2 * (self.crowded - self.alone)  # full programs come last
        # One after the other they wait half as long as where all are read by turns, as those of many parts are.
        turns = 2 - 1 / self.parts
        wait = turns * self._wait(service, busy) if busy < 1 else math.inf
        own = prompt + math.ceil(P / budget) * met
        # A request finds a batch under way, on average half done, and those started behind it; with no prompt among
        # them each is a whole decode program. Beside one that leaves room in a program go those that came meanwhile,
        # those before a request and those behind it (a queue with gated vacations).
        ours, room = min(1.0, rate * prompt), 1 - min(1.0, P / budget)
        batch_seconds = program * max(0.0, 1 - busy) + met * min(1.0, busy)
        cycle = batch_seconds * (1 + room * ours / (1 - ours)) if ours < 1 else math.inf
        found = min(cycle, met + self.full) * (AHEAD - 1 + (1 + room * ours) / 2)
        return Load(rate, running, running / (rate * O), found + wait + own, rate * prompt, "")

    def _wait(self, service: float, busy: float) -> float:
        """Of prompts that take so long on average, that share of the time: shortest first (A. Cobham, Priority
        assignment in waiting line problems, 1954), unless that is less than turns.py lets pass. By that each waits
        PASSES times as long as it is read longer than one of no length would; all together, weighed by what they
        take, wait as long in any order (L. Kleinrock's conservation law, 1965)."""
        in_order = busy * self.uneven * service / (2 * (1 - busy))
        seconds, counts = np.unique(self.each, return_counts=True)
        until = np.cumsum(seconds * counts) / sum(self.each) * busy
        before = np.concatenate([[0.0], until[:-1]])
        shortest = in_order * float(np.average((1 - busy) / ((1 - before) * (1 - until)), weights=counts))
        return max(shortest, in_order - PASSES * service * (self.uneven - 1) / busy)

    def _under_way(self, rate: float, prompts: float) -> tuple[float, float, float]:
        """(replies under way, seconds of a step beside a prompt, of a decode program), on average over what random
        arrivals bring: of n replies one ends every O t(n) / n seconds, where t is a step over the share of time that
        prompts leave (a birth-death chain)."""
        n = np.arange(1, self.slots + 1)
        steps = np.interp(n, *self._steps)
        each = rate * self.case.mix.output * steps / (self.case.tokens_a_step * (1 - prompts))
        weights = np.concatenate([[0.0], np.cumsum(np.log(each / n))])
        share = np.exp(weights - weights.max())
        share = share[1:] / share.sum()
        most = self.speed.memory.sizes.decode_steps
        programs = steps * all_steps_of(steps, most)
        return float(share @ n), float(share @ steps), float(share @ programs)

    @functools.cached_property
    def _steps(self) -> tuple[np.ndarray, np.ndarray]:
        """(numbers of replies, seconds of a step)."""
        rows = np.unique(np.geomspace(1, max(2, self.slots), 24).round())
        return rows, np.array([self.speed.step_seconds(float(n), self.context) for n in rows])

    def most(self) -> Load:
        """The highest rate within the slots, the pages, the budget of prompts and the latencies asked for; `rate` 0
        where none is."""
        return self._most

    @functools.cached_property
    def _most(self) -> Load:
        case, sizes = self.case, self.speed.memory.sizes
        # Each reply needs its prompt read before it ends: B P tokens of prompts in the steps of a reply.
        fresh, steps = case.mix.prompt - case.mix.found, case.mix.output / case.tokens_a_step
        by_budget = steps * sizes.max_batch_tokens / fresh
        limits = {
            "max_num_seqs" if self.slots == sizes.max_rows else "pages": float(self.slots),
            "max_num_batched_tokens": by_budget,
        }
        targets: dict[str, Callable[[Load], bool]] = {}
        if case.ttft_seconds:
            targets["ttft_seconds"] = lambda load: load.ttft_seconds <= case.ttft_seconds
        if case.itl_seconds:
            targets["itl_seconds"] = lambda load: load.itl_seconds <= case.itl_seconds
        for name, holds in targets.items():
            limits[name] = self.largest(holds, min(limits.values()))
        name = min(limits, key=limits.get)
        if limits[name] <= LEAST:
            one = self.running(LEAST)
            return dataclasses.replace(one, rate=0.0, running=0.0, limit=name)
        return dataclasses.replace(self.running(limits[name]), limit=name)

    def at(self, rate: float) -> Load | None:
        """At this rate; None where it is more than `most` allows."""
        most = self.most()
        if rate > most.rate:
            return None
        batch = self.largest(lambda load: load.rate <= rate, float(self.slots))
        return dataclasses.replace(self.running(batch), rate=rate, limit="")

    def largest(self, holds: Callable[[Load], bool], most: float) -> float:
        """The largest number of replies under way for which this holds; it does for fewer, and not for more."""
        low, high = LEAST, most
        if holds(self.running(high)):
            return high
        if not holds(self.running(low)):
            return low
        while high / low > 1.001:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if holds(self.running(middle)) else (low, middle)
        return low


# Of programs that many prompts wait for: chunks of other lengths leave room (arrivals.py, at HEADROOM).
FILLED = 0.9
LEAST = 1e-2  # replies under way of a replica that is all but idle
