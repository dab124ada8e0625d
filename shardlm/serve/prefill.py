"""How chunks of many tokens attend: over the pages that their keys and values are written to, as short ones, or by
cuDNN's flash attention to the keys and values at hand, and in parts to what pages hold before them."""

import dataclasses
import logging
from typing import Literal

from shardlm.state import ModelDef, cache_entries

log = logging.getLogger(__name__)

Wanted = Literal["auto", "whole", "pages"]


@dataclasses.dataclass(frozen=True)
class Prefill:
    """whole: the implementation (ops/attention.py) for chunks that nothing stands before: "pages", or "cudnn" where
    pages hold what that reads. in_parts: whether it is that of the others too (ops/chunk_attention.py)."""

    whole: str
    in_parts: bool


def choose(wanted: Wanted, model: ModelDef, deterministic: bool) -> Prefill:
    """As `chosen`. Says in the log which, and why."""
    found, why = chosen(wanted, model, deterministic)
    if found.whole == "pages":
        log.info("prompts attend over pages: %s", why)
    else:
        which = "" if found.in_parts else " that begin at position 0"
        log.info("chunks of many tokens%s attend by cuDNN: %s", which, why)
    return found


def chosen(wanted: Wanted, model: ModelDef, deterministic: bool) -> tuple[Prefill, str]:
    """(how prompts attend, why)."""
    execution = model.execution
    latent = "v" not in cache_entries(model)
    reasons = {
        "prefill_attention=pages": wanted == "pages",
        "the deterministic mode has one program for all tokens": deterministic,
        "layers read others' keys and values": model.config.reads,
        "queries attend to chosen tokens": model.config.sparse,
        "latents are wider than cuDNN's heads": latent,
        "keys have their positions in them (linear biases), and values are narrower": any(
            getattr(attention, "slopes", ()) for attention in model.config.attentions()
        ),
        f"attention is {execution.attention} (platform, dtype, head size, soft caps)": (execution.attention != "cudnn"),
        f"pages hold {execution.kv_cache}: a prompt that is cached and one that is not would differ by its rounding": (
            execution.kv_cache in ("fp8", "int8")
        ),
    }
    why = [reason for reason, holds in reasons.items() if holds]
    if why:
        return Prefill("pages", False), why[0]
    whole = not execution.rules.act.axes("slots")  # split pages are gathered otherwise (ops/split_pages.py)
    return Prefill("cudnn", wanted == "auto" and whole), "a GPU, and pages hold what is computed"
