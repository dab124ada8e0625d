"""A request of the engine's own, to tell a device on which nothing runs any more from requests that break it."""

from array import array

import numpy as np

from shardlm.serve.batch import Row, ScheduledBatch
from shardlm.serve.request import Request
from shardlm.serve.runner import Runner
from shardlm.serve.sampling_params import SamplingParams
from shardlm.serve.settings import RequestSettings

NAME = "probe"


def probe(runner: Runner) -> None:
    """Reads a token and decodes another, in slot 0 and the scrap page; nothing else may be under way, and what programs
    keep must be new. Raises whatever a program does."""
    params = SamplingParams(temperature=0, max_tokens=2)
    request = Request(NAME, [0], params)
    settings = {NAME: RequestSettings.make(params, 1, (), (), 0)}
    rows = (Row(request, 0, 0, 1, 1, array("i", [0]), True), Row(request, 0, 1, 2, 1, None, False))
    pages = np.zeros((1, len(runner.config.layout.windows), 1), np.int32)
    for number, (kind, row) in enumerate(zip(("mixed", "decode"), rows, strict=True)):
        runner.start(ScheduledBatch(kind, number, 1, (row,), pages), settings).sampled()
