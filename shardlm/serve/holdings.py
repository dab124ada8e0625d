"""What running requests hold on the device: a slot each, and pages in every group of layers, with the table that says
which. Owns their coming and going; who gets them, and who loses them to whom, is the scheduler's. No jax.
"""

from collections.abc import Sequence

import numpy as np

from shardlm.serve.batch import Row
from shardlm.serve.encoder_cache import EncoderCache
from shardlm.serve.host_pages import Move
from shardlm.serve.page_table import PageTable, extend_hashes
from shardlm.serve.request import Request
from shardlm.serve.scheduler_config import SchedulerConfig
from shardlm.serve.snapshots import Copies


class Holdings:
    """Slots and pages of one scheduler's requests, and places of their images. `pages` is taken over empty."""

    def __init__(self, config: SchedulerConfig, pages: PageTable):
        self.pages, self.encoder_cache = pages, EncoderCache(config.image_places)
        self._unsure = int(config.drafts > 0)
        self._free_slots = list(range(config.max_rows - 1, -1, -1))
        shape = config.max_rows, len(pages.windows), pages.groups.pages_for(config.max_model_len)
        # The pages of each slot in each group of layers, 0 where it has none.
        self._table = np.zeros(shape, np.int32)

    @property
    def slots_left(self) -> bool:
        """Whether one is free."""
        return bool(self._free_slots)

    def table(self, rows: Sequence[Row]) -> np.ndarray:
        """The pages of a batch's rows, int32 [rows, groups, pages of the longest]: a copy."""
        width = self.pages.groups.pages_for(max(row.end for row in rows))
        return self._table[[row.slot for row in rows], :, :width]

    def give(self, request: Request) -> int:
        """A slot, and the pages of all tokens that the request has, both of which are there. Returns how many of its
        tokens were computed before, in pages that it shares."""
        shareable = self._shareable(request)
        known = self.pages.cached(shareable) if self.pages.snapshots is not None else 0
        computed = self.pages.allocate(request.id, len(request.tokens), shareable)
        self.encoder_cache.hold(request, computed)
        request.slot = self._free_slots.pop()
        if self.pages.snapshots is not None and request.params.prompt_logprobs is None:
            found, lengths = computed // self.pages.page_size, (request.prompt_len, len(request.tokens))
            self.pages.snapshots.begin(request.id, request.slot, *lengths, shareable, found, known)
        for group, row in enumerate(self._table[request.slot]):
            pages = self.pages.pages(request.id, group)
            row[: len(pages)] = pages
        return computed

    def lacking(self, request: Request, running: int) -> int:
        """How many pages are too few for a waiting request, with one a group kept for each that runs: without those,
        whoever came last would soon be preempted."""
        needed = self.pages.missing(len(request.tokens), self._shareable(request))
        return needed + running * len(self.pages.windows) - self.pages.num_free

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Makes a running request's pages hold so many tokens; False where too few are free."""
        if not self.pages.lacking(request.id, num_tokens):
            return True
        every = [self.pages.pages(request.id, group) for group in range(len(self.pages.windows))]
        held = [len(pages) for pages in every]
        if not self.pages.append(request.id, num_tokens):
            return False
        for row, pages, before in zip(self._table[request.slot], every, held, strict=True):
            row[before : len(pages)] = pages[before:]
        return True

    def drop(self, request: Request) -> None:
        """Gives on the pages that only tokens before the next one to run can see; the next batch may write them."""
        if self.pages.drops(request.id, request.least_start):
            self._remember(request)
            self.pages.drop(request.id, request.least_start)
            for group, row in enumerate(self._table[request.slot]):
                row[: self.pages.groups.first(group, request.least_start)] = 0

    def release(self, request: Request) -> None:
        """Gives the slot and the pages on; full pages of known tokens stay cached."""
        self._remember(request)
        self.pages.free(request.id)
        self.encoder_cache.let_go(request)
        if self.pages.snapshots is not None:
            self.pages.snapshots.end(request.id)
        self._table[request.slot] = 0
        self._free_slots.append(request.slot)
        request.slot = -1

    def until(self, request: Request) -> int:
        """Where the next chunk of a prompt ends at the latest."""
        if self.pages.snapshots is None:
            return request.prefill_end
        return self.pages.snapshots.until(request.id, request.computed, request.prefill_end)

    def read(self, request: Request, end: int) -> None:
        """A chunk of a prompt up to `end` is in the batch that is made now: others may share what it leaves."""
        self.share(request, end)
        if end == request.prefill_end:
            self.encoder_cache.read(request)
        if self.pages.snapshots is not None:
            self.pages.snapshots.read(request.id, request.slot, end, request.page_hashes)

    def copies(self) -> tuple[Copies, Copies]:
        """Of what layers without pages remember, to be made before and after the batch that is made now."""
        return self.pages.snapshots.taken() if self.pages.snapshots is not None else ((), ())

    def moves(self) -> tuple[Move, ...]:
        """Of pages, to the host's memory and back, to be made before the batch that is made now."""
        return self.pages.host.taken() if self.pages.host is not None else ()

    def share(self, request: Request, num_tokens: int) -> None:
        """Lets others share the full pages of the first tokens, whose hashes are known."""
        self.pages.register(request.id, request.page_hashes, num_tokens)

    def hash(self, request: Request, num_tokens: int) -> None:
        """Makes the hashes of the full pages of the first tokens known."""
        extend_hashes(
            request.page_hashes, request.tokens, num_tokens, self.pages.page_size, request.salt, request.pictures
        )

    def to_read(self, request: Request, running: Sequence[Request]) -> tuple[int, list[Request]]:
        """(tokens of a new request that no page has yet, those of the running ones who are about to write the next page
        of them that it could share)."""
        self.hash(request, len(request.tokens))
        pages = self._shareable(request)
        found = self.pages.find(pages)
        lacks = pages[found : found + 1] if self.pages.caching else []
        before = [
            other
            for other in running
            if lacks and other.computed < other.prefill_end and other.page_hashes[found : found + 1] == lacks
        ]
        return len(request.tokens) - found * self.pages.page_size, before

    def _shareable(self, request: Request) -> list[bytes]:
        """Hashes of the pages it need not compute: the last token always runs, for what follows it, and all do where
        log-probabilities of the prompt are asked for."""
        if request.params.prompt_logprobs is not None:
            return []
        return request.page_hashes[: (len(request.tokens) - 1) // self.pages.page_size]

    def _remember(self, request: Request) -> None:
        """Lets others share the full pages of what is computed and known. Where drafts are verified, a wrong one may
        stand in the place of the last token, until the next step writes that."""
        known = min(request.computed, len(request.tokens) - self._unsure)
        self.hash(request, known)
        self.share(request, known)
