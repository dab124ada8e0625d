"""A device without a model: it keeps what a pool of pages would hold and fails where a row would attend to anything but
its own prefix. The token that follows a prefix is a checksum of it, so that a naive loop knows every reply."""

import random
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


def shown(request, tokens: list[int], count: int) -> tuple:
    """The first tokens, and the images that they stand for."""
    images = [(one.start, one.picture.digest) for one in request.pictures if one.start < count]
    return tuple(tokens[:count]), tuple(images)


class FakeDevice:
    """`dispatch` takes what a program would be given; `run` does the work of the oldest one, later and in order. Each
    step verifies up to `drafts` tokens, of which a random number is right. With `memories` some layers remember, in
    each slot, what was read last."""

    def __init__(self, pages: PageTable, max_rows: int, drafts: int = 0, memories: bool = False):
        self.pages, self.drafts, self.rng = pages, drafts, random.Random(0)
        self.pool = np.full((pages.num_pages, pages.page_size), None, object)  # the prefix that each place belongs to
        self.writer = np.full((pages.num_pages, pages.page_size), None, object)
        copies = pages.snapshots.count if pages.snapshots else 0
        self.memories: list[tuple] | None = [()] * (max_rows + 1 + copies) if memories else None
        self.slots: list[list[int]] = [[] for _ in range(max_rows)]  # of each slot, the last sampled token included
        self.queue: list = []
        self.host: dict[int, list[np.ndarray]] = {}  # of each bundle in the host's memory, what its pages held
        self.vectors: dict[int, tuple[bytes, int]] = {}  # of images, by their places

    def dispatch(self, batch, begun=()) -> None:
        """`begun`: ids of requests that hold pages and have had no row yet."""
        self.check_owners(batch, begun)
        # What the host may change before the device gets to it is taken now, as a runner would.
        known = [None if row.tokens is None else list(row.request.tokens[: row.end]) for row in batch.rows]
        known = [list(row.request.tokens) if row.again else now for row, now in zip(batch.rows, known, strict=True)]
        attempts = [(row.request.id, row.request.preemptions, row.request.heard) for row in batch.rows]
        self.queue.append((batch, known, attempts))

    def check_owners(self, batch, begun) -> None:
        """No page is written that anybody else holds, but for rows after the one that writes it, here or in a batch to
        come."""
        holders: dict[int, list[int]] = {}  # of each page, the rows that have it in their tables
        for index, row in enumerate(batch.rows):
            for group, table in enumerate(batch.page_table[index]):
                pages = self.pages.pages(row.request.id, group)[: len(table)]
                assert all(page in (0, given) for page, given in zip(pages, table, strict=False)), "not its pages"
                for page in table[table > 0]:
                    holders.setdefault(page, []).append(index)
        for index, row in enumerate(batch.rows):
            groups = zip(batch.page_table[index], self.pages.strides, strict=True)
            for group, (table, stride) in enumerate(groups):
                entries = range(row.start // stride, row.end // stride)
                for page in {table[entry // self.pages.page_size] for entry in entries}:
                    assert page != 0, f"{row} writes to scrap"
                    assert holders[page][0] == index, f"{row} writes page {page}, which rows {holders[page]} hold"
                    inside = sum(page in self.pages.pages(batch.rows[i].request.id, group) for i in holders[page])
                    others = self.pages._references[page] - inside
                    later = sum(page in self.pages.pages(id, group) for id in begun)
                    assert others == later, f"{row} writes page {page}, which {others} requests outside the batch hold"

    def run(self):
        """(batch, tokens, how many of each row count) of the oldest batch dispatched. A step writes what all rows have
        to before any row reads."""
        batch, known, attempts = self.queue.pop(0)
        self._move(batch.moves)
        self._copy(batch.restored)
        for picture, places in batch.looks:
            self.vectors |= {place: (picture.digest, i) for i, place in enumerate(places.tolist())}
        self._see(batch)
        out = np.full((len(batch.rows) + 1, batch.width + 1), -1)  # a padded row, as buckets have
        for index, row in enumerate(batch.rows):
            if row.tokens is not None:
                assert list(row.tokens) == known[index][row.start :]
                if row.fresh:
                    self.slots[row.slot] = []
                self.slots[row.slot] = known[index]
            if row.again:
                assert self.slots[row.slot][: len(known[index])] == known[index], "only what follows is dropped"
                self.slots[row.slot] = known[index]
            length = len(self.slots[row.slot])
            assert row.tokens is None or length == row.end, f"{row}: the slot has {length} tokens"
            assert self.drafts or row.tokens or length == row.start + 1, f"{row}: the slot has {length} tokens"
            assert row.start < length <= row.end + 1, f"{row}: the slot has {length} tokens"
        made = [0] * len(batch.rows)
        # One that came to its end before the host knew has nothing to do.
        rooms = [min(row.samples, row.end + 1 - len(self.slots[row.slot])) for row in batch.rows]
        for _ in range(batch.steps):
            active = [i for i, row in enumerate(batch.rows) if row.tokens is not None or made[i] < rooms[i]]
            work = {i: self._fed(batch.rows[i], rooms[i] - made[i]) for i in active}
            for index, (fed, written) in work.items():
                self._write(batch.rows[index], fed, written, batch.page_table[index], attempts[index])
            for index, (fed, written) in work.items():
                self._read(batch.rows[index], fed, written, batch.page_table[index])
                self._remember(batch.rows[index], fed, written)
            for index, (fed, written) in work.items():
                if batch.rows[index].samples:
                    new = self._sample(batch.rows[index], fed, written, batch.page_table[index])
                    out[index, made[index] : made[index] + len(new)] = new
                    made[index] += len(new)
        self._copy(batch.saved)
        return batch, out, np.array(made)

    def _move(self, moves) -> None:
        for move in moves:
            if move.saves:
                self.host[move.bundle] = [self.pool[page].copy() for page in move.pages]
                continue
            for page, held in zip(move.pages, self.host[move.bundle], strict=True):
                if page:
                    self.pool[page], self.writer[page] = held, None

    def _see(self, batch) -> None:
        """Each token of a chunk that stands for a part of an image finds it."""
        for row in batch.rows:
            if row.tokens is None or not row.request.pictures:
                continue
            want = {}
            for one in row.request.pictures:
                want |= {token: (one.picture.digest, i) for i, token in enumerate(one.takes.tolist())}
            for token, place in enumerate(row.seen.tolist(), row.start):
                assert (self.vectors[place] if place >= 0 else None) == want.get(token), f"{row} sees another image"

    def _copy(self, pairs) -> None:
        for old, new in pairs:
            assert self.memories[old], "nothing was kept there"
            self.memories[new] = self.memories[old]

    def _fed(self, row, room: int) -> tuple[list[int], range]:
        """The row's tokens with drafts of a step after them, and the positions that the step writes."""
        sequence = self.slots[row.slot]
        if row.tokens is not None:
            return list(sequence), range(row.start, row.end)
        fed = list(sequence)
        for _ in range(min(self.drafts, room - 1)):
            follows = next_token(row.request.salt, row.request.params.seed, fed)
            fed.append(follows if self.rng.random() < 0.6 else (follows + 1) % VOCAB)
        return fed, range(len(sequence) - 1, len(fed))

    def _write(self, row, fed, written, tables, attempt) -> None:
        for group, (table, stride) in enumerate(zip(tables, self.pages.strides, strict=True)):
            for position in range(written.start // stride * stride + stride - 1, written.stop, stride):
                place = self._place(table, position // stride)
                assert self.writer[place] != (attempt, position), f"{row.request} writes position {position} twice"
                self.writer[place] = attempt, position
                self.pool[place] = (group, row.request.salt, *shown(row.request, fed, position + 1))

    def _read(self, row, fed, written, tables) -> None:
        """What the queries of a step see, the first of them back to its window; of entries those that are complete."""
        groups = zip(tables, self.pages.windows, self.pages.strides, strict=True)
        for group, (table, window, stride) in enumerate(groups):
            first = max(0, written.start - window + 1) if window else 0
            for position in range(first + stride - 1, written.stop, stride):
                found = self.pool[self._place(table, position // stride)]
                want = (group, row.request.salt, *shown(row.request, fed, position + 1))
                assert found == want, f"{row.request} attends to {found} at position {position}, not to {want}"

    def _remember(self, row, fed, written) -> None:
        """Goes on from what was read before, as a layer without pages does; from nothing at position 0."""
        if self.memories is None:
            return
        before = row.request.salt, shown(row.request, fed, written.start)
        assert not written.start or self.memories[row.slot] == before, f"{row}: its slot remembers another text"
        self.memories[row.slot] = row.request.salt, shown(row.request, fed, written.stop)

    def _sample(self, row, fed, written, tables) -> list[int]:
        """As far as drafts are right, and one token more; what the others wrote is written anew."""
        sequence, before = self.slots[row.slot], len(self.slots[row.slot])
        right = True
        while right and len(sequence) <= len(fed):
            sequence.append(next_token(row.request.salt, row.request.params.seed, sequence))
            right = len(sequence) <= len(fed) and sequence[-1] == fed[len(sequence) - 1]
        for table, stride in zip(tables, self.pages.strides, strict=True):
            for position in range(len(sequence) - 1, written.stop):
                self.writer[self._place(table, position // stride)] = None
        return sequence[before:]

    def _place(self, table, entry: int) -> tuple[int, int]:
        return table[entry // self.pages.page_size], entry % self.pages.page_size
