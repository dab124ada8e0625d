"""How chunks that begin at position 0 attend: over the pages that their keys and values are written to, as any chunk,
or to the keys and values at hand, by cuDNN's flash attention."""

import logging
from typing import Literal

from shardlm.state import ModelDef, cache_entries

log = logging.getLogger(__name__)

Wanted = Literal["auto", "pages"]


def choose(wanted: Wanted, model: ModelDef, deterministic: bool) -> str:
    """As `chosen`. Says in the log which, and why."""
    implementation, why = chosen(wanted, model, deterministic)
    if implementation == "pages":
        log.info("prompts attend over pages: %s", why)
    else:
        log.info("chunks of many tokens that begin at position 0 attend by cuDNN: %s", why)
    return implementation


def chosen(wanted: Wanted, model: ModelDef, deterministic: bool) -> tuple[str, str]:
    """(the implementation (ops/attention.py) for chunks that nothing stands before, why): "pages", or "cudnn" where
    that reads what pages hold."""
    execution = model.execution
    latent = "v" not in cache_entries(model)
    reasons = {
        "prefill_attention=pages": wanted == "pages",
        "the deterministic mode has one program for all tokens": deterministic,
        "layers read others' keys and values": model.config.reads,
        "queries attend to chosen tokens": model.config.sparse,
        "latents are wider than cuDNN's heads": latent,
        f"attention is {execution.attention} (platform, dtype, head size, soft caps)": (execution.attention != "cudnn"),
        f"pages hold {execution.kv_cache}: a prompt that is cached and one that is not would differ by its rounding": (
            execution.kv_cache in ("fp8", "int8")
        ),
    }
    why = [reason for reason, holds in reasons.items() if holds]
    return ("pages", why[0]) if why else ("cudnn", "a GPU, and pages hold what is computed")
