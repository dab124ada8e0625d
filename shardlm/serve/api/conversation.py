"""From the messages of a request to the text of a prompt, by the model's chat template."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardlm.chat import ChatTemplate
from shardlm.errors import ShardlmError
from shardlm.serve.api.errors import ApiError
from shardlm.serve.api.service import Service
from shardlm.serve.messages import Message, rendered
from shardlm.serve.prompts import check_length
from shardlm.vision.image_parts import BadMessage, has_media, plain_text

THINKING = ("enable_thinking", "thinking")  # of templates, which know one of these
_LATER = "what is said later"


async def prompt(
    llm, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, *, sees: bool = False, **form: Any
) -> str:
    """The text that the model is given; `form` as of `rendered`. `sees`: with places for its images, where the model
    reads some. Raises ApiError for what is refused."""
    if llm.template is None:
        raise ApiError("this model has no chat template; it continues plain text at /v1/completions", param="messages")
    if not messages:
        raise ApiError("messages is empty; give at least one, such as one from the user", param="messages")
    if llm.images and not sees and any(map(has_media, messages)):
        raise ApiError(
            "messages has images, which are read in chats and embeddings; leave them out here", param="messages"
        )
    form |= marks_of(llm) if sees else {"token": ""}
    try:
        # Long conversations take a while: the event loop stays free for the streams.
        return await asyncio.to_thread(rendered, llm.template, messages, tools, **form)
    except BadMessage as error:
        raise ApiError(str(error), param=error.param) from None
    except ShardlmError as error:
        raise ApiError(str(error), param="messages") from None


def marks_of(llm) -> dict[str, str]:
    """What stands for an image in its prompts, "token", and for a "video"; "": it does not see."""
    return {"token": llm.images.token, "video": llm.images.video_token} if llm.images else {"token": "", "video": ""}


async def tokens(service: Service, text: str, encode: Callable[[str], list[int]], truncates: bool) -> list[int]:
    """Beside the event loop: a long text takes a while. Raises PromptTooLong for one that is far too long."""
    llm = service.llm

    def counted() -> list[int]:
        check_length(text, llm.tokenizer, llm.max_model_len, truncates)
        return encode(text)

    return await service.long_texts.run(len(text) * truncates, counted)


def shows_later_system(template: ChatTemplate | None) -> bool:
    """Whether it shows a message of role system that is not the first; some refuse one, or leave it out."""
    user, system = {"role": "user", "content": "a"}, {"role": "system", "content": _LATER}
    tried = [user, system, user], [user, {"role": "assistant", "content": "b"}, system, user]
    try:
        return template is not None and all(_LATER in template.render(one) for one in tried)
    except ShardlmError:
        return False


def text_of(message: Message) -> str:
    """Of a message that was rendered: its content, in parts or not."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else plain_text(content, "messages")


def form_of(request) -> dict[str, bool]:
    """Whether the text ends where the assistant begins, which is usual, or inside the last message."""
    goes_on = bool(request.continue_final_message)
    begins = not goes_on if request.add_generation_prompt is None else request.add_generation_prompt
    return {"add_generation_prompt": begins, "continue_final_message": goes_on}
