"""Which pairs a tokenizer merges, the first ones first: as a file lists them, or for SentencePiece's, which has a score
for each token instead, all pairs that make a token, by its score."""

from collections.abc import Sequence

from shardlm.errors import ShardlmError

Pair = tuple[str, str]


def listed(lines: Sequence[str], tokens: dict[str, int]) -> list[Pair]:
    """Of tokenizer.ggml.merges, "left right" each. Raises ShardlmError for pairs that make no token."""
    pairs = []
    for line in lines:
        at = line.find(" ", 1)  # the first character may be a space itself
        pairs.append((line[:at], line[at + 1 :]) if at > 0 else (line, ""))
    bad = next((p for p in pairs if not (p[0] in tokens and p[1] in tokens and p[0] + p[1] in tokens)), None)
    if bad is not None:
        raise ShardlmError(
            f"the file merges {bad[0]!r} and {bad[1]!r} (tokenizer.ggml.merges), and not both of them and what they "
            "make are tokens of it; download it again, or open the model's Hugging Face folder"
        )
    return list(dict.fromkeys(pairs))


def scored(scores: dict[str, float]) -> list[Pair]:
    """By the scores of tokens that text is made of, the highest first, and of equal ones that of the lower id. Of pairs
    that make the same token, the one with the longer left part comes first. Raises ShardlmError where all scores are
    one, as old conversions wrote them."""
    pairs = []
    for name in sorted((name for name in scores if len(name) > 1), key=lambda name: -scores[name]):
        for cut in range(len(name) - 1, 0, -1):
            left, right = name[:cut], name[cut:]
            if left in scores and right in scores:
                pairs.append((left, right))
    made = {left + right for left, right in pairs}
    if len(made) > 1 and len({scores[name] for name in made}) == 1:
        raise ShardlmError(
            f"all tokens of the file have the score {scores[made.pop()]:g} (tokenizer.ggml.scores), which leaves open "
            "what is merged first; use a newer conversion of the model, or open its Hugging Face folder"
        )
    return pairs
