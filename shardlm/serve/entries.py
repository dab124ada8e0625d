"""What serving models takes whose layers keep entries of several tokens in pages (ops/compressed_pages.py)."""

import dataclasses
import logging

from shardlm.errors import ShardlmError
from shardlm.layers.page_layout import page_size_for, usual_page_size
from shardlm.models.transformer_config import TransformerConfig
from shardlm.serve.engine_config import EngineConfig

log = logging.getLogger(__name__)


def paged(config: EngineConfig, platform: str) -> EngineConfig:
    """The options with a size of pages, which is the platform's where they say none."""
    return dataclasses.replace(config, block_size=config.block_size or usual_page_size(platform))


def fitted(config: EngineConfig, shape: TransformerConfig) -> EngineConfig:
    """The options, which say how large pages are (`paged`), with pages so large that those of entries end where windows
    of all layers do, which the log says. Raises ShardlmError for a cache in 8 bits: what compressors read of a token is
    kept beside keys, and has no scale.
    """
    if not shape.compressed:
        return config
    if config.kv_cache_dtype in ("fp8", "int8"):
        raise ShardlmError(
            f"kv_cache_dtype={config.kv_cache_dtype}: layers of the model keep in pages what entries of several tokens "
            "are made of, which is not held in 8 bits; choose auto or bfloat16"
        )
    size = page_size_for(shape.rows, config.block_size)
    if size != config.block_size:
        log.info("block_size=%d, for %d: a page of entries ends with a window", size, config.block_size)
    return dataclasses.replace(config, block_size=size)
