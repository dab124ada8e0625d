"""Reads a GGUF file's metadata of one architecture so that nothing is overlooked: what was not asked for, and is not
known to be harmless, is refused by name."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from shardlm.errors import ShardlmError

# Of runtimes, of bookkeeping, or told by the shapes of tensors: they do not change the numbers.
HARMLESS = frozenset(
    [
        *("vocab_size", "context_length", "tensor_data_layout", "pooling_type", "rope.scaling.finetuned"),
    ]
)


class Told:
    """What the keys ARCHITECTURE.* say. Each is asked for once; `finish` refuses the rest."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str):
        self.architecture = architecture
        first = f"{architecture}."
        self.values = {key.removeprefix(first): value for key, value in metadata.items() if key.startswith(first)}
        self.asked = set(HARMLESS)

    def __call__(self, name: str, default: Any = ...) -> Any:
        """The value of a key; `default` where it is absent. Of a list with one for each layer that which all have.
        Raises ShardlmError where there is no default, and for layers that differ."""
        self.asked.add(name)
        value = self.values.get(name, default)
        if value is ...:
            raise ShardlmError(
                f"the GGUF file's metadata has no {self.architecture}.{name}, which a model of this architecture "
                "needs; download or convert it again"
            )
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise self.refused(name, "layers that differ in it are not supported")
            value = value[0]
        return value

    def list(self, name: str) -> list | None:
        """A list as it is, None where there is none or a single value."""
        self.asked.add(name)
        value = self.values.get(name)
        return value if isinstance(value, list) else None

    def count(self, name: str, default: Any = ...) -> int:
        """A whole number, 1 or more (0 where that is the default)."""
        value = self(name, default)
        if type(value) is not int or value < (0 if default == 0 else 1):
            raise self.refused(name, "a whole number is needed")
        return value

    def number(self, name: str, default: Any = ...) -> float:
        value = self(name, default)
        if type(value) not in (int, float):
            raise self.refused(name, "a number is needed")
        return _short(value)

    def only(self, name: str, *known: Any) -> None:
        """Raises ShardlmError where the key has a value other than these; without it, it counts as the first."""
        if self(name, known[0]) not in known:
            raise self.refused(name, f"supported are {', '.join(map(repr, known))}")

    def seen(self, *beginnings: str) -> None:
        """Keys that begin so are of parts that are left out."""
        self.asked |= {name for name in self.values if name.startswith(beginnings)}

    def refused(self, name: str, why: str) -> ShardlmError:
        value = repr(self.values.get(name))
        shown = value if len(value) < 60 else f"{value[:60]}..."
        return ShardlmError(
            f"the GGUF file has {self.architecture}.{name}={shown}, and {why}; open the model in Hugging Face's form"
        )

    def finish(self) -> None:
        """Raises ShardlmError for a key that nobody asked for."""
        unknown = sorted(self.values.keys() - self.asked)
        if unknown:
            shown = ", ".join(f"{self.architecture}.{name}={self.values[name]!r:.60}" for name in unknown)
            raise ShardlmError(
                f"the GGUF file's metadata has keys that shardlm does not know and that may change the numbers: "
                f"{shown}; open the model in Hugging Face's form"
            )


def _short(value: float) -> float:
    """The number with the fewest digits that is the same in 32 bits, as configurations have it: 1e-05 and not
    9.999999747378752e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value
