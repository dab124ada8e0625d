"""A device without a model: it keeps what a pool of pages would hold and fails where a row would attend to anything but
its own prefix. The token that follows a prefix is a checksum of it, so that a naive loop knows every reply."""

import zlib

import numpy as np

from shardlm.serve.page_table import PageTable
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
        holders: dict[int, list[int]] = {}  # of each page, the rows that have it in their tables
        for index, row in enumerate(batch.rows):
            for group, table in enumerate(batch.page_table[index]):
                pages = self.pages.pages(row.request.id, group)[: len(table)]
                assert all(page in (0, given) for page, given in zip(pages, table, strict=False)), "not its pages"
                for page in table[table > 0]:
                    holders.setdefault(page, []).append(index)
        for index, row in enumerate(batch.rows):
            for group, table in enumerate(batch.page_table[index]):
                for page in {table[position // self.pages.page_size] for position in range(row.start, row.end)}:
                    assert page != 0, f"{row} writes to scrap"
                    assert holders[page][0] == index, f"{row} writes page {page}, which rows {holders[page]} hold"
                    inside = sum(page in self.pages.pages(batch.rows[i].request.id, group) for i in holders[page])
                    others = self.pages._references[page] - inside
                    assert others == 0, f"{row} writes page {page}, which {others} requests outside the batch hold"

    def run(self):
        """(batch, tokens) of the oldest batch dispatched. A step writes what all rows have to before any row reads."""
        batch, known, attempts = self.queue.pop(0)
        out = np.full((len(batch.rows) + 1, batch.steps), -1)  # a padded row, as buckets have
        for index, row in enumerate(batch.rows):
            if row.tokens is not None:
                assert list(row.tokens) == known[index][row.start :]
                if row.fresh:
                    self.slots[row.slot] = []
                self.slots[row.slot] = known[index]
            length = len(self.slots[row.slot])
            assert length == (row.start + 1 if row.tokens is None else row.end), f"{row}: the slot has {length} tokens"
        for step in range(batch.steps):
            active = [i for i, row in enumerate(batch.rows) if row.tokens is not None or step < row.samples]
            for index in active:
                self._write(batch.rows[index], step, batch.page_table[index], attempts[index])
            for index in active:
                self._read(batch.rows[index], step, batch.page_table[index])
            for index in active:
                if (row := batch.rows[index]).samples:
                    sequence, request = self.slots[row.slot], row.request
                    sequence.append(next_token(request.salt, request.params.seed, sequence))
                    out[index, step] = sequence[-1]
        return batch, out

    def _written(self, row, step: int) -> range:
        return range(row.start + step, row.start + step + 1) if row.tokens is None else range(row.start, row.end)

    def _write(self, row, step: int, tables, attempt) -> None:
        sequence = self.slots[row.slot]
        for group, table in enumerate(tables):
            for position in self._written(row, step):
                place = table[position // self.pages.page_size], position % self.pages.page_size
                assert self.writer[place] != (attempt, position), f"{row.request} writes position {position} twice"
                self.writer[place] = attempt, position
                self.pool[place] = (group, row.request.salt, tuple(sequence[: position + 1]))

    def _read(self, row, step: int, tables) -> None:
        """What the queries of a step see, the first of them back to its window."""
        sequence, written = self.slots[row.slot], self._written(row, step)
        for group, (table, window) in enumerate(zip(tables, self.pages.windows, strict=True)):
            for position in range(max(0, written.start - window + 1) if window else 0, written.stop):
                found = self.pool[table[position // self.pages.page_size], position % self.pages.page_size]
                want = (group, row.request.salt, tuple(sequence[: position + 1]))
                assert found == want, f"{row.request} attends to {found} at position {position}, not to {want}"
