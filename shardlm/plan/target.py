"""A target in words, as hardware advice takes it: a training run's tokens and days, or a service's requests and
lengths, which requests of a file have themselves. No other forms; what is not understood is refused with them."""

import dataclasses
import re

from shardlm.errors import ShardlmError

DAY = 86_400.0
FORMS = ("2T tokens in 30 days", "500 requests/s at 2k in, 200 out")
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_NUMBER = r"(\d+(?:\.\d+)?)\s*([kmbt]?)"
_TRAINING = re.compile(rf"{_NUMBER} tokens in (\d+(?:\.\d+)?)\s*(days?|hours?)", re.IGNORECASE)
_SERVING = re.compile(rf"{_NUMBER} requests?/s(?: at {_NUMBER} in, {_NUMBER} out)?", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class TrainingTarget:
    """`tokens` in `days`."""

    tokens: float
    days: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / (self.days * DAY)


@dataclasses.dataclass(frozen=True)
class ServingTarget:
    """request_rate  requests a second
    prompt_len, output_len  tokens of each; 0: as requests of a file have them
    """

    request_rate: float
    prompt_len: int = 0
    output_len: int = 0


def parse_target(text: str) -> TrainingTarget | ServingTarget:
    """Reads one of FORMS, with K, M, B and T for thousands to millions of millions: 2k is 2,000.

    Raises ShardlmError for any other text, for nothing asked (0), and for a length that is no whole number.
    """
    words = " ".join(text.split())
    if found := _TRAINING.fullmatch(words):
        tokens, unit, time, kind = found.groups()
        days = float(time) / (24 if kind.lower().startswith("hour") else 1)
        target = TrainingTarget(_number(tokens, unit), days)
        numbers = dataclasses.astuple(target)
    elif found := _SERVING.fullmatch(words):
        rate, *lengths = (_number(*found.groups()[i : i + 2]) for i in (0, 2, 4) if found.groups()[i])
        for length in lengths:
            if length % 1:
                raise ShardlmError(f"target {text!r}: {length:g} tokens of a prompt or a reply; give a whole number")
        target, numbers = ServingTarget(rate, *map(int, lengths)), (rate, *lengths)
    else:
        raise ShardlmError(
            f"target {text!r} is not understood; write {FORMS[0]!r} (or hours) for training, {FORMS[1]!r} for serving "
            "(with --file the requests a second alone), numbers with K, M, B or T as they need"
        )
    if not all(numbers):
        raise ShardlmError(f"target {text!r}: every number must be more than 0")
    return target


def _number(digits: str, unit: str) -> float:
    return float(digits) * _UNITS[unit.lower()]
