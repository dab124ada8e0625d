"""tekken.json, Mistral's form since NeMo (https://github.com/mistralai/mistral-common, tokens/tokenizers/tekken.py):
ranks of tiktoken, the expression that cuts words, and the special tokens, whose ids come before those of the ranks."""

import base64
import dataclasses
import json
import pathlib
from typing import Any

from shardlm.errors import ShardlmError
from shardlm.tokenizer_files import splits
from shardlm.tokenizer_files.pieces import merges
from shardlm.tokenizer_files.ranks import byte_characters
from shardlm.tokenizer_files.told import Added, Told, begun_and_ended, bpe, json_of, placed

FILE = "tekken.json"
# Of the first files, which do not name them.
UNNAMED = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)


@dataclasses.dataclass(frozen=True)
class Tekken:
    """pattern  cuts words
    special  names of tokens by id, from 0 on
    ranks    the other tokens in bytes, in the order of their ids, which follow
    """

    pattern: str
    special: tuple[str, ...]
    ranks: tuple[bytes, ...]

    @classmethod
    def of(cls, content: Any) -> "Tekken":
        """Raises KeyError, TypeError or ValueError for what is no such file."""
        config = content["config"]
        named = content.get("special_tokens") or [{"rank": i, "token_str": name} for i, name in enumerate(UNNAMED)]
        names = {token["rank"]: token["token_str"] for token in named}
        count = config.get("default_num_special_tokens") or len(names)
        special = tuple(names.get(id, f"<SPECIAL_{id}>") for id in range(count))
        size = config.get("default_vocab_size") or count + len(content["vocab"])
        tokens = content["vocab"][: size - count]  # those behind are not used
        if [token["rank"] for token in tokens] != list(range(len(tokens))) or max(names) >= count:
            raise ValueError("ranks leave gaps")
        return cls(config["pattern"], special, tuple(base64.b64decode(token["token_bytes"]) for token in tokens))


def read(folder: pathlib.Path, told: Told) -> str:
    """Its tokenizer.json. Raises ShardlmError for a damaged file."""
    file = folder / FILE
    try:
        made = Tekken.of(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ShardlmError(f"{file} is no tokenizer of Mistral's ({error}); download it again") from None
    spelt = byte_characters()
    names = ["".join(spelt[byte] for byte in token) for token in made.ranks]
    vocab = {name: id for id, name in enumerate(names, len(made.special))}
    pairs = merges({name: (id,) for name, id in vocab.items()})
    there = {token.content for token in told.added}
    own = tuple(Added(name, id) for id, name in enumerate(made.special) if name not in there)
    whole = dataclasses.replace(told, added=(*told.added, *own))
    vocab, entries = placed(whole, vocab | {name: id for id, name in enumerate(made.special)})
    return json_of(
        bpe(vocab, pairs, ignore_merges=True),
        entries,
        normalizer=None,
        pre_tokenizer=splits.in_bytes(made.pattern),
        post_processor=begun_and_ended(whole, entries, True, bos_token="<s>", eos_token="</s>"),
        decoder=splits.DECODER,
    )
