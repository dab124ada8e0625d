"""How many pages a pool has."""

import numpy as np

from shardlm.layers.page_layout import PageLayout
from shardlm.serve.engine_config import EngineConfig
from shardlm.serve.pool_size import all_pages, scheduler_of, sized
from shardlm.serve.request import Request
from shardlm.serve.sampling_params import SamplingParams


def test_where_all_requests_fit_all_run_at_once():
    """Large pages, of which each request has three in the end, and those that run leave one free for each."""
    config = EngineConfig(max_num_seqs=32, max_num_batched_tokens=512, block_size=64)
    sizes, *_ = sized([PageLayout.whole(4, 1)], [2**16], None, 192, config, 1)
    assert sizes.layout.num_pages == 1 + 32 * (3 + 1)
    scheduler = scheduler_of(sizes, config)
    for i in range(32):
        prompt = [1 + (i * 128 + k) % 8000 for k in range(128)]
        scheduler.add(Request(i, prompt, SamplingParams(max_tokens=64, ignore_eos=True), eos_ids=[0]))
    for _ in range(8):  # of four prompts each
        batch = scheduler.schedule()
        scheduler.land(batch, np.full((len(batch.rows), batch.steps), 7))
    assert scheduler.num_running == 32 and scheduler.preemptions == 0


def test_more_memory_than_all_requests_can_use_is_known():
    """The server says so: before, --kv_cache_gib=8 and 800 made the same pages, and nothing told."""
    for pages, all_of_them in ((1 + 32 * 4 - 1, False), (1 + 32 * 4, True), (10**4, True)):
        config = EngineConfig(max_num_seqs=32, max_num_batched_tokens=512, block_size=64, kv_cache_bytes=pages * 2**16)
        sizes, *_ = sized([PageLayout.whole(4, 1)], [2**16], None, 192, config, 1)
        assert sizes.layout.num_pages == min(pages, 129) and all_pages(sizes, config) == all_of_them
