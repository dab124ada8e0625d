"""How speculative decoding is asked for: vLLM's `speculative_config`, checked. No jax."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from shardlm.errors import ShardlmError

METHODS = ("ngram", "draft_model", "mtp", "eagle3")
MTP_NAMES = ("deepseek_mtp", "glm4_moe_mtp", "qwen3_next_mtp", "qwen3_5_mtp")  # of models' own, in vLLM


@dataclasses.dataclass(frozen=True)
class SpeculativeConfig:
    """num_speculative_tokens  drafted for each step of the model
    method               "ngram": what followed the same tokens before; "draft_model": what a smaller model says;
                         "mtp": what the model's own modules say that were trained to predict further tokens;
                         "eagle3": what a head says that was trained on the model's streams (EAGLE-3)
    model                of "draft_model": its folder, name or run; of "eagle3": its folder or name
    prompt_lookup_max    of "ngram": the most last tokens that are looked up
    prompt_lookup_min    the fewest
    """

    num_speculative_tokens: int
    method: str
    model: str | None = None
    prompt_lookup_max: int = 0
    prompt_lookup_min: int = 0

    @classmethod
    def parse(cls, options: "Mapping[str, Any] | SpeculativeConfig") -> "SpeculativeConfig":
        """Of a mapping with vLLM's keys and defaults. Raises ShardlmError for what is unknown or cannot be."""
        if isinstance(options, SpeculativeConfig):
            return options
        names = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(options, Mapping):
            raise ShardlmError(f"speculative_config={options!r} must be a mapping of {', '.join(names)}")
        for name in options:
            if name not in names:
                raise ShardlmError(f"speculative_config has {name!r}, which is none of {', '.join(names)}")
        method = options.get("method") or ("draft_model" if options.get("model") else None)
        method = "mtp" if method in MTP_NAMES else method
        if method not in METHODS:
            raise ShardlmError(f"speculative_config: method={method!r}; choose from {', '.join(METHODS)}")
        count = _count(options, "num_speculative_tokens")
        if method in ("draft_model", "eagle3"):
            return _by_model(options, count, method)
        return {"ngram": _ngram, "mtp": _mtp}[method](options, count)

    def check_room(self, length: int) -> None:
        """Raises ShardlmError for more tokens than a text of `length` has."""
        for name in ("num_speculative_tokens", "prompt_lookup_max"):
            if (value := getattr(self, name)) >= length:
                raise ShardlmError(f"speculative_config: {name}={value} must be below max_model_len={length}")

    @classmethod
    def from_json(cls, text: str) -> "SpeculativeConfig":
        """Of a command line. Raises ShardlmError."""
        try:
            options = json.loads(text)
        except ValueError as error:
            raise ShardlmError(
                f"speculative_config={text} is no JSON ({error}); give for example "
                '\'{"method": "ngram", "num_speculative_tokens": 4}\''
            ) from None
        return cls.parse(options)


def _ngram(options: Mapping[str, Any], count: int) -> SpeculativeConfig:
    if options.get("model"):
        raise ShardlmError(f"speculative_config: method 'ngram' has no model, and model={options['model']!r} is given")
    given = [name for name in ("prompt_lookup_max", "prompt_lookup_min") if options.get(name) is not None]
    sizes = {name: _count(options, name) for name in given}
    most = sizes.get("prompt_lookup_max", sizes.get("prompt_lookup_min", 5))
    least = sizes.get("prompt_lookup_min", most)
    if least > most:
        raise ShardlmError(
            f"speculative_config: prompt_lookup_min={least} is above prompt_lookup_max={most}; choose at most that"
        )
    return SpeculativeConfig(count, "ngram", None, most, least)


def _by_model(options: Mapping[str, Any], count: int, method: str) -> SpeculativeConfig:
    if not options.get("model"):
        what = "a folder, name or run" if method == "draft_model" else "the folder or name of a head"
        raise ShardlmError(f"speculative_config: method {method!r} needs model, {what}")
    lookups = [name for name in ("prompt_lookup_max", "prompt_lookup_min") if options.get(name) is not None]
    if lookups:
        raise ShardlmError(f"speculative_config: {lookups[0]} is for method 'ngram'; leave it out beside a model")
    return SpeculativeConfig(count, method, str(options["model"]))


def _mtp(options: Mapping[str, Any], count: int) -> SpeculativeConfig:
    given = [name for name in ("model", "prompt_lookup_max", "prompt_lookup_min") if options.get(name) is not None]
    if given:
        raise ShardlmError(f"speculative_config: method 'mtp' drafts by the model itself; leave out {given[0]}")
    return SpeculativeConfig(count, "mtp")


def _count(options: Mapping[str, Any], name: str) -> int:
    value = options.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ShardlmError(f"speculative_config: {name}={value!r} must be a whole number of at least 1")
    return value
