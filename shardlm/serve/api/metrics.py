"""Counts and times for Prometheus, under the names that vLLM's dashboards ask for.

The text format is https://prometheus.io/docs/instrumenting/exposition_formats/.
"""

import bisect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from shardlm.serve.images import Images
from shardlm.serve.outputs import RequestOutput, SpeculationStats, Stats

TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 40)
_WHOLE = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS = tuple(m * 10**e for e in range(7) for m in (1, 2, 5))


class Histogram:
    """How many values were at most each of `bounds`, and their sum."""

    def __init__(self, bounds: Iterable[float]):
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def lines(self, name: str, labels: str) -> Iterator[str]:
        below, more = 0, f"{labels}," if labels else ""
        for bound, count in zip((*map(float, self.bounds), "+Inf"), self.counts, strict=True):
            below += count
            yield f'{name}_bucket{{{more}le="{bound}"}} {below}'
        yield f"{name}_sum{{{labels}}} {self.sum}"
        yield f"{name}_count{{{labels}}} {below}"


class Metrics:
    """What the server sees itself; the engine's `Stats` come in when the text is asked for. Times are in seconds."""

    def __init__(self, model_name: str):
        self._model = f'model_name="{quoted(model_name)}"'
        self._labels = f'{self._model},engine="0"'
        self.first_token = Histogram(_FIRST)
        self.between_tokens = Histogram(_BETWEEN)
        self.per_token = Histogram(_BETWEEN)  # one value a request
        self.whole = Histogram(_WHOLE)
        self.prompt_tokens = Histogram(_TOKENS)
        self.generated_tokens = Histogram(_TOKENS)
        self.longest_reply = Histogram(_TOKENS)
        self.wanted_tokens = Histogram(_TOKENS)
        self.replies = Histogram((1, 2, 5, 10, 20))
        self.queued, self.read, self.written, self.ran = (Histogram(_WHOLE) for _ in range(4))
        self.finished: Counter[str] = Counter()  # replies by what ended them
        self.ignored_fields = 0

    def text(self, stats: Stats, images: Images | None = None) -> str:
        """All of it, as Prometheus reads it. `images`: of a model that sees."""
        own = [*self._engine(stats), *self._requests(), *self._histograms()]
        return "\n".join([*own, *(self._images(images) if images else ())]) + "\n"

    def _images(self, images: Images) -> Iterator[str]:
        counted = {
            "queries": (images.asked, "Images of requests."),
            "hits": (images.found, "Those of them that were prepared already, for an earlier request."),
        }
        for name, (count, meaning) in counted.items():
            yield from head(f"vllm:mm_cache_{name}_total", "counter", meaning)
            yield f"vllm:mm_cache_{name}_total{{{self._labels}}} {count}"

    def _engine(self, stats: Stats) -> Iterator[str]:
        each = stats.replicas or (stats,)
        gauges = {
            "num_requests_running": ("num_running", "Requests that hold pages."),
            "num_requests_waiting": ("num_waiting", "Requests that wait for their turn."),
            "kv_cache_usage_perc": ("kv_usage", "Share of the pages in use, 0 to 1."),
        }
        counters = {
            "prefix_cache_queries_total": ("prefix_queries", "Tokens looked up in the prefix cache."),
            "prefix_cache_hits_total": ("prefix_hits", "Tokens found in the prefix cache."),
            "num_preemptions_total": ("preemptions", "Requests that gave up their pages to others."),
            "prompt_tokens_total": ("prompt_tokens", "Tokens of prompts."),
            "generation_tokens_total": ("generation_tokens", "Tokens of replies."),
        }
        for name, (field, meaning) in (gauges | counters).items():
            kind = "gauge" if name in gauges else "counter"
            yield from self._of_each(f"vllm:{name}", kind, [getattr(one, field) for one in each], meaning)
        yield from head("vllm:cache_config_info", "gauge", "How many pages there are, and of how many tokens each.")
        for number, one in enumerate(each):
            sizes = f'block_size="{one.page_size}",num_gpu_blocks="{one.num_pages}"'
            yield f'vllm:cache_config_info{{{self._model},engine="{number}",{sizes}}} 1'
        up = "1, or 0 where so many batches failed that the engine ended."
        yield from self._of_each("shardlm:engine_up", "gauge", [one.engines_up for one in each], up)
        failed = "Batches that failed; their requests were answered with an error."
        yield from self._of_each(
            "shardlm:failed_batches_total", "counter", [one.failed_batches for one in each], failed
        )
        moved = {
            "saved": ([one.pages_saved for one in each], "Pages that were copied to the host's memory."),
            "loaded": ([one.pages_loaded for one in each], "Pages that the prefix cache had from there."),
        }
        for how, (values, meaning) in moved.items():
            yield from self._of_each(f"shardlm:kv_offload_{how}_pages_total", "counter", values, meaning)
        if stats.speculation is not None:
            yield from self._drafts([one.speculation for one in each])

    def _drafts(self, each: Sequence[SpeculationStats]) -> Iterator[str]:
        accepted = "spec_decode_num_accepted_tokens"
        found = {
            "spec_decode_num_drafts_total": ([one.steps for one in each], "Steps that verified drafts."),
            "spec_decode_num_draft_tokens_total": ([one.drafted for one in each], "Tokens drafted."),
            f"{accepted}_total": ([sum(one.accepted) for one in each], "Drafted tokens that the model said."),
        }
        for name, (values, meaning) in found.items():
            yield from self._of_each(f"vllm:{name}", "counter", values, meaning)
        yield from head(f"vllm:{accepted}_per_pos_total", "counter", "The same, by their place among a step's drafts.")
        for number, one in enumerate(each):
            for place, count in enumerate(one.accepted):
                labels = f'{self._model},engine="{number}",position="{place}"'
                yield f"vllm:{accepted}_per_pos_total{{{labels}}} {count}"

    def _of_each(self, name: str, kind: str, values: Sequence[float], meaning: str) -> Iterator[str]:
        """A line for each replica: their sum is Prometheus's to make."""
        yield from head(name, kind, meaning)
        for number, value in enumerate(values):
            yield f'{name}{{{self._model},engine="{number}"}} {value}'

    def _requests(self) -> Iterator[str]:
        yield from head("vllm:request_success_total", "counter", "Replies that ended, by what ended them.")
        for reason in sorted({"stop", "length", "abort", *self.finished}):
            yield f'vllm:request_success_total{{{self._labels},finished_reason="{reason}"}} {self.finished[reason]}'
        meaning = "Fields of requests that the server does not know and left aside."
        yield from head("shardlm:ignored_fields_total", "counter", meaning)
        yield f"shardlm:ignored_fields_total{{{self._labels}}} {self.ignored_fields}"

    def _histograms(self) -> Iterator[str]:
        histograms: Mapping[str, tuple[Histogram, str]] = {
            "time_to_first_token_seconds": (self.first_token, "From a request's arrival to its first token."),
            "inter_token_latency_seconds": (self.between_tokens, "Between two tokens of a reply."),
            "time_per_output_token_seconds": (self.between_tokens, "The same, under its older name."),
            "request_time_per_output_token_seconds": (self.per_token, "The same, its mean over each request."),
            "e2e_request_latency_seconds": (self.whole, "From a request's arrival to its last token."),
            "request_prompt_tokens": (self.prompt_tokens, "Tokens of a request's prompt."),
            "request_generation_tokens": (self.generated_tokens, "Tokens of a request's replies."),
            "request_max_num_generation_tokens": (self.longest_reply, "Tokens of the longest of a request's replies."),
            "request_params_max_tokens": (self.wanted_tokens, "max_tokens of requests that say it."),
            "request_params_n": (self.replies, "Replies that a request asks for."),
            "request_queue_time_seconds": (self.queued, "From where the engine has a request to its first batch."),
            "request_prefill_time_seconds": (self.read, "From a request's first batch to its first token."),
            "request_decode_time_seconds": (self.written, "From a request's first token to its last."),
            "request_inference_time_seconds": (self.ran, "From a request's first batch to its last token."),
        }
        for name, (histogram, meaning) in histograms.items():
            yield from head(f"vllm:{name}", "histogram", meaning)
            yield from histogram.lines(f"vllm:{name}", self._labels)


