"""The bodies of requests: their fields, types, and what is refused before the engine hears of it.

Every field may be null, which is as good as left out: defaults are `SamplingParams`'. Fields that are not here are
ignored and counted. Beside OpenAI's there are those that users of vLLM send.
"""

import codecs
import functools
import re
from collections.abc import Sequence
from typing import Any, Literal, TypeVar, get_args

import msgspec

from shardlm.serve.api.errors import ApiError
from shardlm.serve.api.values import MOST_VALUES, too_many

T = TypeVar("T", bound=msgspec.Struct)
Json = dict[str, Any]
Side = Literal["left", "right"]  # of a text, where it is cut off
Prompt = str | list[str | int | list[int]]  # one text, texts, token ids, lists of token ids
# An escape of half a character: the first half that no second one follows, or a second one that follows no first.
_HALF = re.compile(rb"\\u[dD][89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F]..")


class StructuredWish(msgspec.Struct, kw_only=True):
    json: str | Json | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: str | Json | None = None


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Common(msgspec.Struct, kw_only=True):
    """What is known of every request; user, metadata and store are taken and not used."""

    model: str | None = None
    user: str | None = None
    metadata: Json | None = None
    store: bool | None = None


class Sampled(Common, kw_only=True):
    """How the tokens are chosen: `SamplingParams` says what each field means."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Side | None = None
    priority: int | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    use_beam_search: bool | None = None  # n beams, of which length_penalty chooses
    length_penalty: float | None = None
    thinking_token_budget: int | None = None
    structured_outputs: StructuredWish | None = None
    guided_json: str | Json | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    response_format: Json | None = None


class CompletionRequest(Sampled, kw_only=True):
    prompt: Prompt
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None


class ChatRequest(Sampled, kw_only=True):
    messages: list[Json]
    tools: list[Json] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None
    documents: list[Json] | None = None
    include_reasoning: bool | None = None
    return_prompt_text: bool | None = None
    chat_template_kwargs: Json | None = None
    mm_processor_kwargs: Json | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    reasoning_effort: str | None = None
    # Refused: an answer without them is not what was asked for.
    chat_template: str | None = None
    functions: list[Json] | None = None
    function_call: str | Json | None = None
    modalities: list[str] | None = None


class Reasoning(msgspec.Struct, kw_only=True):
    effort: str | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    format: Json | None = None


class Extras(Common, kw_only=True):
    """What means the same as in a chat where OpenAI and Anthropic ask otherwise; most of it is vLLM's."""

    chat_template_kwargs: Json | None = None
    mm_processor_kwargs: Json | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    thinking_token_budget: int | None = None
    structured_outputs: StructuredWish | None = None
    priority: int | None = None
    cache_salt: str | None = None


class ResponsesRequest(Extras, kw_only=True):
    input: str | list[Json]
    instructions: str | None = None
    stream: bool | None = None
    stop: str | list[str] | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    max_output_tokens: int | None = None
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    reasoning: Reasoning | None = None
    prompt: Json | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    conversation: str | Json | None = None


class CountTokensRequest(Extras, kw_only=True):
    """Anthropic's. cache_control and service_tier are taken and not used: prefixes are always cached."""

    messages: list[Json]
    system: str | list[Json] | None = None
    tools: list[Json] | None = None
    tool_choice: Json | None = None
    thinking: Json | None = None
    output_config: Json | None = None
    output_format: Json | None = None  # which was there before output_config.format
    cache_control: Json | None = None
    service_tier: str | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None


class PooledRequest(Common, kw_only=True):
    """What is read for its own sake: `input`, or `messages` as the chat template writes them. As in vLLM no reply is
    begun after these unless add_generation_prompt says so."""

    input: Prompt | None = None
    messages: list[Json] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: Json | None = None
    mm_processor_kwargs: Json | None = None
    chat_template: str | None = None  # refused, as in a chat
    truncate_prompt_tokens: int | None = None
    truncation_side: Side | None = None
    priority: int | None = None
    cache_salt: str | None = None


class EmbeddingsRequest(PooledRequest, kw_only=True):
    """use_activation, or normalize as vLLM called it: false leaves vectors as long as they are."""

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    use_activation: bool | None = None
    normalize: bool | None = None


class ClassifyRequest(PooledRequest, kw_only=True):
    """use_activation, or activation as vLLM called it: false gives logits."""

    use_activation: bool | None = None
    activation: bool | None = None


class PoolingRequest(EmbeddingsRequest, kw_only=True):
    """task: embed or classify; without it what the model is made for."""

    task: str | None = None


class ScoreRequest(Common, kw_only=True):
    """vLLM's, under each of the names that it has had: one text is compared with every other, or each with its own."""

    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Side | None = None
    use_activation: bool | None = None


class RerankRequest(Common, kw_only=True):
    """Jina's and Cohere's: a document is a text, or an object with one."""

    query: str
    documents: list[str | Json]
    top_n: int | None = None
    return_documents: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Side | None = None
    use_activation: bool | None = None


