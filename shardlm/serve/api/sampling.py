"""From the fields of a request to `SamplingParams`."""

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from shardlm.errors import ShardlmError
from shardlm.serve.api.errors import ApiError
from shardlm.serve.api.protocol import PooledRequest, Sampled
from shardlm.serve.beam_search import BeamSearchParams
from shardlm.serve.grammar import ANY_OBJECT, lenient
from shardlm.serve.sampling_params import SamplingParams, StructuredOutputs

# Fields that go through as they are, where they are given.
_SAME = (
    *("n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "allowed_token_ids", "bad_words", "seed", "stop", "stop_token_ids", "ignore_eos"),
    *("include_stop_str_in_output", "skip_special_tokens", "max_tokens", "min_tokens", "prompt_logprobs"),
    *("truncate_prompt_tokens", "thinking_token_budget"),
)
# What beams would pay no heed to: the values, besides None, that ask for nothing.
_NOT_OF_BEAMS: dict[str, tuple] = {
    "repetition_penalty": (1,),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_tokens"), (0,)),
    **dict.fromkeys(("allowed_token_ids", "bad_words", "stop", "stop_token_ids"), ([],)),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"), ()),
    **dict.fromkeys(("prompt_logprobs", "thinking_token_budget"), ()),
}
_SALT = 1024  # characters, which are hashed with each prompt; of ids, which are in each chunk
_LARGEST = 2**31 - 1  # what an integer on the device holds; no count of tokens is above it


def sampling_params(
    request: Sampled,
    max_model_len: int,
    usual: Mapping[str, float],
    *,
    structured: StructuredOutputs | None = None,
    instead: Sequence[str] = (),
    names: Mapping[str, str] = MappingProxyType({}),
    **given: Any,
) -> SamplingParams:
    """
    Args:
      usual: for what the request leaves open.
      structured: what the endpoint itself asks for, as a forced call of a tool does.
      instead: how a reply may begin that is no text, of which a response_format would be.
      names: what the endpoint calls some fields of SamplingParams.
      given: values that the endpoint has under other names or defaults; None for what is not given.

    Raises: ShardlmError, ApiError for values out of their range and wishes that exclude each other.
    """
    wishes = dict(usual) | {name: value for name in _SAME if (value := getattr(request, name)) is not None}
    wishes |= {name: value for name, value in given.items() if value is not None or name == "max_tokens"}
    if request.stream_options is not None and not request.stream:
        raise ApiError("stream_options is for streams; ask with stream=true", param="stream_options")
    check_order(request)
    if request.truncate_prompt_tokens is not None and request.truncation_side == "right":
        message = "truncation_side=right is for what is embedded; a reply goes on from the prompt's end: leave it out"
        raise ApiError(message, param="truncation_side")
    if request.request_id is not None and len(request.request_id) > _SALT:
        raise ApiError(f"request_id has {len(request.request_id)} characters, above {_SALT}", param="request_id")
    if request.length_penalty is not None and not request.use_beam_search:
        raise ApiError("length_penalty is for beams; ask with use_beam_search=true", param="length_penalty")
    if wishes.get("truncate_prompt_tokens") == -1:  # vLLM's word for what the model has room for
        wanted = wishes.get("max_tokens", SamplingParams.max_tokens)
        room = 1 if wanted is None or wanted >= max_model_len else wanted  # such a wish is for as many as fit
        wishes["truncate_prompt_tokens"] = max_model_len - room
    for name in ("top_k", "max_tokens", "min_tokens", "truncate_prompt_tokens", "thinking_token_budget"):
        if (value := wishes.get(name)) is not None:
            wishes[name] = min(value, _LARGEST)
    try:
        return SamplingParams(**wishes, structured_outputs=_structured(request, structured, instead))
    except ShardlmError as error:
        field, _, rest = str(error).partition("=")
        if field not in names:
            raise
        raise ApiError(f"{names[field]}={rest}", param=names[field]) from None


def beam_params(request: Sampled, params: SamplingParams) -> BeamSearchParams | None:
    """Of a request for beams, n of them; None for others. Raises ApiError for what a search would leave aside, as
    vLLM's does in silence."""
    if not request.use_beam_search:
        return None
    for name, nothing in _NOT_OF_BEAMS.items():
        if getattr(request, name, None) not in (None, *nothing):
            message = f"{name} is for replies that are sampled token by token; leave it or use_beam_search out"
            raise ApiError(message, param=name)
    for name, asked in (("tool_choice", params.structured_outputs), ("echo", params.prompt_logprobs)):
        if asked is not None:
            raise ApiError(f"{name} does not go with use_beam_search as it is asked for here", param=name)
    if params.max_tokens == 0:
        raise ApiError("max_tokens=0 leaves beams nothing to search; ask for one token or more", param="max_tokens")
    try:
        penalty = 1.0 if request.length_penalty is None else request.length_penalty
        how = {"length_penalty": penalty, "include_stop_str_in_output": params.include_stop_str_in_output}
        return BeamSearchParams(params.n, params.max_tokens, params.ignore_eos, **how)
    except ShardlmError as error:
        message = str(error).replace("beam_width=", "n=", 1)
        raise ApiError(message, param=message.partition("=")[0]) from None


def check_order(request: Sampled | PooledRequest) -> None:
    """Of whom it shares prefixes with and whom it goes before. Raises ApiError."""
    if request.cache_salt is not None and not 0 < len(request.cache_salt) <= _SALT:
        length = len(request.cache_salt)
        raise ApiError(f"cache_salt has {length} characters; it needs 1 to {_SALT}", param="cache_salt")
    if not -_LARGEST <= (request.priority or 0) <= _LARGEST:
        raise ApiError(f"priority={request.priority} must be an integer of 32 bits", param="priority")


def _structured(request: Sampled, forced: StructuredOutputs | None, instead: Sequence[str]) -> StructuredOutputs | None:
    """The one wish for the text's form. A call that is forced leaves no text that a response_format would be of. Raises
    ApiError for several."""
    wanted = from_format(request.response_format or {})
    if wanted and instead:
        wanted = dataclasses.replace(wanted, instead=instead)
    found = {"tool_choice": forced, "response_format": None if forced else wanted}
    if (wish := request.structured_outputs) is not None:
        schema = ANY_OBJECT if wish.json is None and wish.json_object else wish.json
        found["structured_outputs"] = StructuredOutputs(
            schema, wish.regex, wish.choice, wish.grammar, wish.structural_tag
        )
    for name in ("json", "regex", "choice", "grammar"):
        if (value := getattr(request, f"guided_{name}")) is not None:
            found[f"guided_{name}"] = StructuredOutputs(**{name: value})
    given = {name: wish for name, wish in found.items() if wish is not None}
    if len(given) > 1:
        raise ApiError(f"{' and '.join(given)} each say what the text must be; give one", param=list(given)[-1])
    return next(iter(given.values()), None)


def from_format(wish: Mapping[str, Any], param: str = "response_format") -> StructuredOutputs | None:
    """What response_format (chat) or text.format (responses, where the schema lies one level higher) asks for."""
    kind = wish.get("type", "text") if wish else "text"
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputs(json=ANY_OBJECT)
    if kind == "structural_tag":
        return StructuredOutputs(structural_tag=wish)
    if kind != "json_schema":
        kinds = "text, json_object, json_schema and structural_tag"
        raise ApiError(f"{param}.type={kind!r} must be one of {kinds}", param=f"{param}.type")
    holder = wish.get("json_schema", wish)
    schema = holder.get("schema") if isinstance(holder, Mapping) else None
    if not isinstance(schema, Mapping):
        raise ApiError(f"{param} of type json_schema has no schema, which is an object", param=param)
    try:
        return StructuredOutputs(json=schema if holder.get("strict") is True else lenient(schema))
    except ShardlmError as error:
        raise ApiError(str(error), param=param) from None
