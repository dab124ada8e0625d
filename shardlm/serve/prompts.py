"""Prompts as users of vLLM write them: a text, token ids, or a mapping that names which of the two it is, with images
too (images.py); one or many. No jax."""

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from shardlm.errors import ShardlmError
from shardlm.serve.other_names import CALLS
from shardlm.serve.request import PromptTooLong
from shardlm.serve.sampling_params import SamplingParams
from shardlm.tokenizer import Tokenizer

# {"prompt": text}, {"prompt_token_ids": ids}, or both, where the text is only shown. Ids may be a numpy array. Prompts
# with a "cache_salt" share what is computed with those of the same one alone. "multi_modal_data": images, and
# "mm_processor_kwargs": how these are prepared (images.py).
Prompt = str | Sequence[int] | Mapping[str, Any]
KNOWN = {"prompt", "prompt_token_ids", "multi_modal_data", "mm_processor_kwargs", "cache_salt"}


def several(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """A list of prompts, of one prompt too. Raises ShardlmError for what is neither."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes) or not hasattr(prompts, "__len__") or not hasattr(prompts, "__getitem__"):
        raise _wrong(prompts)
    return [prompts] if len(prompts) and isinstance(prompts[0], numbers.Integral) else prompts


def conversations(given: Any) -> Sequence[Sequence[Mapping[str, Any]]]:
    """One for each: `given` is one or several. Raises ShardlmError for what is neither."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        message = 'give a list of messages, [{"role": "user", "content": text}], or a list of such lists'
        raise ShardlmError(f"messages is a {type(given).__name__}; {message}")
    return [given] if given and isinstance(given[0], Mapping) else given


def read(prompt: Prompt, tokenizer: Tokenizer) -> tuple[Sequence[int], str | None]:
    """(token ids, the text if there is one). Raises ShardlmError for what is no prompt."""
    text, ids = prompt if isinstance(prompt, str) else None, prompt
    if isinstance(prompt, Mapping):
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if unknown := prompt.keys() - KNOWN:
            name = min(map(str, unknown))
            known = CALLS.get(name, "it has prompt or prompt_token_ids, with multi_modal_data for images")
            raise ShardlmError(f"a prompt has {name!r}; {known}")
        if not isinstance(text, str | None) or (text is None and ids is None):
            raise _wrong(prompt)
    if text is not None and (ids is None or ids is prompt):
        return tokenizer.encode_prompt(text), text
    if isinstance(ids, str | bytes) or not hasattr(ids, "__len__") or not hasattr(ids, "__iter__"):
        raise _wrong(prompt)
    return ids.tolist() if hasattr(ids, "tolist") else ids, text


def salt_of(prompt: Prompt) -> str:
    """Its cache_salt, "" without one. Raises ShardlmError for one that is no text, or empty."""
    if not isinstance(prompt, Mapping) or (salt := prompt.get("cache_salt")) is None:
        return ""
    if not isinstance(salt, str) or not salt:
        raise ShardlmError(f"cache_salt={salt!r} of a prompt; give a text that is not empty, or leave it out")
    return check_salt(salt)


def check_salt(salt: str) -> str:
    """The salt, which is hashed in UTF-8. Raises ShardlmError for half a character."""
    try:
        salt.encode()
    except UnicodeEncodeError as error:
        where = f"{salt[error.start]!r} at {error.start}"
        raise ShardlmError(f"cache_salt has {where}, which is half a character; send it whole") from None
    return salt


def check_length(text: str, tokenizer: Tokenizer, max_model_len: int, truncates: bool) -> None:
    """Raises PromptTooLong for a text that has too many tokens for sure, before they are counted; `truncates`: only the
    last tokens are wanted."""
    if not truncates and (least := tokenizer.least_tokens(text, max_model_len)) > max_model_len:
        raise PromptTooLong(
            f"the prompt has at least {least} tokens ({len(text)} characters); max_model_len={max_model_len} must hold "
            "it. Shorten it, ask for truncate_prompt_tokens, or raise max_model_len",
            least,
            max_model_len,
        )


def params_of(
    given: SamplingParams | Sequence[SamplingParams] | None, usual: SamplingParams, count: int
) -> Sequence[SamplingParams]:
    """The parameters of each of `count` prompts; None stands for the usual ones. Raises ShardlmError where they are
    others in number, or no SamplingParams."""
    if given is None or isinstance(given, SamplingParams):
        return [given or usual] * count
    each = list(given) if isinstance(given, Sequence) else [given]
    if wrong := [one for one in each if not isinstance(one, SamplingParams)]:
        raise ShardlmError(f"sampling_params has a {type(wrong[0]).__name__}; give SamplingParams, one or a list")
    if len(each) != count:
        raise ShardlmError(f"{count} prompts and {len(each)} sampling parameters; give one, or one for each")
    return each


def priorities_of(given: Sequence[int] | None, count: int) -> Sequence[int]:
    """Of each of `count` prompts, 0 unless given. Raises ShardlmError where they are others in number."""
    each = [0] * count if given is None else list(given)
    if len(each) != count:
        raise ShardlmError(f"{count} prompts and {len(each)} priorities; give one for each")
    if wrong := [one for one in each if not isinstance(one, numbers.Integral)]:
        raise ShardlmError(f"priority={wrong[0]!r} must be an integer")
    return each


def _wrong(prompt: Any) -> ShardlmError:
    return ShardlmError(
        f"a prompt is a {type(prompt).__name__}; give a text, token ids, "
        '{"prompt": text} or {"prompt_token_ids": ids}'
    )