class TokenizeRequest(Common, kw_only=True):
    prompt: str | None = None
    messages: list[Json] | None = None
    tools: list[Json] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: Json | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Common, kw_only=True):
    tokens: list[int]


class UpdateWeightsRequest(Common, kw_only=True):
    """model_path: SGLang's name for path. draft: of the draft model's weights; without it they stay."""

    path: str | None = None
    draft: str | None = None
    model_path: str | None = None


class ResetPrefixCache(msgspec.Struct, kw_only=True):
    """In the address, as vLLM's. reset_running_requests: what runs is computed anew; without it nothing happens while
    anything does. reset_external: of caches outside of the engine, which are not here."""

    reset_running_requests: bool = False
    reset_external: bool = False


class LoadAdapterRequest(Common, kw_only=True):
    """lora_path: adapters of PEFT, or a run with lora.rank, on the server's machine. load_inplace: also in place of the
    one of this name."""

    lora_name: str | None = None
    lora_path: str | None = None
    load_inplace: bool | None = None


class UnloadAdapterRequest(Common, kw_only=True):
    lora_name: str | None = None


def is_billing(block: Any) -> bool:
    """Whether a block of `system` is for Anthropic's servers alone, another one with every request, as Claude Code's
    first is."""
    text = block.get("text") if isinstance(block, dict) else None
    return isinstance(text, str) and text.startswith("x-anthropic-billing-header")


EXTRAS = tuple(field.name for field in msgspec.structs.fields(Extras) if field.name not in Common.__struct_fields__)


def parse(body: bytes, model: type[T]) -> tuple[T, int]:
    """(the request, how many of its fields are not known). Raises ApiError for what is no JSON, has wrong types,
    or more values than can be read while others wait."""
    body = body.removeprefix(codecs.BOM_UTF8)  # as files of some editors begin
    if too_many(body):
        message = f"the body has more than {MOST_VALUES} objects, lists and fields; send less at once"
        raise ApiError(message, 413, code="request_too_large")
    try:
        found = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        why = str(error)
        # Of which msgspec may say that the input was truncated. The event loop waits: a second for 32 MiB.
        if len(body) < 2**20 and (half := _HALF.search(body)):
            why = f"{half[0].decode('latin-1')} is half a character, as of a text cut within one; send it whole"
        raise ApiError(f"the body is not JSON in UTF-8: {why}") from None
    if not isinstance(found, dict):
        raise ApiError(f"the body is a JSON {type(found).__name__}; it must be an object")
    return converted(found, model)


def converted(found: Json, model: type[T], where: str = "") -> tuple[T, int]:
    """As `parse`, of an object. `where`: what comes before the names of its fields, in messages."""
    try:
        return msgspec.convert(_with_integers(found, model), model), len(found.keys() - set(model.__struct_fields__))
    except (msgspec.ValidationError, RecursionError) as error:
        message, _, path = str(error).partition(" - at `")
        param = re.sub(r"^\$\.?", "", path.rstrip("`")) or None
        if missing := re.search(r"required field `(\w+)`", message):
            param = missing[1]
        param = param and where + param
        raise ApiError(f"{param or 'the body'}: {message}", param=param) from None


def _with_integers(found: Json, model: type[msgspec.Struct]) -> Json:
    """10.0 is 10 where an integer belongs: to many languages, and to JSON, they are one number."""
    whole = {n: int(v) for n, v in found.items() if isinstance(v, float) and v.is_integer() and n in _integers(model)}
    return found | whole if whole else found


@functools.cache
def _integers(model: type[msgspec.Struct]) -> frozenset[str]:
    """Names of the fields that are integers."""
    fields = msgspec.structs.fields(model)
    return frozenset(field.name for field in fields if field.type is int or int in get_args(field.type))


def prompts_of(prompt: Prompt, param: str, blank: bool = False) -> Sequence[str | list[int]]:
    """One text or list of token ids for each prompt. `blank`: texts may be empty, as the tokenizer puts something at
    their ends. Raises ApiError for a mixture and for what is empty."""
    kinds = set() if isinstance(prompt, str) else set(map(type, prompt))  # of 16 million tokens in 0.3 s
    if kinds <= {int}:
        prompts = [prompt]
    elif len(kinds) == 1:
        prompts = prompt
    else:
        raise ApiError(f"{param} mixes texts and tokens; it is a text, token ids, or a list of one kind", param=param)
    if not prompts:
        raise ApiError(f"{param} is empty; give at least one token of text", param=param)
    if not all(prompts) and (empty := [i for i, one in enumerate(prompts) if not one and not (blank and one == "")]):
        which = param if isinstance(prompt, str) else f"{param}[{empty[0]}]"
        raise ApiError(f"{which} is empty; give at least one token of text", param=param)
    return prompts
