"""A dataclass with other values, quicker than the library's: a search makes half a million configurations."""

from typing import Any, TypeVar

T = TypeVar("T")


def changed(one: T, **fields: Any) -> T:
    """dataclasses.replace in a tenth of its time, for a class without slots and values that nobody has to check:
    __post_init__ does not run. Raises TypeError for a name that is no field, and for an object that remembers what its
    fields came to (a cached property)."""
    made = object.__new__(type(one))
    values = made.__dict__
    values.update(one.__dict__)
    values.update(fields)
    if len(values) != len(one.__dataclass_fields__):
        others = sorted(values.keys() - one.__dataclass_fields__.keys())
        raise TypeError(f"{type(one).__name__} has no fields {', '.join(others)}: use dataclasses.replace")
    return made
