"""A target in words, as hardware advice takes it: a training run's tokens and time, or a service's requests and
lengths, which requests of a file have themselves. No other forms; what is not understood is refused with them."""

import dataclasses
import re

from shardlm.errors import ShardlmError

DAY = 86_400.0
FORMS = ("2T tokens in 30 days", "500 requests/s at 2k in, 200 out")
_NUMBERS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_NUMBERS |= {"thousand": 1e3, "million": 1e6, "billion": 1e9, "trillion": 1e12}
_DAYS = {"minute": 1 / 1440, "hour": 1 / 24, "day": 1.0, "week": 7.0, "month": 365 / 12, "year": 365.0}
_SECONDS = {"s": 1.0, "sec": 1.0, "second": 1.0, "min": 60.0, "minute": 60.0, "h": 3600.0, "hour": 3600.0, "day": DAY}
_PLAIN = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e\+?\d{1,2})?"
_NUMBER = rf"({_PLAIN})\s*({'|'.join(filter(None, reversed(_NUMBERS)))})?"
_TRAINING = re.compile(rf"{_NUMBER} tokens in ({_PLAIN})\s*({'|'.join(_DAYS)})s?", re.IGNORECASE)
_LENGTHS = rf"(?: at {_NUMBER}(?: tokens)? in, {_NUMBER}(?: tokens)? out)?"
_SERVING = re.compile(rf"{_NUMBER} requests?\s?(?:/|per )\s?({'|'.join(_SECONDS)}){_LENGTHS}", re.IGNORECASE)


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
    """Reads one of FORMS, with K, M, B and T for thousands to millions of millions: 2k is 2,000. Time is in minutes to
    years, of 365 days and twelve months; requests are of a second to a day.

    Raises ShardlmError for any other text, for nothing asked (0), and for a length that is no whole number.
    """
    words = " ".join(text.split())
    if found := _TRAINING.fullmatch(words):
        tokens, unit, time, kind = found.groups()
        target = TrainingTarget(_number(tokens, unit), _number(time, "") * _DAYS[kind.lower()])
        numbers = dataclasses.astuple(target)
    elif found := _SERVING.fullmatch(words):
        rate, unit, every, *rest = found.groups()
        lengths = [_number(*rest[i : i + 2]) for i in (0, 2) if rest[i]]
        for length in lengths:
            if length % 1:
                raise ShardlmError(f"target {text!r}: {length:g} tokens of a prompt or a reply; give a whole number")
        per_second = _number(rate, unit) / _SECONDS[every.lower()]
        target, numbers = ServingTarget(per_second, *map(int, lengths)), (per_second, *lengths)
    else:
        raise ShardlmError(_not_understood(text))
    if not all(numbers):
        raise ShardlmError(f"target {text!r}: every number must be more than 0")
    return target


def parse_amount(text: str) -> float:
    """A number as targets have them, such as 15T. Raises ValueError for any other text."""
    found = re.fullmatch(_NUMBER, text.strip(), re.IGNORECASE)
    if not found:
        raise ValueError(f"{text!r} is no amount; write it as 500k, 2.5T, 2e12 or 2,000,000")
    return _number(*found.groups())


def _not_understood(text: str) -> str:
    times = ", ".join(f"{unit}s" for unit in _DAYS)
    return (
        f"target {text!r} is not understood; write {FORMS[0]!r} for training (or {times}), {FORMS[1]!r} for serving "
        "(or requests/minute, /hour, /day; with --file the requests alone), and numbers as 500k, 2.5T, 2e12, 2,000,000"
    )


def _number(digits: str, unit: str | None) -> float:
    return float(digits.replace(",", "")) * _NUMBERS[(unit or "").lower()]
