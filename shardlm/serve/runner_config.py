"""How large a runner's programs and state are. No jax."""

import dataclasses
import functools
import itertools
from typing import Literal

from shardlm.layers.page_layout import PageLayout
from shardlm.serve.chunk_programs import Cuts, FewBits, sizes_of

# Tokens of the least chunk that does not attend to its own keys and values over pages, and has a program of its own for
# what begins at position 0: shorter ones attend to little.
WHOLE_LEAST = 512


@dataclasses.dataclass(frozen=True)
class RunnerConfig:
    """max_rows: slots. max_batch_tokens: of one chunk program. decode_steps: the most a decode program runs. prefill:
    how chunks attend that begin at position 0, resolved (prefill.py), and `in_parts` says that the others do so too
    (ops/chunk_attention.py). least_rows: of the smallest decode program. snapshots: slots of memories beside those of
    requests (snapshots.py). bundles: of pages in the host's
    memory (host_pages.py). platform, few_bits: what chunks are cut and dealt for, and the weights in few bits among
    what they read. image_places: SchedulerConfig's.
    """

    layout: PageLayout
    page_size: int
    max_rows: int
    max_batch_tokens: int
    max_model_len: int
    decode_steps: int
    prefill: str = "pages"
    least_rows: int = 1
    snapshots: int = 0
    bundles: int = 0
    platform: Literal["cpu", "gpu"] = "gpu"
    few_bits: tuple[FewBits, ...] = ()
    in_parts: bool = False
    image_places: int = 0

    def __post_init__(self):
        object.__setattr__(self, "layout", self.as_own(self.layout))

    def as_own(self, layout: PageLayout) -> PageLayout:
        """With a memory for each slot, for the one that padding has, and for copies, where layers have any."""
        slots = self.max_rows + 1 + self.snapshots
        return dataclasses.replace(layout, slots=slots) if layout.memories else layout

    @property
    def row_pages(self) -> int:
        """Columns of the page table: those of the longest request in each group."""
        return len(self.layout.windows) * -(-self.max_model_len // self.page_size)

    def columns(self, first: int) -> int:
        """Of the array that describes rows: the `first`, those of the page table, and the adapter."""
        return first + self.row_pages + 1

    @property
    def decode_sizes(self) -> tuple[int, ...]:
        """Rows of the decode programs: powers of two and the most there can be."""
        powers = itertools.takewhile(lambda n: n < self.max_rows, (2**i for i in itertools.count()))
        return (*(n for n in powers if n >= self.least_rows), self.max_rows)

    @functools.cached_property
    def chunk_sizes(self) -> tuple[tuple[int, int], ...]:
        """(rows, tokens) of the chunk programs, of which none is longer than the longest request needs."""
        sizes = sizes_of(self.max_batch_tokens, self.max_rows)
        longest = min((tokens for _, tokens in sizes if tokens >= self.max_model_len), default=self.max_batch_tokens)
        return tuple(size for size in sizes if size[1] <= longest)

    @property
    def cuts(self) -> Cuts:
        """How prompts are cut."""
        return Cuts.of(self.chunk_sizes, self.platform, self.few_bits)

    @property
    def chunk_programs(self) -> dict[tuple[str, tuple[int, int]], dict[str, str]]:
        """The programs of chunks by kind and size, with how they attend: layers/paged.py's `whole` and `parts`, {} for
        over pages."""
        long = [size for size in self.chunk_sizes if self.prefill != "pages" and size[1] >= WHOLE_LEAST]
        parts = {("chunk", size): {"parts": self.prefill} for size in long if self.in_parts}
        whole = {("whole", size): {"whole": self.prefill} for size in long}
        return {("chunk", size): {} for size in self.chunk_sizes} | parts | whole
