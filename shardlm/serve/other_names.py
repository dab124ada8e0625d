"""What users of vLLM write that is not here, or under another name: refused with what to write instead, where it would
change a reply. None is as good as left out. No jax."""

import difflib
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from shardlm.errors import ShardlmError

T = TypeVar("T", bound=type)
_CHOOSE = "ask for n replies and choose"
_IDS = 'prompts that are tokens are {"prompt_token_ids": ids}, and truncate_prompt_tokens of SamplingParams cuts them'
SAMPLING = {
    "guided_decoding": "it is called structured_outputs, a StructuredOutputs or a mapping",
    "logits_processors": "logit_bias, allowed_token_ids, bad_words and structured_outputs say what may be written",
    "use_beam_search": _CHOOSE,
    "length_penalty": f"there is no beam search; {_CHOOSE}",
    "early_stopping": f"there is no beam search; {_CHOOSE}",
    "output_kind": "outputs of AsyncLLM have all text so far, and LLM gives the last",
}
STRUCTURES = {
    "json_object": 'it is json={"type": "object"}',
    "structural_tag": "json, regex or grammar with after= holds what follows a text",
    "whitespace_pattern": "white space between the parts of a JSON text is free",
}
CALLS = {
    "prompt_token_ids": _IDS,
    "tokenization_kwargs": _IDS,
    "guided_options_request": "give SamplingParams(structured_outputs=...)",
    "chat_template_content_format": "templates are given contents as texts",
    "mm_processor_kwargs": "models here read text",
}


def refuse(what: str, others: Mapping[str, Any], known: Collection[str], instead: Mapping[str, str]) -> None:
    """Raises ShardlmError for the first of `others` that is not None, which is none of the `known` names of `what`."""
    for name, value in others.items():
        if value is None:
            continue
        near = difflib.get_close_matches(name, known, 1)
        hint = instead.get(name) or (f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}")
        raise ShardlmError(f"{what} has no {name} (given: {value!r:.100}); {hint}")


def knows_others(what: str, instead: Mapping[str, str]) -> Callable[[T], T]:
    """A dataclass whose constructor refuses other names than its own as `refuse` does."""

    def with_others(cls: T) -> T:
        own, known = cls.__init__, tuple(cls.__dataclass_fields__)

        @functools.wraps(own)
        def init(self, *values: Any, **named: Any) -> None:
            refuse(what, {name: value for name, value in named.items() if name not in known}, known, instead)
            own(self, *values, **{name: value for name, value in named.items() if name in known})

        cls.__init__ = init
        return cls

    return with_others
