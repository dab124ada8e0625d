"""A model's weights on one mesh: how many numbers of each a device has, made once for all ways to run there. A search
asks this of hundreds of weights for thousands of ways."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardlm.rules import Rules, Table

if TYPE_CHECKING:
    from shardlm.plan.sketch import Weight


class Weights(tuple):
    """All of a model. Made once for it, and therefore told apart by identity: what they come to is looked up without
    comparing them."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    @functools.cached_property
    def firsts(self) -> tuple[int, ...]:
        """Of each, which is the first that is the same of another layer of its pattern."""
        found: dict[tuple, int] = {}
        return tuple([found.setdefault(_but_for_its_layer(weight), i) for i, weight in enumerate(self)])


def _but_for_its_layer(weight: "Weight") -> tuple:
    """What a weight is, without the number of its layer in a pattern."""
    place = weight.path.split(".")
    if weight.segment is not None:
        del place[3]  # segments.0.blocks.3.attention.wq
    return (*place, weight.shape, weight.names, weight.stacked, weight.itemsize, weight.trained, weight.packed)


@dataclasses.dataclass(frozen=True, eq=False)
class Spread:
    """Numbers of each weight on one device, in the order of `weights`, by the tables of `rules`."""

    weights: Sequence["Weight"]
    rules: Rules

    @property
    def firsts(self) -> Sequence[int]:
        """As Weights has them; of others none are known to be alike."""
        return self.weights.firsts if isinstance(self.weights, Weights) else range(len(self.weights))

    @functools.cached_property
    def rest(self) -> tuple[int, ...]:
        return self._numbers(self.rules.rest)

    @functools.cached_property
    def use(self) -> tuple[int, ...]:
        return self._numbers(self.rules.use)

    @functools.cached_property
    def optimizer(self) -> tuple[int, ...]:
        return self._numbers(self.rules.optimizer)

    def _numbers(self, table: Table) -> tuple[int, ...]:
        return tuple([weight.numbers(table) for weight in self.weights])

    @functools.cached_property
    def trained_rest(self) -> int:
        """Of all that are trained."""
        return self._of_trained(self.rest)

    @functools.cached_property
    def trained_optimizer(self) -> int:
        return self._of_trained(self.optimizer)

    def _of_trained(self, numbers: Sequence[int]) -> int:
        return sum(n for n, weight in zip(numbers, self.weights, strict=True) if weight.trained)

    @functools.cached_property
    def trained(self) -> list["Weight"]:
        return [weight for weight in self.weights if weight.trained]


@functools.lru_cache(maxsize=4096)
def spread(weights: Weights, rules: Rules) -> Spread:
    return Spread(weights, rules)
