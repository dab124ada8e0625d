"""Places of images, as a scheduler gives them."""

import dataclasses

import numpy as np
import pytest
from fake_device import EOS, FakeDevice

from shardlm.serve.page_table import PageTable
from shardlm.serve.request import Request
from shardlm.serve.sampling_params import SamplingParams
from shardlm.serve.scheduler import Scheduler, SchedulerConfig
from shardlm.vision.picture import Picture, Placed


def asked(id: str, *images: str) -> Request:
    """A prompt of images with a token between, each of as many tokens as its name has letters."""
    prompt, placed = [1], []
    for image in images:
        takes = len(prompt) + np.arange(len(image), dtype=np.int32)
        picture = Picture({}, (1, len(image)), image.encode())
        placed.append(Placed(picture, len(prompt), len(prompt) + len(image), takes))
        prompt += [5] * len(image) + [2]
    return Request(id, prompt, SamplingParams(max_tokens=2), (EOS,), pictures=placed)


def served(*requests: Request, places: int, budget: int = 64) -> list[tuple[str, ...]]:
    """Of each batch the images that are read before it; the device looks that tokens find theirs."""
    pages = PageTable(64, 2)
    scheduler = Scheduler(SchedulerConfig(8, 8 + budget, 40, (1,), image_places=places), pages)
    device = FakeDevice(pages, 8)
    for request in requests:
        scheduler.add(request)
    found = []
    while scheduler.has_unfinished:
        while scheduler.num_in_flight < 2 and (batch := scheduler.schedule()):
            found.append(tuple(look.picture.digest.decode() for look in batch.looks))
            device.dispatch(batch, [request.id for request in scheduler._running if request.fresh])
        scheduler.land(*device.run())
        scheduler._holdings.encoder_cache.check_invariants()
    assert not scheduler._holdings.encoder_cache._held
    return found


def test_an_image_is_read_once():
    looks = served(asked("0", "aaa", "aaa"), asked("1", "bb", "aaa"), places=10)
    assert sorted(looks[0]) == ["aaa", "bb"] and not any(looks[1:])


def test_who_reads_in_this_batch_keeps_its_places():
    """The second prompt wants the places of the first, whose last chunk is in the batch that is made."""
    looks = served(asked("0", "aaaaaa"), asked("1", "bbbb", "cc"), places=7)
    assert looks[0] == ("aaaaaa",)
    assert [image for own in looks[1:] for image in own] == ["bbbb", "cc"]


def test_a_batch_that_could_not_be_made(monkeypatch):
    """Its requests read their prompts again, in more chunks now as another is there: their images stay till the end."""
    scheduler = Scheduler(SchedulerConfig(2, 16, 40, (1,), image_places=12), PageTable(64, 2, caching=False))
    first, cache = asked("0", "aaaaaa"), scheduler._holdings.encoder_cache
    scheduler.add(first)
    with monkeypatch.context() as broken:
        broken.setattr(scheduler._holdings, "table", lambda rows: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            scheduler.schedule()
    scheduler.lose()
    scheduler.config = dataclasses.replace(scheduler.config, max_batch_tokens=4)
    batch = scheduler.schedule()
    assert [row.end for row in batch.rows] == [4] and [look.picture.digest for look in batch.looks] == [b"aaaaaa"]
    assert list(cache._held) == ["0"]
    cache.check_invariants()
