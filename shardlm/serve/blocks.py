"""Prompts of which some tokens see others after them (Request.blocks: those of an image, or all), which are read at
once. No jax."""

from collections.abc import Sequence

from shardlm.errors import ShardlmError
from shardlm.serve.request import Request
from shardlm.serve.scheduler_config import SchedulerConfig


def whole_blocks(request: Request, count: int, room: int) -> int:
    """How many of `count` tokens a prompt's next chunk has where none may end among those that see each other
    (Request.blocks): up to the last of them, where there is `room` for that, else up to the first."""
    end = request.computed + count
    for first, last in request.blocks:
        if first < end <= last:
            rest = last + 1 - request.computed
            return rest if rest <= room else max(0, first - request.computed)
    return count


def check_blocks(request: Request, config: SchedulerConfig, windows: Sequence[int]) -> None:
    """Raises ShardlmError for a prompt whose tokens see each other where they are more than are read at once, or, where
    all of them do, than a layer's window of `windows` (0: none)."""
    longest = max((last + 1 - first for first, last in request.blocks), default=0)
    room, window = config.room(config.max_rows), min(filter(None, windows), default=0)
    if longest > room:
        raise ShardlmError(
            f"the prompt has {longest} tokens that see each other and are read at once, and max_num_batched_tokens="
            f"{config.max_batch_tokens} beside max_num_seqs={config.max_rows} has room for {room}; raise the first by "
            f"{longest - room}, or send less"
        )
    if longest == request.prompt_len and longest > window > 0:
        raise ShardlmError(
            f"the prompt has {longest} tokens, which all see each other in this model, and layers with a window of "
            f"{window}; send less"
        )
