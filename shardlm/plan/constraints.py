"""What a user allows the planner to choose: constraints on the searched fields of a configuration, as text."""

import dataclasses
import difflib
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any, get_args

from shardlm.errors import ShardlmError
from shardlm.layers.stack import Remat
from shardlm.mesh import AXES
from shardlm.moments import Moments
from shardlm.ops.quantized_matmul import Matmul
from shardlm.rules import Preset
from shardlm.train.config import PipelineSchedule

FIELDS = (
    *(f"mesh.{axis}" for axis in AXES),
    *("rules", "remat", "matmul", "train.accumulation", "pipeline.schedule", "pipeline.rounds"),
    *("offload.optimizer", "offload.params"),
    "optim.moments",
    "unroll",
)
WORDS: dict[str, tuple[str, ...]] = {
    "rules": get_args(Preset),
    "remat": get_args(Remat),
    "matmul": get_args(Matmul),
    "pipeline.schedule": get_args(PipelineSchedule),
    "offload.optimizer": ("true", "false"),
    "offload.params": ("true", "false"),
    "optim.moments": get_args(Moments),
}
_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {"<=": operator.le, ">=": operator.ge, "=": operator.eq}
_WORD = re.compile(r"([a-z_.]+)(<=|>=|=)(.+)")


@dataclasses.dataclass(frozen=True)
class Constraint:
    """`field operator values`: the field's value agrees with one of them."""

    field: str
    operator: str
    values: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.field}{self.operator}{','.join(self.values)}"

    @classmethod
    def parse(cls, text: str) -> "Constraint":
        """From mesh.tensor<=8, rules=zero3,hybrid, ... Raises ShardlmError for what is no constraint."""
        found = _WORD.fullmatch(text)
        if not found:
            raise ShardlmError(f"{text!r} is no constraint; write for instance mesh.tensor<=8, or rules=zero3,hybrid")
        field, sign, value = found.groups()
        if field not in FIELDS:
            near = difflib.get_close_matches(field, FIELDS, 1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(FIELDS)}"
            raise ShardlmError(f"{text}: {field} is not searched; {hint}")
        values = tuple(value.split(","))
        numeric = field.startswith("mesh.") or field in ("train.accumulation", "pipeline.rounds", "unroll")
        least = 0 if field == "unroll" else 1
        if numeric and not all(v.isdigit() and int(v) >= least for v in values):
            raise ShardlmError(f"{text}: {field} is a number of at least {least}")
        if sign != "=" and (not numeric or len(values) > 1):
            raise ShardlmError(f"{text}: {sign} compares with one number; for {field} write {field}=VALUE,VALUE")
        known = {word.lower(): word for word in WORDS.get(field, ())}
        for value in values if known else ():
            if value.lower() not in known:
                near = difflib.get_close_matches(value, WORDS[field], 1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ShardlmError(f"{text}: {field} cannot be {value!r}{hint} (known: {', '.join(WORDS[field])})")
        return cls(field, sign, tuple(known.get(value.lower(), value) for value in values))

    def allows(self, value: Any) -> bool:
        compare = _OPERATORS[self.operator]
        if isinstance(value, int) and not isinstance(value, bool):
            return any(compare(value, int(allowed)) for allowed in self.values)
        return str(value).lower() in (allowed.lower() for allowed in self.values)


@dataclasses.dataclass(frozen=True)
class Constraints:
    """All of a search."""

    items: tuple[Constraint, ...] = ()

    @classmethod
    def parse(cls, words: Sequence[str]) -> "Constraints":
        """Raises ShardlmError for what is no constraint, and for several that no value can agree with."""
        made = cls(tuple(map(Constraint.parse, words)))
        for field in {one.field: None for one in made.items}:
            values = WORDS.get(field) or (1, *made.numbers(field))
            if not any(made.allow(field, value) for value in values):
                raise ShardlmError(f"{made.of(field)} leave no value of {field}; give one of them")
        return made

    def allow(self, field: str, value: Any) -> bool:
        """Whether a field may have this value."""
        return not self.items or all(one.allows(value) for one in self.items if one.field == field)

    def names(self, field: str) -> bool:
        """Whether anything is said of a field."""
        return bool(self.items) and any(one.field == field for one in self.items)

    def numbers(self, field: str) -> list[int]:
        """Those that are compared with a field."""
        return [int(value) for one in self.items if one.field == field for value in one.values if value.isdigit()]

    def choices(self, field: str, values: Sequence[Any]) -> list[Any]:
        """Those of `values` that are allowed; of a field whose values are given, these instead, in the order of
        `values` and what is not among them last. Raises ShardlmError where nothing is left."""
        given = [v for one in self.items if one.field == field and one.operator == "=" for v in one.values]
        if given and type(values[0]) in (int, str):
            order = {value: i for i, value in enumerate(values)}
            values = sorted((type(values[0])(v) for v in given), key=lambda v: order.get(v, len(order)))
        left = [value for value in values if self.allow(field, value)]
        if not left:
            raise ShardlmError(
                f"{self.of(field)} leaves no choice: {field} could be {', '.join(map(str, values))} here"
            )
        return left

    def of(self, *fields: str) -> str:
        """What is said of these fields, as text."""
        return " and ".join(str(one) for one in self.items if one.field in fields)


FREE = Constraints()
