"""A target in words, as hardware advice takes it: a training run's tokens and time, or a service's requests and
lengths, which requests of a file have themselves; before them, where that is wanted, "train 70B on" or "serve a 70B
model at", whose size has to be the model's. No other forms; what is not understood is refused with them."""

import dataclasses
import re

from shardlm.errors import ShardlmError

DAY = 86_400.0
FORMS = ("2T tokens in 30 days", "500 requests/s at 2k in, 200 out")
NEAR = 0.05  # of a model's parameters: how far a size may be from them that they do not round to (70B: 70.6 B)
_NUMBERS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_NUMBERS |= {"thousand": 1e3, "million": 1e6, "billion": 1e9, "trillion": 1e12}
_LETTERS = (("t", 1e12), ("b", 1e9), ("m", 1e6), ("k", 1e3))
_DAYS = {"minute": 1 / 1440, "hour": 1 / 24, "day": 1.0, "week": 7.0, "month": 365 / 12, "year": 365.0}
_SECONDS = {"s": 1.0, "sec": 1.0, "second": 1.0, "min": 60.0, "minute": 60.0, "h": 3600.0, "hour": 3600.0, "day": DAY}
_PLAIN = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e\+?\d{1,2})?"
_NUMBER = rf"({_PLAIN})\s*({'|'.join(filter(None, reversed(_NUMBERS)))})?"
_MODEL = rf"(?:an? )?{_NUMBER}(?:[ -]param(?:eter)?s?)?(?: model)?"
_TRAIN = rf"(?:(?:pre-?)?train (?:{_MODEL} (?:(?:on|with|for) )?)?)?"
_SERVE = rf"(?:serve (?:{_MODEL} (?:(?:at|with) )?)?)?"
_TIME = rf"({_PLAIN})\s*({'|'.join(_DAYS)})s?"
_TRAINING = re.compile(rf"{_TRAIN}{_NUMBER} tokens (?:in|within) {_TIME}", re.IGNORECASE)
_LENGTHS = rf"(?: (?:at|@) {_NUMBER}(?: tokens)? in(?:,| and) {_NUMBER}(?: tokens)? out)?"
_RATE = rf"{_NUMBER} req(?:uest)?s?\s?(?:/|per )\s?({'|'.join(_SECONDS)})"
_SERVING = re.compile(f"{_SERVE}{_RATE}{_LENGTHS}", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Size:
    """Of a model, as a target names it.

    parameters  how many
    digit       how many the last digit stands for: 1e9 of 70B, 1e8 of 0.5B; what comes after it may be left out
                (7B and 14B of Qwen 2.5: 7.62 and 14.8)
    """

    text: str
    parameters: float
    digit: float

    def check(self, total: int, active: int) -> None:
        """Raises ShardlmError where a model with so many parameters, `active` of them for each token, is another."""
        if any(self._is(count) for count in (total, active)):
            return
        has, active = _large(total), _large(active)
        has += f" parameters, {active} of them for each token" if active != has else " parameters"
        raise ShardlmError(
            f"the target says {self.text}, and the configuration's model has {has}; name the configuration "
            f"of a model of {self.text} (--config=FILE, or with --serve --model=FOLDER), or leave the size out"
        )

    def _is(self, count: int) -> bool:
        over = count - self.parameters
        return abs(over) <= max(NEAR * count, self.digit / 2) or 0 < over < self.digit


@dataclasses.dataclass(frozen=True)
class TrainingTarget:
    """`tokens` in `days`, of a model of this size; None: that is not said."""

    tokens: float
    days: float
    size: Size | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / (self.days * DAY)


@dataclasses.dataclass(frozen=True)
class ServingTarget:
    """request_rate  requests a second
    prompt_len, output_len  tokens of each; 0: as requests of a file have them
    size  of the model; None: that is not said
    """

    request_rate: float
    prompt_len: int = 0
    output_len: int = 0
    size: Size | None = None


def parse_target(text: str) -> TrainingTarget | ServingTarget:
    """Reads one of FORMS, with K, M, B and T for thousands to millions of millions: 2k is 2,000. Time is in minutes to
    years, of 365 days and twelve months; requests are of a second to a day. Before it may stand what is done with a
    model of what size: "train 70B on 2T tokens in 30 days", "serve a 70B model at 500 requests/s".

    Raises ShardlmError for any other text, for nothing asked (0), and for a length that is no whole number.
    """
    words = " ".join(text.split())
    if found := _TRAINING.fullmatch(words):
        *size, tokens, unit, time, kind = found.groups()
        numbers = _number(tokens, unit), _number(time, "") * _DAYS[kind.lower()]
        target = TrainingTarget(*numbers, _size(*size))
    elif found := _SERVING.fullmatch(words):
        *size, rate, unit, every, in_, in_unit, out, out_unit = found.groups()
        lengths = [_number(*pair) for pair in ((in_, in_unit), (out, out_unit)) if pair[0]]
        for length in lengths:
            if length % 1:
                raise ShardlmError(f"target {text!r}: {length:g} tokens of a prompt or a reply; give a whole number")
        numbers = _number(rate, unit) / _SECONDS[every.lower()], *lengths
        target = ServingTarget(numbers[0], *map(int, lengths), size=_size(*size))
    else:
        raise ShardlmError(_not_understood(text))
    if not all(numbers) or (target.size and not target.size.parameters):
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
        "(or requests/minute, /hour, /day; with --file the requests alone), numbers as 500k, 2.5T, 2e12, 2,000,000; "
        "'train 70B on' or 'serve a 70B model at' may stand before it"
    )


def _size(digits: str | None, unit: str | None) -> Size | None:
    if digits is None:
        return None
    mantissa, _, exponent = digits.lower().partition("e")
    decimals = len(mantissa.partition(".")[2]) - int(exponent or 0)
    return Size(f"{digits}{unit or ''}", _number(digits, unit), _number("1", unit) / 10**decimals)


def _large(count: int) -> str:
    """Three digits of it and a letter, as sizes are written."""
    letter, of = next(((letter.upper(), of) for letter, of in _LETTERS if count >= of), ("", 1.0))
    return f"{count / of:.3g}{letter}"


def _number(digits: str, unit: str | None) -> float:
    return float(digits.replace(",", "")) * _NUMBERS[(unit or "").lower()]
