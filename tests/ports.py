"""Ports for processes that a test starts."""

import contextlib
import random
import socket


def free_port() -> int:
    """Of this machine, which nobody listens at. Not one of those that the system gives to whoever asks for any, as
    other tests do all the time: such a one may be taken before the process that is told of it has started."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.bind(("localhost", port))
            return port
    raise AssertionError("of 100 ports between 20000 and 32000 none is free")
