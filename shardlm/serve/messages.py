"""Messages as clients send them to messages as chat templates read them: contents as plain texts, or with images as
parts, calls as objects. No jax."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from shardlm.chat import ChatTemplate
from shardlm.errors import ShardlmError
from shardlm.serve import past_calls
from shardlm.vision import image_places
from shardlm.vision.image_parts import BadMessage, content_of, has_media, is_image, is_video

Message = Mapping[str, Any]
_TAKEN = {"messages", "tools", "add_generation_prompt", "continue_final_message", "self"}


def rendered(
    template: ChatTemplate,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    options: Mapping[str, Any] | None = None,
    token: str = "",
    video: str = "",
) -> str:
    """The text that the model is given. `options` are the template's own. `token`: what stands for an image in the
    text, which holds image_places.NAMED where somebody says its name; "": the model does not see. `video`: what stands
    for a video, "": it reads none. Raises BadMessage, ShardlmError."""
    options = dict(options or {})
    if taken := options.keys() & _TAKEN:
        message = f"chat_template_kwargs has {min(taken)}, which means something else here; leave it out"
        raise BadMessage(message, "chat_template_kwargs")
    if add_generation_prompt and continue_final_message:
        message = "continue_final_message=True goes on with the last message, and add_generation_prompt begins another"
        raise BadMessage(f"{message}; choose one", "continue_final_message")
    developer = "developer" in template.source
    sees = bool(token), bool(video)
    plain = [_message(one, f"messages[{i}]", developer, *sees) for i, one in enumerate(messages)]
    plain, tools, options = (image_places.in_words(one, token, video) for one in (plain, tools, options))
    form = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
    parts = [part for one in plain if has_media(one) for part in one["content"]]
    wanted = {"images": (token, sum(map(is_image, parts))), "videos": (video, sum(map(is_video, parts)))}
    wrong = None
    for shape in image_places.forms(template, plain, token, video) if token else [plain]:
        for one in past_calls.forms(past_calls.named(shape, template.source)):
            try:
                text = template.render(one, tools or None, **form, **options)
            except ShardlmError as error:
                wrong = wrong or error  # of the usual form, about which the others say less
                continue
            off = [(kind, *one) for kind, one in wanted.items() if one[0] and text.count(one[0]) != one[1]]
            if not off:
                return text
            wrong = wrong or _wrong_places(template, text, *off[0])
    raise wrong


def _wrong_places(template: ChatTemplate, text: str, kind: str, token: str, count: int) -> BadMessage:
    places = text.count(token)
    message = f"{template.where} writes places for {places} {kind} ({token}), and the messages have {count}"
    return BadMessage(f"{message}; send {kind} as parts of what the user says", "messages")


def _message(message: Message, param: str, developer: bool, sees: bool, watches: bool) -> dict[str, Any]:
    role = message.get("role") if isinstance(message, Mapping) else None
    if not isinstance(role, str) or not role:
        raise BadMessage(f"{param}.role={role!r} must be a text, such as user", f"{param}.role")
    if role == "developer" and not developer:
        role = "system"  # its older name, which templates know
    role = "tool" if role == "function" else role  # calls of before there were several in a message, and their results
    known = {**message, "role": role, "content": message.get("content")}
    known["content"] = content_of(known["content"], f"{param}.content", sees, watches)
    older = known.pop("function_call", None)
    if calls := message.get("tool_calls") or (older and [{"type": "function", "function": older}]):
        known["tool_calls"] = _calls(calls, f"{param}.tool_calls")
    elif known["content"] is None:
        known["content"] = ""  # as of a reply that was all thought: clients send it back, and templates want a text
    return known


def _calls(calls: Any, param: str) -> list[dict[str, Any]]:
    """Calls that the model made earlier. Clients send their arguments as text, templates write them from an object."""
    try:
        found = []
        for call in calls:
            function = dict(call["function"])
            if not isinstance(function["name"], str):
                raise TypeError(f"name={function['name']!r:.100}")
            function["arguments"] = read_arguments(function.get("arguments") or {})
            found.append({**call, "function": function})
        return found
    except (TypeError, KeyError, ValueError) as error:
        message = f"{param} must be a list of calls, each with a function of name and arguments in JSON: {error!r}"
        raise BadMessage(message, param) from None


def read_arguments(given: Any) -> Any:
    """Of a call, from their text. A text that is no JSON stays: the model may have written it so or been cut off, and
    who sends the conversation back can do nothing about that."""
    try:
        return json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        return given
