"""What becomes of a prompt that is read for its own sake: the vector of its last token, of length 1 or as it is, whole
or its first numbers where the model was trained so that they mean the same (Matryoshka, https://arxiv.org/abs/2205.13147).
Checkpoints say so by the names that vLLM reads, and whoever knows better writes them into config.json. No jax."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from shardlm.errors import ShardlmError
from shardlm.serve.classifier import Classifier

IS, SIZES = "is_matryoshka", "matryoshka_dimensions"


@dataclasses.dataclass(frozen=True)
class Pooling:
    """width: numbers of a vector. cuts: the sizes that it may be cut to; (): any; None: none is known to do.
    classifier: what makes classes of it, in models that classify and write nothing."""

    width: int
    cuts: tuple[int, ...] | None = None
    classifier: Classifier | None = None

    @classmethod
    def of(cls, width: int, options: Mapping[str, Any], classifier: Classifier | None = None) -> "Pooling":
        """Of a model with this config.json. Raises ShardlmError for sizes that are none."""
        sizes = options.get(SIZES)
        if sizes is None:
            return cls(width, () if options.get(IS) else None, classifier)
        if not isinstance(sizes, list) or not all(type(size) is int and 0 < size <= width for size in sizes):
            raise ShardlmError(f"config.json has {SIZES}={sizes!r}; they are sizes from 1 to the model's {width}")
        return cls(width, tuple(sizes), classifier)

    def need_classifier(self) -> Classifier:
        """Raises ShardlmError for a model without."""
        if self.classifier is None:
            raise ShardlmError(
                "this model has no head that classifies; serve a checkpoint with score.weight "
                "(...ForSequenceClassification), or one whose config.json has classifier_from_token"
            )
        return self.classifier

    def check_writes(self) -> None:
        """Raises ShardlmError for a model that classifies."""
        if self.classifier is not None:
            raise ShardlmError(
                "this model classifies texts and writes none: ask LLM.classify or embed, or over HTTP /classify, "
                "/score, /rerank, /pooling or /v1/embeddings"
            )

    def check(self, dimensions: int | None) -> None:
        """Raises ShardlmError for a size that vectors cannot be cut to. The one that they have can always be asked
        for, which vLLM refuses."""
        if dimensions is None or dimensions == self.width:
            return
        what = f"dimensions={dimensions}"
        if self.cuts is None:
            raise ShardlmError(
                f"{what}: this model's vectors have {self.width}, and it does not say that it was trained to be cut. "
                f'Leave it out, or write "{IS}": true or "{SIZES}": [...] into its config.json where it was'
            )
        if self.cuts and dimensions not in self.cuts:
            raise ShardlmError(f"{what} is none of the sizes that the model was trained for: {sorted(self.cuts)}")
        if not 1 <= dimensions <= self.width:
            raise ShardlmError(f"{what} must be from 1 to the model's {self.width}")

    def vector(self, hidden: np.ndarray, dimensions: int | None = None, normalise: bool = True) -> list[float]:
        """The first `dimensions` of hidden [width], of length 1 where `normalise`."""
        cut = hidden[:dimensions]
        return (cut / max(np.linalg.norm(cut), 1e-12) if normalise else cut).tolist()
