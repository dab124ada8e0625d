"""What a run learns from and is measured by: texts here; replies of its own in shardlm/reinforce."""

import dataclasses
import pathlib
from typing import Any, Protocol

import jax

from shardlm.data.loader import Loader
from shardlm.data.packing import make_rows
from shardlm.data.prepare import Prepared, prepare
from shardlm.errors import ShardlmError
from shardlm.state import TrainState
from shardlm.tokenizer import Tokenizer
from shardlm.train import report
from shardlm.train.alike import check_same
from shardlm.train.batches import local_rows
from shardlm.train.distill import check_tokenizers
from shardlm.train.evaluate import Evaluator
from shardlm.train.program import Program
from shardlm.train.seeing import sight_of_chats
from shardlm.train.step import Batch
from shardlm.vision.sight import Sight


class Source(Protocol):
    """Where the batches of a run come from. `epoch`: how often its data were gone through, with the fraction of the
    current time. `waits_for`: what the time until the next batch is counted as (metrics/goodput.py). `follows`: whether
    that one is made with the weights as the steps before left them, for which it would wait."""

    waits_for: str

    @property
    def follows(self) -> bool: ...

    @property
    def epoch(self) -> float: ...

    def next(self, state: TrainState) -> tuple[Batch, dict[str, float]]:
        """The next batch on the devices, and what there is to log of it. `state` is that which will learn from it."""

    def get_state(self) -> dict[str, Any]:
        """Where it stands, ready for JSON, the same in every process."""

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from there. Raises ShardlmError where that belongs to other data."""

    def close(self) -> None: ...


class Task(Protocol):
    """What a run learns from. `evaluates`: the metrics of the weights of a state, validation_loss among them, by which
    the best checkpoints are kept. `program`: the run's, as its batches want it."""

    program: Program
    tokenizer: Tokenizer
    tokenizer_path: pathlib.Path

    def source(self) -> Source: ...

    def evaluator(self, options: dict[str, Any]) -> Any:
        """(params, frozen, stops) -> metrics, or none where stops(), which is asked before each batch; under the
        program's mesh. `options` are the compiler's."""

    def described(self, source: Source) -> list[str]:
        """Lines for the run's opening."""


@dataclasses.dataclass(frozen=True)
class Texts:
    """Documents, conversations or pairs, which are rows of tokens before the run begins; `eyes` are the weights that
    read the images in them, but for those that are trained, None where there are none."""

    program: Program
    data: Prepared
    eyes: Any = None

    @classmethod
    def prepared(cls, program: Program) -> "Texts":
        """Reads or makes the data of the program's run, and reads what sees the images in them. Raises ShardlmError for
        what is missing or bad."""
        sight = sight_of_chats(program.config)
        with report.Preparing(enabled=jax.process_index() == 0) as progress:
            data = prepare(program.config.data, progress, sight)
        found = {"data.train": data.train, "data.validation": data.validation}
        check_same(
            {f"the fingerprint of {name}": shards.fingerprint for name, shards in found.items()},
            "give all hosts the same files",
        )
        check_tokenizers(program.config, data.tokenizer)
        program, eyes = with_eyes(program, data, sight)
        return cls(program, data, eyes)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.data.tokenizer

    @property
    def tokenizer_path(self) -> pathlib.Path:
        return self.data.tokenizer_path

    def source(self) -> "Rows":
        return Rows.make(self.program, self.data, self.eyes)

    def evaluator(self, options: dict[str, Any]) -> Evaluator:
        """Raises ShardlmError for images to validate by that no row holds, and for nothing to validate by, before there
        is a step."""
        if self.data.validation.image_token is not None:
            train = self.program.config.train
            make_rows(self.data.validation, train.seq_len, self.program.config.data.packing)
        evaluator = Evaluator(self.program, self.data, self.program.lower_eval().compile(options), self.eyes)
        evaluator.check()
        return evaluator

    def described(self, source: "Rows") -> list[str]:
        return report.of_texts(self.program, self.data, source.loader)


def with_eyes(program: Program, data: Prepared, sight: Sight | None) -> tuple[Program, Any]:
    """(the program that reads the images of these data, the weights that see them but for those that are trained):
    where they have none, the program as it is and None. Raises ShardlmError for what does not go with images, and for
    an encoder to train without any."""
    if data.train.image_token is None and (part := program.config.train.encoder) != "frozen":
        raise ShardlmError(
            f"train.encoder={part}: the training data have no images to train it on; set it to frozen, or data.train "
            "to conversations with images"
        )
    if data.train.image_token is None and data.validation.image_token is None:
        return program, None
    program = program.that_sees(sight)
    return program, program.seeing.load(program.config.model.folder)


@dataclasses.dataclass(frozen=True)
class Rows:
    """The training batches, of each the rows that this process's devices hold."""

    program: Program
    loader: Loader
    rows: tuple[int, ...]
    eyes: Any = None
    waits_for = "data"
    follows = False

    @classmethod
    def make(cls, program: Program, data: Prepared, eyes: Any = None) -> "Rows":
        config, train = program.config, program.config.train
        rows = local_rows(program.batch_sharding, program.slots, train.seq_len)
        loader = Loader(
            data.train,
            seq_len=train.seq_len,
            global_batch=train.global_batch,
            seed=config.data.seed,
            rows=rows,
            packing=config.data.packing,
            sources=data.train_sources,
            weights=config.data.weights,
            **program.looking(),
        )
        return cls(program, loader, rows, eyes)

    @property
    def epoch(self) -> float:
        return self.loader.epoch

    def next(self, state: TrainState) -> tuple[Batch, dict[str, float]]:
        try:
            batch = next(self.loader)
        except StopIteration:
            raise ShardlmError("the training data ended; set data to more text or train.steps to fewer") from None
        eyes = self.program.eyes(state.params, self.eyes)
        arrays = self.program.on_devices(batch, self.rows, eyes)
        return arrays | self.program.shown(batch, self.eyes), {}

    def get_state(self) -> dict[str, Any]:
        return self.loader.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        self.loader.set_state(state)

    def close(self) -> None:
        self.loader.close()
