"""How a published weight in few bits may be held as it is, number for number, instead of as what it stands for."""

from typing import NamedTuple


class Kept(NamedTuple):
    """numbers  "int8", "int4", "fp8" or "fp4" (ops/grouped_weights.py); "": of a kind that is not held
    group    inputs that share a factor; 0: all of them
    scale    the dtype that factors are exact in
    zeros    whether numbers have a zero of their own
    whole    whether zeros are whole numbers; of others (number - zero) * factor is what was published but for the
             rounding of float32
    """

    numbers: str
    group: int
    scale: str
    zeros: bool
    whole: bool = True
