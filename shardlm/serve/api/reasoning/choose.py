"""Which of a model's replies are thought: the parsers by vLLM's names, which of them a checkpoint asks for, and what a
prompt and a wish for the reply's form mean to them."""

import dataclasses
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from shardlm.chat import ChatTemplate
from shardlm.errors import ShardlmError
from shardlm.serve.api.reasoning import harmony
from shardlm.serve.api.reasoning.harmony import HarmonyThoughts
from shardlm.serve.api.reasoning.marks import MarkedThoughts, Thought
from shardlm.serve.api.tools.reader import CallDelta
from shardlm.serve.sampling_params import SamplingParams, StructuredOutputs
from shardlm.serve.thoughts import Thoughts, after_last
from shardlm.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class Splitter(Protocol):
    """Reads one reply. thinking: as MarkedThoughts'. over: no thought follows. calls: how many it found."""

    thinking: bool | None
    over: bool
    calls: int

    def push(self, text: str) -> list[str | Thought | CallDelta]: ...

    def finish(self) -> list[str | Thought | CallDelta]: ...


@dataclasses.dataclass(frozen=True)
class Style:
    """begins, ends: spellings of the marks. common: how all of them begin, and end, where there are several. assumed: a
    reply thinks from its first text, also where neither prompt nor reply has the first mark."""

    begins: tuple[str, ...] = ("<think>",)
    ends: tuple[str, ...] = ("</think>",)
    common: tuple[str, str] = ("", "")
    assumed: bool = False


_GRANITE = (
    ("Here is my thought process:", "Here's my thought process:"),
    ("Here is my response:", "Here's my response:"),
)
HARMONY = Style((harmony.CHANNEL,), (harmony.MESSAGE,))
STYLES: Mapping[str, Style] = {
    "deepseek_r1": Style(assumed=True),
    "deepseek_v3": Style(),
    "glm45": Style(),
    "granite": Style(*_GRANITE, ("Here", " my response:")),
    "mistral": Style(("[THINK]",), ("[/THINK]",)),
    "olmo3": Style(),
    "openai_gptoss": HARMONY,
    "qwen3": Style(),
}
NAMES = ("auto", "none", *STYLES)
_FOUND = ("openai_gptoss", "mistral", "granite", "qwen3")  # by a template, in this order


@dataclasses.dataclass(frozen=True)
class Thinking:
    """Of the replies to one prompt. splitter: makes one for each. free: fields of StructuredOutputs that say where
    thoughts end. thoughts: what a budget of them must know; None: there are none."""

    splitter: Callable[[], Splitter]
    free: Mapping[str, Any]
    thoughts: Thoughts | None = None

    def hold(self, wish: StructuredOutputs | None) -> StructuredOutputs | None:
        """What the answer is to be, with thoughts before it."""
        return wish and dataclasses.replace(wish, **self.free)


@dataclasses.dataclass(frozen=True)
class Reasoning:
    """How a model marks its thoughts. special: the marks are special tokens, which texts leave out unless told."""

    style: Style
    special: bool

    @property
    def ends_by_mark(self) -> bool:
        """Whether one mark ends the thoughts, which bounds them where it is written earlier."""
        return self.style is not HARMONY

    def of(self, prompt: str, begun: str | None, names: Collection[str]) -> Thinking:
        """`begun`: the message that the reply goes on with, if it does. `names`: functions that may be called."""
        if self.style is HARMONY:
            head = prompt[prompt.rfind(harmony.START) + len(harmony.START) :] if harmony.START in prompt else ""
            inside = HarmonyThoughts((), head).thinking
            return Thinking(lambda: HarmonyThoughts(names, head), {"after": harmony.FINAL} if inside else {})
        thinking = self._at_the_end(prompt, begun)
        begins, ends = self.style.begins, self.style.ends
        free: dict[str, Any] = {} if thinking is False else {"after": self.style.common[1] or ends[0]}
        if thinking is None:
            free["opening"] = self.style.common[0] or begins[0]
        thoughts = None if thinking is False else self._thoughts(self._begun(prompt, begun) if thinking else None)
        return Thinking(lambda: MarkedThoughts(begins, ends, thinking), free, thoughts)

    def of_text(self, prompt: str) -> Thoughts:
        """Of what goes on from any text, which is thought where its last mark begins thoughts (so does vLLM)."""
        said, ended = (after_last(prompt, marks) for marks in (self.style.begins, self.style.ends))
        inside = said is not None and (ended is None or len(said) < len(ended))
        return self._thoughts(said if inside else None)

    def _thoughts(self, said: str | None) -> Thoughts:
        style = self.style
        return Thoughts(style.ends[0], style.common[1] or style.ends[0], style.begins, said)

    def _begun(self, prompt: str, begun: str | None) -> str:
        """What the prompt of a reply that begins with thought has of it."""
        own = after_last(begun, self.style.begins) if begun else None
        if own is None and prompt.rstrip().removesuffix((begun or "").strip()).rstrip().endswith(self.style.begins):
            own = after_last(prompt, self.style.begins)
        return own or ""

    def _at_the_end(self, prompt: str, begun: str | None) -> bool | None:
        """Whether a reply to this prompt begins with thought; None: it will show that."""
        begins, ends = self.style.begins, self.style.ends
        if begun is not None:
            first, last = (max(begun.rfind(mark) for mark in marks) for marks in (begins, ends))
            if first >= 0 or last >= 0:
                return first > last
            return prompt.rstrip().removesuffix(begun.strip()).rstrip().endswith(begins)
        if prompt.rstrip().endswith(begins):
            return True
        if prompt.rstrip().endswith(ends):  # as templates do where thinking is turned off
            return False
        return True if self.style.assumed else None


def bounded(
    reasoning: Reasoning | None, params: SamplingParams, thoughts: Callable[[Reasoning], Thoughts | None]
) -> SamplingParams:
    """With what thinking_token_budget needs, where that is asked for: `thoughts` of the prompt's replies. Raises
    ShardlmError where no parser says how thoughts are marked, or one that has no mark for their end."""
    budget = params.thinking_token_budget
    if budget is None:
        return params
    if reasoning is None:
        raise ShardlmError(
            f"thinking_token_budget={budget} needs to know how the model marks its thoughts, and no reasoning parser "
            "is chosen; start with --reasoning_parser, or LLM(reasoning_parser=...)"
        )
    if not reasoning.ends_by_mark:
        raise ShardlmError(
            f"thinking_token_budget={budget} is not possible with reasoning_parser=openai_gptoss, whose thoughts are "
            "messages that no one mark ends; ask for a lower reasoning_effort"
        )
    found = thoughts(reasoning)
    return dataclasses.replace(params, thoughts=found, thinking_token_budget=budget if found else None)


def choose(asked: str, template: ChatTemplate | None, tokenizer: Tokenizer) -> Reasoning | None:
    """The parser of that name; auto: of a checkpoint whose chat template has the marks of one. Raises ShardlmError for
    a name that is none."""
    if asked not in NAMES:
        raise ShardlmError(f"reasoning_parser={asked!r} must be one of {', '.join(NAMES)}")
    source = template.source if template else ""
    if asked == "auto":
        asked = next((name for name in _FOUND if all(map(source.__contains__, _marks(STYLES[name])))), "none")
        if asked != "none":
            log.info("reasoning_parser=%s, as the chat template has its marks; none leaves replies as they are", asked)
    if asked == "none":
        return None
    style = STYLES[asked]
    return Reasoning(style, any(map(tokenizer.is_special, _marks(style))))


def _marks(style: Style) -> tuple[str, str]:
    return style.begins[0], style.ends[0]
