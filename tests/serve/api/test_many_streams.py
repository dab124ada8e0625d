"""200 streams at once of a real engine, of which half break off anywhere: those that stay say what they would have said
alone, and no page is held afterwards."""

import asyncio
import json
import pathlib
import random
import sys

import pytest
from sockets import serving, until

from shardlm.mesh import MeshSpec
from shardlm.serve.async_llm import AsyncLLM
from shardlm.serve.sampling_params import SamplingParams

sys.path.append(str(pathlib.Path(__file__).parents[1]))
from engines import finished, random_engine

STREAMS, NEW = 200, 12
PROMPTS = [[1 + i % 7] * (3 + i % 5) + [i % 90, i // 90] for i in range(STREAMS)]


async def streamed(port: int, prompt: list[int], events: int | None) -> list[int]:
    """Tokens of a stream, which is left after so many events; None: read to its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    wanted = {"temperature": 0, "max_tokens": NEW, "ignore_eos": True, "return_token_ids": True}
    body = json.dumps({"model": "m", "prompt": prompt, "stream": True, **wanted}).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    tokens: list[int] = []
    try:
        while events is None or events > 0:
            line = await asyncio.wait_for(reader.readline(), 120)
            assert line, "the server closed the stream"
            if line.startswith(b"data: [DONE]"):
                return tokens
            if line.startswith(b"data: "):
                event = json.loads(line[6:])
                assert "error" not in event, event
                tokens += [id for choice in event["choices"] for id in choice.get("token_ids") or ()]
                events = None if events is None else events - 1
        return tokens
    finally:
        writer.close()


@pytest.mark.wide
def test_many_streams_of_which_half_break_off():
    engine = random_engine(MeshSpec(), rows=8, tokens=48, pages=60)[0]
    for i, prompt in enumerate(PROMPTS):
        engine.add(str(i), prompt, SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True))
    alone = {int(id): list(output.outputs[0].token_ids) for id, output in finished(engine).items()}
    rng = random.Random(0)
    stays = [rng.random() < 0.5 for _ in PROMPTS]
    ends = [None if stay else rng.randrange(NEW) for stay in stays]

    async def all_of(port: int) -> list[list[int]]:
        return await asyncio.gather(*(streamed(port, *ask) for ask in zip(PROMPTS, ends, strict=True)))

    llm = AsyncLLM(engine, model_name="m", template=None)
    try:
        with serving(llm, max_queue=STREAMS) as (_, address):
            said = asyncio.run(all_of(int(address.rsplit(":", 1)[1])))
            until(lambda: not engine.has_unfinished)
    finally:
        llm.shutdown()
    for i, (stay, tokens) in enumerate(zip(stays, said, strict=True)):
        assert tokens == (alone[i] if stay else alone[i][: len(tokens)])
    assert 60 < sum(stays) < 140
    pages = engine.scheduler.pages
    pages.check_invariants()
    assert pages.num_used == 0 and engine.scheduler.num_running == engine.scheduler.num_waiting == 0
