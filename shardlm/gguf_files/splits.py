"""How tokenizers of bytes cut a text into words, inside which pairs are merged, by the name that a file has under
tokenizer.ggml.pre (those of llama.cpp's src/llama-vocab.cpp). Expressions are those of the tokenizer.json that a name
was given for, and so are characters composed first (NFC): llama.cpp leaves texts as they are, and only comes near
expressions that tell capitals from small letters beyond A to Z."""

import dataclasses

from shardlm.errors import ShardlmError
from shardlm.tokenizer_files.splits import MARKS_IN_WORDS, QWEN, SPLIT

KEY = "tokenizer.ggml.pre"
# What llama.cpp takes for a file without a name, as they were before May 2024.
UNNAMED = "default"


@dataclasses.dataclass(frozen=True)
class Pre:
    """cuts           expressions, each of which cuts what the ones before left: what it finds, and what is between
    nfc            characters are composed first
    whole_words    a word that is a token is that token, whatever its merges (`ignore_merges`)
    begins         texts begin with the token for that unless the file says otherwise
    """

    cuts: tuple[str, ...]
    nfc: bool = False
    whole_words: bool = False
    begins: bool = False


def pre(name: str) -> Pre:
    """Raises ShardlmError for a name that is not known: with other cuts come ids that the model was not trained on."""
    if name not in _KNOWN:
        raise ShardlmError(
            f"the file's tokenizer cuts words as {KEY} = {name!r}, which is not supported; supported are "
            f"{', '.join(sorted(_KNOWN))}. Open the model's Hugging Face folder, which has its tokenizer.json"
        )
    return _KNOWN[name]


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _by_case(suffix: str, digits: str) -> str:
    """Of o200k: a word ends where capitals begin."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    return f"{lead}{_UPPER}*{_LOWER}+{suffix}|{lead}{_UPPER}+{_LOWER}*{suffix}|{digits}|{_TAIL}"


_O200K = _by_case(f"{_SUFFIX}?", r"\p{N}{1,3}")
_TEKKEN = _by_case("", _DIGIT)
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_SEED = _SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
# DeepSeek's: letters of scripts that have capitals, as Unicode 11 knew them.
_CASED = (
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_CJK = "[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK = ("[\r\n]", rf"\s?[{_CASED}]+", "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", r"\s+$", _CJK, r"\p{N}+")
_DEEPSEEK_CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, _DIGIT)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")

_FAMILIES = {
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2": Pre((SPLIT,), whole_words=True, begins=True),
    "dbrx smaug-bpe glm4 chatglm-bpe": Pre((SPLIT,)),
    "minicpm5": Pre((r"\p{N}{1,3}", SPLIT.replace("{1,3}", "+")), whole_words=True),
    "qwen2": Pre((QWEN,), nfc=True),
    "deepseek-r1-qwen megrez stablelm2 hunyuan solar-open grok-2 kormo": Pre((QWEN,)),
    "qwen35": Pre((MARKS_IN_WORDS,), nfc=True),
    "gpt-2 phi-2 jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum": Pre((_GPT2,)),
    "olmo mpt": Pre((_GPT2,), nfc=True),
    "command-r": Pre((_DIGIT, _GPT2), nfc=True),
    "starcoder refact smollm codeshell exaone minerva-7b mellum2": Pre((_DIGIT, _GPT2)),
    "falcon": Pre(_FALCON),
    "deepseek-llm": Pre(_DEEPSEEK),
    "deepseek-coder": Pre(_DEEPSEEK_CODER),
    "deepseek-v3 hunyuan-dense joyai-llm": Pre(_DEEPSEEK_V3),
    "gpt-4o llama4 kanana2 minimax-m2": Pre((_O200K,)),
    "tekken": Pre((_TEKKEN,), whole_words=True, begins=True),
    "bailingmoe bailingmoe2 llada-moe": Pre((_BAILING,)),
    "seed-coder": Pre((_SEED,)),
    UNNAMED: Pre(_DEFAULT),
}
_KNOWN = {name: found for names, found in _FAMILIES.items() for name in names.split()}
