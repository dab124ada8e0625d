"""What serving models takes some of whose layers look up n-grams (layers/ngrams.py): what those see of a text's last
tokens lies in slots, and goes forward only."""

from shardlm.errors import ShardlmError
from shardlm.models.transformer import TransformerConfig
from shardlm.serve.engine_config import EngineConfig


def refuse(config: EngineConfig, shape: TransformerConfig) -> None:
    """Raises ShardlmError, before weights are read, for what would read tokens that may turn out wrong, or several of
    one text in rows of their own."""
    if not shape.ngrams:
        return
    layers = f"{len(shape.ngrams)} layers of the model look up n-grams, and keep what they see of a text's last tokens"
    if config.speculative_config:
        raise ShardlmError(f"speculative_config: {layers}, which drafts that are not taken would change; leave it out")
    if config.deterministic:
        raise ShardlmError(
            f"deterministic=True: {layers} for rows that follow each other in a text, of which that mode has several "
            "in one step; set deterministic to False"
        )
