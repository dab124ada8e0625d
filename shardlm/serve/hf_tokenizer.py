"""A model's tokenizer with the names, defaults and results of Hugging Face's, for programs that were written for those.
Texts and ids are tokenizer.py's, conversations are rendered by chat.py. No jax."""

import functools
import numbers
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from shardlm.chat import ChatTemplate, special_tokens
from shardlm.errors import ShardlmError
from shardlm.tokenizer import Tokenizer

Conversation = Sequence[Mapping[str, Any]]
Ids = Sequence[int]
_OF_IDS = (  # options of apply_chat_template that are not the template's
    *("padding", "truncation", "max_length", "return_tensors"),
    *("return_assistant_tokens_mask", "sanitize_control_tokens", "tokenizer_kwargs"),
)


class Encoding(dict):
    """What a call gives: input_ids and attention_mask, of one text or of many; by key or as attributes."""

    __getattr__ = dict.__getitem__

    @classmethod
    def of(cls, ids: list[int] | list[list[int]], many: bool) -> "Encoding":
        return cls(input_ids=ids, attention_mask=[[1] * len(one) for one in ids] if many else [1] * len(ids))


class HfTokenizer:
    """As transformers' PreTrainedTokenizerBase: `encode` adds what stands at a text's ends, `decode` keeps special
    tokens. Attributes: name_or_path, eos_token and eos_token_id and so on for bos, pad, unk; None where the model has
    no such token."""

    is_fast = True

    def __init__(self, tokenizer: Tokenizer, folder: str | os.PathLike):
        self._own, self.name_or_path = tokenizer, str(folder)
        self._special = special_tokens(pathlib.Path(folder))

    def __getattr__(self, name: str) -> Any:
        kind = name.removesuffix("_id")
        if not name.startswith("_") and kind in ("eos_token", "bos_token", "pad_token", "unk_token"):
            token = self._special.get(kind)
            return token if kind == name else self._named_id(kind, token)
        raise AttributeError(
            f"the tokenizer of LLM has no {name}; transformers.AutoTokenizer.from_pretrained({self.name_or_path!r}) may"
        )

    def _named_id(self, kind: str, token: str | None) -> int | None:
        if token is None:  # as tokenizer.json has it, where nothing else names it
            return self._own.end_of_document_id if kind == "eos_token" else None
        return self.get_vocab().get(token)

    # Texts.

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True, **others: Any) -> Encoding:
        _refuse("__call__", others)
        many = not isinstance(text, str)
        ids = [self.encode(one, add_special_tokens) for one in (text if many else [text])]
        return Encoding.of(ids if many else ids[0], many)

    def encode(self, text: str, add_special_tokens: bool = True, **others: Any) -> list[int]:
        _refuse("encode", others)
        return self._own.encode_prompt(text) if add_special_tokens else self._own.encode(text)

    def decode(self, token_ids: int | Ids | Sequence[Ids], skip_special_tokens: bool = False, **others: Any) -> Any:
        """The text of ids, or of each of several."""
        _refuse("decode", others)
        ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
        ids = [ids] if isinstance(ids, numbers.Integral) else ids
        if len(ids) and not isinstance(ids[0], numbers.Integral):
            return self.batch_decode(ids, skip_special_tokens)
        return self._own.decode(ids, skip_special=skip_special_tokens)

    def batch_decode(self, sequences: Sequence[Ids], skip_special_tokens: bool = False, **others: Any) -> list[str]:
        _refuse("batch_decode", others)
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def tokenize(self, text: str, **others: Any) -> list[str]:
        """The names of its tokens."""
        _refuse("tokenize", others)
        return self.convert_ids_to_tokens(self.encode(text, add_special_tokens=False))

    # Tokens.

    def get_vocab(self) -> dict[str, int]:
        return dict(self._own.vocabulary)

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """None, or the unknown token's, where there is no such token."""
        unknown = self.unk_token_id
        if isinstance(tokens, str):
            return self._own.vocabulary.get(tokens, unknown)
        return [self._own.vocabulary.get(token, unknown) for token in tokens]

    def convert_ids_to_tokens(self, ids: int | Ids) -> Any:
        """None where there is no such id."""
        if isinstance(ids, numbers.Integral):
            return self._names.get(int(ids))
        return [self._names.get(int(id)) for id in ids]

    @functools.cached_property
    def _names(self) -> dict[int, str]:
        return {id: name for name, id in self._own.vocabulary.items()}

    def __len__(self) -> int:
        return len(self._own.vocabulary)

    @property
    def vocab_size(self) -> int:
        """Without added tokens, as transformers counts."""
        return self._own.plain_vocab_size

    @property
    def special_tokens_map(self) -> dict[str, str]:
        return dict(self._special)

    @property
    def all_special_tokens(self) -> list[str]:
        return list(dict.fromkeys(self._special.values()))

    @property
    def all_special_ids(self) -> list[int]:
        return self.convert_tokens_to_ids(self.all_special_tokens)

    # Conversations.

    @property
    def chat_template(self) -> str | None:
        """The template's text; None without one."""
        try:
            return ChatTemplate.load(self.name_or_path).source
        except ShardlmError:
            return None

    def apply_chat_template(
        self,
        conversation: Conversation | Sequence[Conversation],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, str]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        **options: Any,
    ) -> Any:
        """The text of a conversation, or of each of several, by the model's template or the text of another; with
        `tokenize` as token ids, in an Encoding unless `return_dict` is False. `options` go to the template. Raises
        ShardlmError for what the template refuses, and without one."""
        _refuse("apply_chat_template", {name: options.pop(name, None) for name in _OF_IDS})
        if documents is not None:
            options["documents"] = documents
        own = ChatTemplate.load(self.name_or_path)
        if chat_template is not None:
            own = ChatTemplate(chat_template, own.special)
        form = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        many = not isinstance(conversation[0], Mapping) if len(conversation) else False
        chats = conversation if many else [conversation]
        texts = [own.render(chat, tools, **form, **options) for chat in chats]
        if not tokenize:
            return texts if many else texts[0]
        ids = [self.encode(text, add_special_tokens=False) for text in texts]
        return Encoding.of(ids if many else ids[0], many) if return_dict else (ids if many else ids[0])


def _refuse(call: str, others: Mapping[str, Any]) -> None:
    """What would change a result; what is None or False is as good as left out."""
    for name, value in others.items():
        if value is not None and value is not False:
            raise ShardlmError(
                f"{call} of this tokenizer has no {name} (given: {value!r:.100}): it gives lists of ids, whole and "
                "without padding; make arrays of them yourself, or use transformers.AutoTokenizer"
            )
