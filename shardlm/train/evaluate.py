"""Loss on held-out rows, and the n-gram models it is compared with."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from shardlm.data import ngram
from shardlm.data.loader import validation_batches
from shardlm.data.packing import Batch
from shardlm.data.prepare import Prepared
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

    def __call__(self, params: Any, frozen: Any = None) -> dict[str, float]:
        """Means over the validation rows, with these weights of a training state: of next tokens validation_loss in
        nats a token, perplexity, and bits_per_byte of the text; else what the objective reports, as validation_*."""
        seq_len = self.program.config.train.seq_len
        rows = local_rows(self.program.batch_sharding, self.program.slots, seq_len)
        sums: dict[str, float] = {}
        eyes = self.program.eyes(params, self.eyes)
        for batch in self.batches(rows):
            found = self.compiled(params, frozen, self.program.on_devices(batch, rows, eyes))
            sums = {name: sums.get(name, 0.0) + float(value) for name, value in found.items()}
        count = sums.pop(self.program.objective.counted)
        values = {f"validation_{name}": value / count for name, value in sums.items()}
        if self.program.objective.counted == "tokens":
            values |= text_measures(values["validation_loss"], self.data)
        return values

    def batches(self, rows: tuple[int, ...] | None = None) -> Iterator[Batch]:
        """The validation rows, the same at every call; `rows` of each batch, all by default, then without images."""
        train = self.program.config.train
        return validation_batches(
            self.data.validation,
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
