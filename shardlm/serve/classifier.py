"""What a model that classifies texts makes of the last token of each: logits and probabilities, on the host, as they
are few. Where they come from is classifier_files.py's. No jax."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Classifier:
    """weight float32 [C, D], bias float32 [C]; labels: of the C classes; activation: what makes probabilities of their
    logits, "softmax", "sigmoid" or "" for none."""

    weight: np.ndarray
    bias: np.ndarray
    labels: tuple[str, ...]
    activation: str

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        """float32 [C] of hidden float32 [D]."""
        return self.weight @ hidden + self.bias

    def classes(self, hidden: np.ndarray, activate: bool = True) -> list[float]:
        """Of each class its probability or, without, its logit."""
        logits = self.logits(hidden)
        if not activate or not self.activation:
            return logits.tolist()
        if self.activation == "sigmoid":
            return (0.5 * (1 + np.tanh(logits / 2))).tolist()
        odds = np.exp(logits - logits.max())
        return (odds / odds.sum()).tolist()
