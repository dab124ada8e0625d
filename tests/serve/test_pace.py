"""How long decode programs are while requests come (serve/pace.py), with a clock of the test's own."""

from shardlm.serve.pace import Pace


class Device:
    """Runs batches one after another, each step in so many seconds a row."""

    def __init__(self, pace: Pace, seconds_a_row: float):
        self.pace, self.seconds_a_row, self.number = pace, seconds_a_row, 0

    def run(self, rows: int, ahead: int = 2) -> list[int]:
        """The steps of each of `ahead` programs, all started before the first lands."""
        chosen = [self.pace.steps(rows) for _ in range(ahead)]
        for i in range(ahead):
            self.pace.started(self.number + i)
        for i, steps in enumerate(chosen):
            clock.now += rows * steps * self.seconds_a_row
            self.pace.landed(self.number + i, rows, steps)
        self.number += ahead
        return chosen


class Clock:
    now = 0.0


clock = Clock()


def make(seconds_a_row: float, most: int = 8, platform: str = "gpu") -> Device:
    return Device(Pace(most, platform, lambda: clock.now), seconds_a_row)


def test_programs_take_about_as_long_whatever_a_step_takes():
    device = make(0.001)
    assert device.run(1) == [1, 1]  # nothing is known
    assert device.run(1) == [8, 8]  # 20 steps of 1 ms would be 20 ms: the most
    assert device.run(5)[0] == 8 and device.run(5) == [4, 4]  # of 5 ms each, once that is known
    assert device.run(64)[0] == 4 and device.run(64) == [1, 1]
    assert device.run(6) == [4, 4] and device.run(2) == [8, 8]  # as the nearest that ran: 1, 5, 64
    on_cpu = make(0.3, platform="cpu")
    on_cpu.run(1)
    assert on_cpu.run(1) == [3, 3]  # a second there


def test_a_late_host_does_not_shorten_programs_at_once():
    device = make(0.0025)
    device.run(1), device.run(1)
    assert device.pace.steps(1) == 8
    device.pace.started(device.number)
    clock.now += 5.0  # it looked late
    device.pace.landed(device.number, 1, 8)
    assert device.pace.steps(1) == 6  # a quarter slower
    device.number += 1
    assert device.run(1) == [6, 6] and device.run(1) == [8, 8]


def test_batches_that_ended_unseen_took_some_time():
    """Two landed when a late host looked. Else programs were the longest for 20 batches, each adding a quarter."""
    device = make(0.005)
    device.run(1), device.run(1)
    assert device.pace.steps(1) == 4
    device.pace.started(device.number), device.pace.started(device.number + 1)
    clock.now += 1.0
    device.pace.landed(device.number, 1, 4), device.pace.landed(device.number + 1, 1, 4)
    device.number += 2
    assert device.pace.steps(1) == 6 and device.run(1) == [6, 6] and device.run(1) == [4, 4]


def test_prompts_say_nothing_of_a_step():
    device = make(0.005)
    device.run(1), device.run(1)
    device.pace.started(device.number)
    clock.now += 1.0
    device.pace.landed(device.number, 1, 0)
    assert device.pace.steps(1) == 4
