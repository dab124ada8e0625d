"""What the requests of a serving plan are like, in the words of launch.bench serve and with its meaning: lengths, equal
or spread, a beginning that all prompts share, or the requests of a file. No request is sent: what is shared are hashes
of pages, which the scheduler's own prefix cache finds."""

import dataclasses
import functools
import pathlib
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardlm.chat import ChatTemplate
from shardlm.errors import ShardlmError
from shardlm.serve.bench.workload import Job, check_shared, lengths, read_jobs, spread
from shardlm.serve.messages import rendered
from shardlm.serve.page_table import extend_hashes
from shardlm.serve.request import Request, check_prompt
from shardlm.serve.sampling_params import SamplingParams
from shardlm.tokenizer import Tokenizer

# Pairs of lengths that stand for those that are spread: each 1/64 of both once, and 39 apart from one to the next, near
# the golden section, so that neither says much of the other.
SAMPLE, APART = 64, 39
LISTED = 1000  # requests of a file that stand for all of it


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """Tokens of a request's prompt and of its reply, and the hashes of those leading pages of the prompt that other
    requests have too."""

    prompt: int
    output: int
    shared: tuple[bytes, ...] = ()


@dataclasses.dataclass(frozen=True)
class Made:
    """Lengths to draw from, as workload.lengths does, and the tokens of images before each prompt."""

    prompt_len: int
    output_len: int
    range_ratio: float
    images: int = 0


@dataclasses.dataclass(frozen=True)
class Mix:
    """kinds  equally likely ones, by which means are taken
    made   that requests are drawn from; None: from the kinds, which are a file's
    page   tokens of a page
    least  tokens of which a copy has to save (serve/snapshots.py) what layers remember that have no pages; 0: have none
    """

    kinds: tuple[Kind, ...]
    made: Made | None
    page: int
    least: int = 0

    def cached(self, kind: Kind) -> int:
        """Tokens of its prompt that the prefix cache has: all that are shared, but the last, which is always run."""
        tokens = min(len(kind.shared), (kind.prompt - 1) // self.page) * self.page
        return tokens if tokens >= self.least else 0

    def draw(self, count: int, seed: int) -> list[Kind]:
        """As the benchmark does: a file's in an order of the seed's, from the first again where there are fewer."""
        if made := self.made:
            both = lengths(count, made.prompt_len, made.output_len, made.range_ratio, seed)
            return [Kind(made.images + prompt, output, self.kinds[0].shared) for prompt, output in both]
        order = list(self.kinds)
        random.Random(seed).shuffle(order)
        return [order[i % len(order)] for i in range(count)]

    @functools.cached_property
    def unshared(self) -> "Mix":
        """Without a prefix cache."""
        return dataclasses.replace(self, kinds=tuple(dataclasses.replace(kind, shared=()) for kind in self.kinds))

    @functools.cached_property
    def shares(self) -> bool:
        return any(map(self.cached, self.kinds))

    @functools.cached_property
    def prompt(self) -> float:
        """Tokens of a prompt, on average."""
        return float(np.mean([kind.prompt for kind in self.kinds]))

    @functools.cached_property
    def output(self) -> float:
        """Tokens of a reply, on average."""
        return float(np.mean([kind.output for kind in self.kinds]))

    @functools.cached_property
    def found(self) -> float:
        """Tokens of a prompt that are cached, on average."""
        return float(np.mean([self.cached(kind) for kind in self.kinds]))

    @functools.cached_property
    def context(self) -> float:
        """Of a reply under way, on average of all that are: long ones are so for longer."""
        seen = sum(kind.output * (kind.prompt + kind.output / 2) for kind in self.kinds)
        return seen / sum(kind.output for kind in self.kinds)

    @functools.cached_property
    def longest(self) -> int:
        """Tokens of a prompt and its reply."""
        if self.made:
            lengths_of = (spread(one, self.made.range_ratio) for one in (self.made.prompt_len, self.made.output_len))
            return self.made.images + sum(one[-1] for one in lengths_of)
        return max(kind.prompt + kind.output for kind in self.kinds)

    def told(self) -> dict[str, Any]:
        """As plain data."""
        made = self.made
        ends = {"prompt": [kind.prompt for kind in self.kinds], "output": [kind.output for kind in self.kinds]}
        if made:
            ends = {name: spread(getattr(made, f"{name}_len"), made.range_ratio) for name in ends}
            ends["prompt"] = [made.images + length for length in ends["prompt"]]
        return {
            "listed": None if made else len(self.kinds),
            **{
                f"{name}_tokens": {"mean": getattr(self, name), "least": min(found), "most": max(found)}
                for name, found in ends.items()
            },
            "shared_tokens": self.found,
        }


@functools.lru_cache
def made_up(
    prompt_len: int, output_len: int, range_ratio: float, shared_prefix: int, page: int, images: int = 0
) -> Mix:
    """As the benchmark makes them up, after so many tokens of `images`. Raises ShardlmError for what cannot be."""
    check_shared(shared_prefix, prompt_len, range_ratio)
    asked, told = spread(prompt_len, range_ratio), spread(output_len, range_ratio)
    shared = tuple(b"all %d" % i for i in range(shared_prefix // page))
    count = SAMPLE if range_ratio else 1
    places = [((i + 0.5) / count, (i * APART % count + 0.5) / count) for i in range(count)]
    kinds = [Kind(images + asked[int(x * len(asked))], told[int(y * len(told))], shared) for x, y in places]
    return Mix(tuple(kinds), Made(prompt_len, output_len, range_ratio, images), page)


def of_file(path: str, output_len: int, folder: pathlib.Path | None, vocab: int, page: int) -> Mix:
    """Of the requests of a file that the benchmark reads, LISTED at most, drawn evenly. A page that several of them
    have is one that others find; what one has for itself is new each time. `folder`: with the tokenizer and the chat
    template by which texts are read. Raises ShardlmError for what cannot be read."""
    jobs = read_jobs(path, output_len)
    random.Random(0).shuffle(jobs)
    read = Reader(path, folder, vocab)
    requests, counts = [], Counter()
    for job in jobs[:LISTED]:
        request = Request("", read.ids(job), SamplingParams())
        extend_hashes(request.page_hashes, request.tokens, request.prompt_len, page)
        counts.update(request.page_hashes)
        requests.append((request, job.body["max_tokens"]))
    kinds = []
    for request, output in requests:
        shared = tuple(page_hash for page_hash in request.page_hashes if counts[page_hash] > 1)
        kinds.append(Kind(request.prompt_len, output, shared))
    return Mix(tuple(kinds), None, page)


@dataclasses.dataclass(frozen=True)
class Reader:
    """Token ids of a file's prompts, as a server of the model has them."""

    path: str
    folder: pathlib.Path | None
    vocab: int

    def ids(self, job: Job) -> Sequence[int]:
        body = job.body
        if not isinstance(body["max_tokens"], int) or body["max_tokens"] < 1:
            raise ShardlmError(f"{self.path}: max_tokens={body['max_tokens']!r} is a whole number of at least 1")
        if "messages" in body:
            found = self._tokenizer.encode(rendered(self._template, body["messages"], None))
        elif isinstance(body["prompt"], str):
            found = self._tokenizer.encode_prompt(body["prompt"])
        else:
            found = body["prompt"]
        check_prompt(found, self.vocab)
        return found

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        if self.folder is None:
            raise ShardlmError(
                f"{self.path} has texts, and a configuration has no tokenizer to count their tokens by: give "
                "--model=FOLDER, or prompts as token ids"
            )
        return Tokenizer.load(self.folder)

    @functools.cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate.load(self._tokenizer and self.folder)
