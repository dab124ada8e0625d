"""A device without a model: it keeps what a pool of pages would hold and fails where a row would attend to anything but
its own prefix. The token that follows a prefix is a checksum of it, so that a naive loop knows every reply."""

import zlib

import numpy as np

from shardlm.serve.page_table import PageTable
from shardlm.serve.request import Request
from shardlm.serve.sampling_params import SamplingParams

VOCAB, EOS = 7, 0


def next_token(salt: str, seed: int | None, prefix: list[int]) -> int:
    return zlib.crc32(f"{salt}{seed}".encode() + bytes(prefix)) % VOCAB


def reply(prompt: list[int], params: SamplingParams, salt: str, max_model_len: int) -> tuple[list[int], str]:
    """What one request alone would get, token by token, and why it ends."""
    tokens = prompt[-params.truncate_prompt_tokens :] if params.truncate_prompt_tokens else list(prompt)
    space = max_model_len - len(tokens)
    most = space if params.max_tokens is None else min(space, params.max_tokens)
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
    new: list[int] = []
    while len(new) < most:
        new.append(next_token(salt, params.seed, tokens + new))
        if new[-1] in stops and len(new) > params.min_tokens:
            return new, "stop"
    return new, "length"


class FakeDevice:
    """`dispatch` takes what a program would be given; `run` does the work of the oldest one, later and in order."""

    def __init__(self, pages: PageTable, max_rows: int):
        self.pages = pages
        self.pool = np.full((pages.num_pages, pages.page_size), None, object)  # the prefix that each place belongs to
        self.writer = np.full((pages.num_pages, pages.page_size), None, object)
        self.slots: list[list[int]] = [[] for _ in range(max_rows)]  # of each slot, the last sampled token included
        self.queue: list = []

    def dispatch(self, batch) -> None:
        self.check_owners(batch)
        # What the host may change before the device gets to it is taken now, as a runner would.
        known = [None if row.tokens is None else list(row.request.tokens[: row.end]) for row in batch.rows]
        attempts = [(row.request.id, row.request.preemptions) for row in batch.rows]
        self.queue.append((batch, known, attempts))

    def check_owners(self, batch) -> None:
        """No page is written that anybody else holds, but for rows after the one that writes it."""
        holders: dict[int, list[int]] = {}
        for index, row in enumerate(batch.rows):
            table = batch.page_table[index]
            assert list(table[table > 0]) == list(self.pages.pages(row.request.id))[: len(table[table > 0])]
            for page in self.pages.pages(row.request.id):
                holders.setdefault(page, []).append(index)
        for index, row in enumerate(batch.rows):
            for position in range(row.start, row.end):
                page = batch.page_table[index, position // self.pages.page_size]
                assert page != 0, f"{row} writes to scrap"
                assert holders[page][0] == index, f"{row} writes page {page}, which rows {holders[page]} hold"
                others = self.pages._references[page] - len(holders[page])
                assert others == 0, f"{row} writes page {page}, which {others} requests outside the batch hold"

    def run(self):
        """(batch, tokens) of the oldest batch dispatched."""
        batch, known, attempts = self.queue.pop(0)
        out = np.full((len(batch.rows) + 1, batch.steps), -1)  # a padded row, as buckets have
        for index, row in enumerate(batch.rows):
            table, attempt = batch.page_table[index], attempts[index]
            if row.tokens is not None:
                assert list(row.tokens) == known[index][row.start :]
                if row.fresh:
                    self.slots[row.slot] = []
                self.slots[row.slot] = sequence = known[index]
                self._write(row.request, sequence, range(row.start, row.end), table, attempt)
                if row.samples:
                    out[index, 0] = self._sample(row.request, sequence, table)
                continue
            sequence = self.slots[row.slot]
            assert len(sequence) == row.start + 1, f"{row}: the slot's last token has position {len(sequence) - 1}"
            for step in range(row.samples):
                position = len(sequence) - 1
                self._write(row.request, sequence, range(position, position + 1), table, attempt)
                out[index, step] = self._sample(row.request, sequence, table)
        return batch, out

    def _write(self, request: Request, sequence, positions, table, attempt) -> None:
        for position in positions:
            place = table[position // self.pages.page_size], position % self.pages.page_size
            assert self.writer[place] != attempt, f"{request} writes position {position} twice"
            self.writer[place] = attempt
            self.pool[place] = (request.salt, tuple(sequence[: position + 1]))

    def _sample(self, request: Request, sequence, table) -> int:
        read = [self.pool[table[i // self.pages.page_size], i % self.pages.page_size] for i in range(len(sequence))]
        for position, found in enumerate(read):
            want = (request.salt, tuple(sequence[: position + 1]))
            assert found == want, f"{request} attends to {found} at position {position}, not to {want}"
        sequence.append(next_token(request.salt, request.params.seed, sequence))
        return sequence[-1]