def quoted(value: str) -> str:
    """A label's value, between its quotes."""
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def head(name: str, kind: str, meaning: str) -> tuple[str, str]:
    return f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"


class Clock:
    """The times of one request. `metrics` has them once it has ended. `max_tokens`: that it asks for."""

    def __init__(self, metrics: Metrics, now: float, max_tokens: int | None = None):
        self._metrics, self._max_tokens = metrics, max_tokens
        self._begun = self._first = self._last = now
        self._tokens: Counter[int] = Counter()  # of each reply
        self._ended: set[int] = set()

    def saw(self, output: RequestOutput, now: float) -> None:
        """One output of the engine, all tokens so far."""
        new = max(len(reply.token_ids) - self._tokens[reply.index] for reply in output.outputs)
        if new > 0:
            if self._tokens:
                self._metrics.between_tokens.observe((now - self._last) / new, new)
            else:
                self._metrics.first_token.observe(now - self._begun)
                self._first = now
            self._last = now
            self._tokens.update({r.index: len(r.token_ids) - self._tokens[r.index] for r in output.outputs})
        for reply in output.outputs:
            if reply.finish_reason and reply.index not in self._ended:
                self._ended.add(reply.index)
                self._metrics.finished[reply.finish_reason] += 1
        if output.finished:
            self._finish(output, now)

    def broke_off(self, replies: int, reason: str) -> None:
        """The request ended before its replies did."""
        self._metrics.finished[reason] += replies - len(self._ended)

    def _finish(self, output: RequestOutput, now: float) -> None:
        self._metrics.whole.observe(now - self._begun)
        self._metrics.prompt_tokens.observe(len(output.prompt_token_ids))
        self._metrics.generated_tokens.observe(self._tokens.total())
        self._metrics.replies.observe(len(output.outputs))
        if self._max_tokens is not None:
            self._metrics.wanted_tokens.observe(self._max_tokens)
        self._metrics.longest_reply.observe(most := max(self._tokens.values(), default=0))
        if most > 1:
            self._metrics.per_token.observe((self._last - self._first) / (most - 1))
        if (times := output.metrics) and times.last_token_ts:
            self._metrics.queued.observe(times.scheduled_ts - times.queued_ts)
            self._metrics.read.observe(times.first_token_ts - times.scheduled_ts)
            self._metrics.written.observe(times.last_token_ts - times.first_token_ts)
            self._metrics.ran.observe(times.last_token_ts - times.scheduled_ts)
