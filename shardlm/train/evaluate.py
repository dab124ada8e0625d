"""Loss on held-out rows, and the n-gram models it is compared with."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from shardlm.data import ngram
from shardlm.data.loader import validation_batches
from shardlm.data.packing import Batch, make_rows
from shardlm.data.prepare import Prepared
from shardlm.data.shards import TokenShards
from shardlm.errors import ShardlmError
from shardlm.life import alive
from shardlm.metrics.log import BY_SOURCE, VALIDATION_LOSS
from shardlm.train.batches import local_rows
from shardlm.train.program import Program


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """Scores parameters on the validation rows; call it under the program's mesh. `eyes` reads their images, with
    what is trained of the encoder among the parameters."""

    program: Program
    data: Prepared
    compiled: jax.stages.Compiled
    eyes: Any = None

    def __call__(self, params: Any, frozen: Any = None, stops: Callable[[], bool] = lambda: False) -> dict[str, float]:
        """Means over the validation rows, with these weights of a training state: of next tokens validation_loss in
        nats a token, perplexity, and bits_per_byte of the text; else what the objective reports, as validation_*.
        Of sources that are told apart validation_loss/NAME too; where a part of each is read, each still counts as all
        of it. `stops` is asked before each batch; where it says so, there are no metrics. Raises ShardlmError where
        there is nothing to score."""
        counted, sums, values = self.program.objective.counted, collections.Counter(), {}
        for name, shards in self._sources().items():
            own = self._sums(params, frozen, shards, stops)
            if own is None:
                return {}
            if not own.get(counted):
                raise self._nothing(name)
            part = self._part_read(shards)
            sums.update({metric: value / part for metric, value in own.items()})
            if len(self._sources()) > 1:
                values[f"{BY_SOURCE}{name}"] = own["loss"] / own[counted]
        count = sums.pop(counted)
        means = {f"validation_{name}": value / count for name, value in sums.items()}
        if counted == "tokens":
            means |= text_measures(means[VALIDATION_LOSS], self.data)
        return means | values

    def check(self) -> None:
        """Raises ShardlmError where there is nothing to score, by the rows alone, so that a run ends of it before its
        first step and not at its first evaluation."""
        for name, shards in self._sources().items():
            if not any(batch["loss_mask"].any() for batch in self._rows(shards)):
                raise self._nothing(name)

    def _nothing(self, name: str) -> ShardlmError:
        what = f"{name} of data.validation" if name else "data.validation"
        one, few = self.program.objective.counted.removesuffix("s"), self.program.config.train.eval_batches
        read = f" in the train.eval_batches={few} that are read of it" if few else ""
        more = ", or read more of it" if few else ""
        return ShardlmError(f"{what} has nothing to score, no {one} to learn{read}: give it more text{more}")

    def _sources(self) -> Mapping[str, TokenShards]:
        return self.data.validation_sources or {"": self.data.validation}

    def _sums(
        self, params: Any, frozen: Any, shards: TokenShards, stops: Callable[[], bool]
    ) -> dict[str, float] | None:
        """What the program that validates comes to over these rows; None where it `stops`."""
        seq_len = self.program.config.train.seq_len
        rows = local_rows(self.program.batch_sharding, self.program.slots, seq_len)
        sums: dict[str, float] = {}
        eyes = self.program.eyes(params, self.eyes)
        for batch in self._rows(shards, rows):
            if stops():
                return None
            found = self.compiled(params, frozen, self.program.on_devices(batch, rows, eyes))
            sums = {name: sums.get(name, 0.0) + float(value) for name, value in found.items()}
            alive()
        return sums

    def _part_read(self, shards: TokenShards) -> float:
        """The share of the rows that an evaluation reads, where sources are summed; 1 where there is one."""
        train = self.program.config.train
        if not train.eval_batches or len(self._sources()) == 1:
            return 1.0
        total = len(make_rows(shards, train.seq_len, self.program.config.data.packing))
        return min(1.0, train.eval_batches * train.global_batch / total)

    def batches(self) -> Iterator[Batch]:
        """The validation rows, the same at every call, without images."""
        return itertools.chain.from_iterable(self._rows(shards) for shards in self._sources().values())

    def _rows(self, shards: TokenShards, rows: tuple[int, ...] | None = None) -> Iterator[Batch]:
        """`rows` of each batch, with images; None: all, without."""
        train = self.program.config.train
        return validation_batches(
            shards,
            seq_len=train.seq_len,
            global_batch=train.global_batch,
            rows=rows,
            packing=self.program.config.data.packing,
            max_batches=train.eval_batches or None,
            **(self.program.looking() if rows is not None else {}),
        )

    def baselines(self) -> ngram.Baselines:
        """Unigram and bigram models of the training tokens, scored on the same positions."""
        return ngram.evaluate(ngram.fit(self.data.train), self.batches())


def text_measures(loss: float, data: Prepared) -> Mapping[str, float]:
    """Other ways to state a loss in nats a token of the validation text; bits per byte where all of it is scored."""
    values = {"perplexity": float(np.exp(min(loss, 700)))}
    if not data.validation.partly_scored:
        values["bits_per_byte"] = loss / math.log(2) / data.validation.bytes_per_token
    return values
