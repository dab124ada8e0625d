"""Programs are started in turn, beside what asks for them (serve/launcher.py): a start that takes as long as the
program, as on GPUs, keeps neither other replicas nor other stages from starting. All of test_meshes.py runs so too."""

import dataclasses
import threading
import time
import types

import pytest
from engines import CONFIG, END, TOKENIZER
from oracle import opened_of

from shardlm.layers.page_layout import PageLayout
from shardlm.mesh import MeshSpec
from shardlm.serve import runner, staged_runner
from shardlm.serve.build import assemble
from shardlm.serve.compiling import compile_all
from shardlm.serve.engine_config import EngineConfig
from shardlm.serve.launcher import Launcher, Part
from shardlm.serve.pool_size import page_bytes
from shardlm.serve.sampling_params import SamplingParams
from shardlm.serve.submeshes import of_replica

SHAPE = dataclasses.replace(CONFIG, num_layers=2).transformer()
WAIT = 60  # seconds after which a start that should not wait is said to
BOTH = pytest.mark.parametrize("threaded", [False, True])


@BOTH
def test_calls_are_in_turn_and_end_with_the_first_error(threaded):
    launcher, called = Launcher(threaded), []
    first = launcher.submit(lambda: called.append(1) or "one")
    wrong = launcher.submit(lambda: 1 // 0)
    behind = launcher.submit(lambda: called.append(2))
    assert first.result() == "one" and Part(first, len).result() == 3
    for later in (wrong, behind, Part(behind, len)):
        with pytest.raises(ZeroDivisionError):
            later.result()
        assert later.done()
    launcher.clear()
    assert launcher.submit(lambda: called.append(3)).result() is None and called == [1, 3]


def test_who_asks_does_not_wait():
    launcher, may_go = Launcher(threaded=True), threading.Event()
    later = launcher.submit(lambda: may_go.wait(WAIT))
    assert not later.done()
    may_go.set()
    assert later.result()
    launcher.clear()


@pytest.fixture
def as_on_gpus(monkeypatch):
    for module in (runner, staged_runner):
        monkeypatch.setattr(module, "launcher_on", lambda platform: Launcher(threaded=True))


def engine_on(spec: MeshSpec):
    opened = opened_of(SHAPE, of_replica(spec))
    layout = PageLayout.whole(2, 16)
    sizes = {"max_num_seqs": spec.pipeline, "max_num_batched_tokens": 8, "block_size": 4, "decode_steps": 2}
    config = EngineConfig(mesh=spec, kv_cache_bytes=16 * page_bytes(opened.model, layout, 4) * spec.data, **sizes)
    return assemble(opened, TOKENIZER, [END], 56, config)


def run(engine) -> dict:
    for n in range(2):
        engine.add(str(n), [5 + n, 7, 9], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    done = {}
    while engine.has_unfinished:
        done |= {output.request_id: output for output in engine.step() if output.finished}
    return {id: output.outputs[0].token_ids for id, output in done.items()}


def wrapped(programs: dict, key, before) -> None:
    inner = programs[key]

    def start(*arguments):
        before()
        return inner(*arguments)

    programs[key] = start


def test_replicas_run_at_once(as_on_gpus):
    """Each one's first decode program begins to end only when the other's has been started."""
    engine = engine_on(MeshSpec(data=2))
    meeting, met = threading.Barrier(2), []
    for one in engine.engines:
        first = iter([True])
        meet = lambda first=first: met.append(meeting.wait(WAIT)) if next(first, False) else None  # noqa: E731
        wrapped(one.runner._programs, ("decode", 1), meet)
    assert all(len(tokens) == 5 for tokens in run(engine).values())
    assert len(met) == 2


def test_stages_run_at_once(as_on_gpus):
    """The last stage is held with the first group of rows until the first stage has been given the second."""
    engine = engine_on(MeshSpec(pipeline=2))
    programs, begun, second = engine.runner._programs, [], threading.Event()
    waited = []

    def first_stage():
        begun.append(None)
        if len(begun) == 2:
            second.set()

    wrapped(programs, ("step", 1, 0), first_stage)
    wrapped(programs, ("step", 1, 1), lambda: waited.append(second.wait(WAIT)))
    assert all(len(tokens) == 5 for tokens in run(engine).values())
    assert waited and all(waited)


def test_a_program_that_does_not_compile_ends_the_rest():
    """Ctrl-C too: all others were compiled first."""
    begun = []

    def lower(key, *_):
        def compile():
            begun.append(key)
            if len(begun) == 1:
                raise KeyboardInterrupt
            time.sleep(0.02)

        return types.SimpleNamespace(compile=compile)

    many = types.SimpleNamespace(_shapes=lambda: dict.fromkeys(range(200), ()), lower=lower, _programs={})
    with pytest.raises(KeyboardInterrupt):
        compile_all([many], lambda done, total: None)
    assert len(begun) < 200


def test_programs_are_compiled_in_one_order(monkeypatch):
    """Whichever is traced first: XLA on GPUs lets processes that compile the same wait for each other."""
    begun = []

    def lower(key, *_):
        time.sleep(0.1 * (key == 0))
        return types.SimpleNamespace(compile=lambda: begun.append(key))

    monkeypatch.setattr("os.cpu_count", lambda: 2)
    one = types.SimpleNamespace(_shapes=lambda: dict.fromkeys(range(20), ()), lower=lower, _programs={})
    one.allocate = lambda: None
    compile_all([one], lambda done, total: None)
    assert all(abs(place - key) < 2 for place, key in enumerate(begun)) and len(begun) == 20  # two at a time
