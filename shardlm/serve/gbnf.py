"""Grammars as llama.cpp, xgrammar and vLLM's users write them (GBNF, `root ::= "yes" | "no"`:
https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md), in the Lark that llguidance compiles. The
conversion is llguidance's; this file owns how such a text is told from Lark, what its reader does not take, and the
bounds of what a client may have converted. No jax."""

import re

from llguidance.gbnf_to_lark import gbnf_to_lark

# All rules are walked once for each that rests on another, in Python: such a chain of 13,000 characters takes a second.
MAX_RULES, MAX_CHARS = 512, 16_384
_RULE = re.compile(r"(?m)^\s*[\w-]+\s*::=")
_LARK = re.compile(r"(?m)^\s*(%llguidance\b|start\s*:(?!:=))")
_LITERAL_OR_COMMENT = re.compile(r'("(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\])|#[^\n]*')


def is_gbnf(source: str) -> bool:
    """Whether a grammar is no Lark."""
    return bool(_RULE.search(source)) and not _LARK.search(source)


def lark_from_gbnf(source: str) -> str:
    """The same language. Raises ValueError for what is malformed, refers to no rule, or is above the bounds."""
    rules = len(_RULE.findall(source))
    if rules > MAX_RULES or len(source) > MAX_CHARS:
        raise ValueError(
            f"{rules} rules and {len(source)} characters of GBNF; at most {MAX_RULES} rules and {MAX_CHARS} characters "
            "are possible; write it in Lark"
        )
    bare = _LITERAL_OR_COMMENT.sub(lambda found: found[1] or "", source)
    one_line = re.sub(r"\s*\n\s*\|", " |", bare)  # xgrammar lets alternatives begin a line, the converter does not
    try:
        return gbnf_to_lark(one_line)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except Exception as error:  # of the converter's own kinds, most of them plain
        raise ValueError(str(error)) from None
