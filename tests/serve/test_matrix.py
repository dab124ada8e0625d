"""Every feature of serving with every other one: cases in which each pair of values meets, each against the oracle that
knows no cache, no batch and no mesh. What does not go together is refused at start-up, by name.

A new feature is a line in one of the tables: in BUILT where it needs programs of its own, in HELD where it is the
host's, in ASKED where it is a request's.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from engines import CONFIG, END, TOKENIZER, decoding_from
from flax.traverse_util import flatten_dict, unflatten_dict
from oracle import Oracle, opened_of
from pairwise import covering
from small_eagle import head_for
from small_moe import MOE

from shardlm.errors import ShardlmError
from shardlm.layers.delta_net import DeltaNetConfig
from shardlm.layers.lora import A, LoraConfig
from shardlm.layers.mtp import MtpConfig
from shardlm.layers.stack import Segment
from shardlm.mesh import MeshSpec
from shardlm.models.transformer_config import TransformerConfig
from shardlm.opened import Opened
from shardlm.serve import memories, pool_size
from shardlm.serve.adapter_table import AdapterTable, Room
from shardlm.serve.adapters import Ready
from shardlm.serve.build import assemble
from shardlm.serve.engine import Engine
from shardlm.serve.engine_config import EngineConfig
from shardlm.serve.layers import split, taken_apart
from shardlm.serve.live_weights import new_weights
from shardlm.serve.pool_size import scheduler_of
from shardlm.serve.replicas import EngineGroup
from shardlm.serve.sampling_params import SamplingParams, StructuredOutputs
from shardlm.serve.scheduler_config import most_decoded
from shardlm.serve.snapshots import Snapshots
from shardlm.serve.speculation.build import DraftModel
from shardlm.serve.submeshes import of_replica, of_stage
from shardlm.state import is_adapter, joined

ONE = MeshSpec()
BUILT = {
    "mesh": (ONE, MeshSpec(tensor=2), MeshSpec(pipeline=2), MeshSpec(data=2), MeshSpec(expert=2)),
    "weights": ("dtype", "fp8", "int4"),
    "kv_cache_dtype": ("auto", "fp8", "int8"),
    "tie_embeddings": (False, True),
    "first": ("", "window", "memory"),  # the first layer: as the second, with a window, or linear attention
    "adapters": ("", "own", "several"),  # the model's own one, or room for two, of which each request has one or none
    "deterministic": (False, True),
    "drafts": (None, "ngram", "mtp", "eagle3"),
    "least_rows": (1, 2),  # of the decode programs: on CPUs and on GPUs (build.py)
    "split": (False, True),  # positions of pages over devices that share one kv head
}
HELD = {"caching": (True, False), "chunked": (True, False), "few_pages": (True, False), "offloaded": (True, False)}
ASKED = {
    "random": (False, True),
    "logprobs": (None, 0, 2),
    "prompt_logprobs": (None, 1),
    "penalties": (False, True),
    "grammar": (None, "", "a"),  # after which text
    "n": (1, 2),
    "embed": (False, True),
    "new_weights": (False, True),
    "reset": (False, True),  # of the prefix cache, while requests run
}
# Two that begin alike get in together and grow, so that one loses its pages: more than pairs have to meet for that.
CROWDED = {name: values[0] for name, values in (HELD | ASKED).items()} | {"few_pages": True}
LENGTH, PAGE, WINDOW = 40, 4, 8  # a split window is whole pages
MEMORY = DeltaNetConfig(num_heads=8, num_kv_heads=4, head_dim=8, value_dim=8)
PROMPT = TOKENIZER.encode('{"name": "ab", "age": 12, x: true}' * 2)[:21]
BESIDE = [*PROMPT[:14], *TOKENIZER.encode("né日")]  # begins alike
FLOOD = [*reversed(PROMPT), *PROMPT[:6]]
CLOSE = 2e-4  # of log-probabilities in float32


def _refused(case: dict) -> bool:
    """Told by EngineConfig and by serving_rules.py, see the tests of refusals."""
    alone = case.get("mesh", MeshSpec(tensor=2)).size("tensor", "expert") == 1
    return (case.get("deterministic", False) and case.get("drafts") is not None) or (case.get("split", False) and alone)


def _cost(build: dict) -> float:
    """Of its compilation, about, in seconds of CPU (measured)."""
    [axis] = [axis for axis, size in build["mesh"].sizes().items() if size > 1] or [""]
    of_mesh = {"tensor": 1.35, "expert": 1.7, "data": 2}.get(axis, 1)
    decode = {None: 1.4, "ngram": 2.1, "mtp": 3, "eagle3": 3}[build["drafts"]] * (3 - build["least_rows"])
    oracles = (1 + (build["adapters"] == "several")) * (1.8 if axis == "expert" else 1.2)
    return of_mesh * (2 if build["deterministic"] else 1.7 + decode) + oracles


@functools.cache
def engines_and_cases() -> list[tuple[dict, list[dict]]]:
    """(what is built, the cases on it): builds that cover their own pairs and cost little, and on these all other
    pairs."""
    builds, _ = covering(BUILT, lambda case: not _refused(case), _cost, tries=50)

    def possible(case: dict) -> bool:
        own = {name: case[name] for name in BUILT if name in case}
        return any(own.items() <= build.items() for build in builds)

    cases, never = covering(BUILT | HELD | ASKED, possible)
    assert all(_refused(dict(pair)) for pair in never)
    plain = next(b for b in builds if b["mesh"].data == 1 and not b["first"] and not b["drafts"])
    cases.append(plain | CROWDED)
    return [(build, [case for case in cases if build.items() <= case.items()]) for build in builds]


def drafts_of(case: dict) -> dict | None:
    model = {"model": "given"} if case["drafts"] == "eagle3" else {}
    return {"method": case["drafts"], "num_speculative_tokens": 2, **model} if case["drafts"] else None


def shape_of(build: dict) -> TransformerConfig:
    """Two layers, the first one of its kind, and a module that drafts where that is asked for; of experts where a mesh
    splits them."""
    config = dataclasses.replace(MOE, vocab_size=CONFIG.vocab_size) if build["mesh"].expert > 1 else CONFIG
    config = dataclasses.replace(config, num_kv_heads=1) if build["split"] else config
    shape = dataclasses.replace(config, num_layers=2).transformer()
    shape = dataclasses.replace(shape, tie_embeddings=build["tie_embeddings"])
    [block] = shape.segments[0].pattern
    windowed = dataclasses.replace(block.attention, window=WINDOW)
    first = {"": block.attention, "window": windowed, "memory": MEMORY}[build["first"]]
    first = dataclasses.replace(block, attention=first)
    mtp = MtpConfig(block) if build["drafts"] == "mtp" else None
    return dataclasses.replace(shape, segments=(Segment((first, block), 1),), mtp=mtp)


def head_of(build: dict) -> DraftModel | None:
    """The head that drafts, where that is asked for, with the model's embedding."""
    if build["drafts"] != "eagle3":
        return None
    shape = dataclasses.replace(CONFIG, num_layers=1).transformer()
    own = opened_of(head_for(shape, CONFIG.vocab_size // 2), of_stage(build["mesh"]))
    del own.params["embedding"]
    place = own.params["eagle"]["proposed"]
    some = np.where(np.arange(len(place)) % 2, -1, np.arange(len(place)) // 2).astype(np.int32)
    own.params["eagle"]["proposed"] = jax.device_put(some, place.sharding)
    with jax.set_mesh(own.mesh):
        made = taken_apart(own.model, own.params, build["kv_cache_dtype"])
    return DraftModel(*made, streams=(0, 1, 2), shared=("embedding",))


def opened(build: dict, spec: MeshSpec, seed: int = 0, adapter: bool | None = None) -> Opened:
    """With `adapter` or without, by default as the model has one of its own."""
    own = build["adapters"] == "own" if adapter is None else adapter
    return opened_of(shape_of(build), of_replica(spec), seed, lora=2 * own, weights=build["weights"])


def loaded(engine: Engine | EngineGroup, build: dict) -> None:
    """Two adapters, one after the other: "other" in the first place, "own" in the second, as `opened` has it."""
    for name, seed in (("other", 1), ("own", 0)):
        params = opened(build, ONE, seed, adapter=True).params
        flat = flatten_dict({"segments": split(params["segments"])})
        parts = {path: np.asarray(a) for path, a in flat.items() if is_adapter(path)}
        scale = LoraConfig(2).alpha / 2
        parts = {path: a if path[-1].endswith(A) else scale * a for path, a in parts.items()}
        engine.load_adapter(name, "", Ready(parts, {}))


def runners_of(build: dict) -> list:
    """Compiled: of each replica."""
    config = EngineConfig(
        mesh=build["mesh"],
        kv_cache_dtype=build["kv_cache_dtype"],
        deterministic=build["deterministic"],
        speculative_config=drafts_of(build),
        max_num_seqs=2,
        max_num_batched_tokens=32,
        block_size=PAGE,
        decode_steps=4,
        decode_context_parallel_size=2 if build["split"] else 1,
        kv_offloading_size=0.001,
        **({"enable_lora": True, "max_loras": 2, "max_lora_rank": 3} if build["adapters"] == "several" else {}),
    )
    with decoding_from(build["least_rows"]):
        made = opened(build, build["mesh"])
        engine = assemble(made, TOKENIZER, [END], LENGTH, config, draft=head_of(build))
    return [one.runner for one in (engine.engines if isinstance(engine, EngineGroup) else [engine])]


def engine_of(runners: list, case: dict) -> Engine | EngineGroup:
    """Another scheduler over the same programs."""
    sizes = runners[0].config
    if case["chunked"]:
        sizes = dataclasses.replace(sizes, max_batch_tokens=8)
    sizes = dataclasses.replace(sizes, bundles=2 * case["offloaded"])
    if case["few_pages"]:
        longest = sizes.layout.pages_of(
            LENGTH, PAGE, max(sizes.max_batch_tokens, most_decoded(4, 2 * bool(case["drafts"])))
        )
        sizes = dataclasses.replace(sizes, layout=dataclasses.replace(sizes.layout, num_pages=1 + longest))
    config = EngineConfig(enable_prefix_caching=case["caching"], speculative_config=drafts_of(case))
    adapters = AdapterTable(Room(2, 3) if case["adapters"] == "several" else Room())
    engines = [Engine(runner, scheduler_of(sizes, config), TOKENIZER, [END], adapters) for runner in runners]
    engine = engines[0] if len(engines) == 1 else EngineGroup(engines)
    if case["adapters"] == "several":
        loaded(engine, case)
    return engine


def params_of(case: dict) -> SamplingParams:
    choices, after = ["true", "tags"], case["grammar"] or ()
    structured = None if case["grammar"] is None else StructuredOutputs(choice=choices, after=after)
    return SamplingParams(
        n=case["n"],
        max_tokens=0 if case["embed"] else 12,
        ignore_eos=True,
        logprobs=case["logprobs"],
        prompt_logprobs=case["prompt_logprobs"],
        structured_outputs=structured,
        **({"temperature": 1.2, "top_k": 50, "seed": 7} if case["random"] else {"temperature": 0}),
        **({"repetition_penalty": 1.3, "frequency_penalty": 0.5} if case["penalties"] else {}),
    )


def run(engine: Engine | EngineGroup) -> dict:
    done = {}
    while engine.has_unfinished:
        done |= {output.request_id: output for output in engine.step() if output.finished}
    assert engine.stats().kv_usage == 0
    return done


def check(output, prompt: list[int], params: SamplingParams, oracle: Oracle, embed: bool) -> None:
    for index, one in enumerate(output.outputs):
        said = oracle.reply(prompt, params, index)
        assert one.token_ids == said.tokens
        for place, told in enumerate(one.logprobs or ()):
            chosen, row = told.chosen, said.logprobs[place]
            assert abs(chosen.logprob - row[chosen.token_id]) < CLOSE
            above = [(row > row[chosen.token_id] + slack).sum() for slack in (CLOSE, -CLOSE)]
            assert 1 + above[0] <= chosen.rank <= max(1, above[1])
            best = np.sort(row)[::-1][: params.logprobs]
            np.testing.assert_allclose([other.logprob for other in told.likeliest(params.logprobs)], best, atol=CLOSE)
    for place, told in enumerate((output.prompt_logprobs or ())[1:]):
        own, [best] = told.chosen, told.likeliest(1)
        row = oracle.logprobs(prompt)[place]
        assert own.token_id == prompt[place + 1] and abs(own.logprob - row[own.token_id]) < CLOSE
        assert abs(best.logprob - row.max()) < CLOSE
    if embed:
        np.testing.assert_allclose(output.embedding, oracle.embedding(prompt), atol=1e-4)


@pytest.fixture
def small_snapshots(monkeypatch):
    """Copies of memories worth two pages, as prompts are short."""
    monkeypatch.setattr(memories, "LEAST", 2 * PAGE)
    monkeypatch.setattr(pool_size, "Snapshots", functools.partial(Snapshots, least=2 * PAGE, tail=3))


@pytest.mark.wide
def test_every_pair_of_features_gives_what_the_oracle_says(small_snapshots):
    preemptions = hits = loaded_pages = 0
    for build, cases in engines_and_cases():
        runners, plain = runners_of(build), Oracle(opened(build, ONE), build["kv_cache_dtype"])
        several = build["adapters"] == "several"
        adapted = Oracle(opened(build, ONE, adapter=True), build["kv_cache_dtype"]) if several else plain
        has = {"adapter": "own"} if several else {}
        for case in cases:
            engine, params, old = engine_of(runners, case), params_of(case), runners[0].params
            of = {"first": adapted, "again": adapted, "beside": plain}
            greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
            if case["new_weights"]:
                engine.add("old", PROMPT, greedy, **has)
                check(run(engine)["old"], PROMPT, greedy, adapted, False)
                engine.update_weights(new_weights(opened(build, build["mesh"], seed=1).params, runners[0]))
                new = opened(build, ONE, seed=1).params
                of["beside"] = plain.of(new)
                if several:  # adapters stay
                    old_ones = {p: a for p, a in flatten_dict(adapted.opened.params).items() if is_adapter(p)}
                    new = joined(new, unflatten_dict(old_ones))
                of["first"] = of["again"] = adapted.of(new)
            engine.add("first", PROMPT, params, embed=case["embed"], **has)
            engine.add("beside", BESIDE, greedy)
            done, begun = {}, -1
            if case["reset"]:
                done = {output.request_id: output for _ in range(3) for output in engine.step() if output.finished}
                assert engine.reset_prefix_cache(reset_running_requests=True)
                begun = engine.stats().prefix_queries
            done |= run(engine)
            read = engine.stats().prefix_queries > begun  # not where tokens in flight ended all replies
            if case["few_pages"] and case["offloaded"]:
                engine.add("flood", FLOOD, greedy)  # takes all pages
                done |= run(engine)
            before = engine.stats().prefix_hits
            engine.add("again", PROMPT, params, embed=case["embed"], **has)
            done |= run(engine)
            try:
                check(done["beside"], BESIDE, greedy, of["beside"], False)
                for id in ("first", "again"):
                    check(done[id], PROMPT, params, of[id], case["embed"])
            except AssertionError as error:
                raise AssertionError(f"{case}: {error}") from error
            found = engine.stats().prefix_hits - before
            shared = case["caching"] and case["prompt_logprobs"] is None
            assert shared or not found, case
            # Few pages may have no room for what was cached, nor for the copies of memories.
            kept = not case["few_pages"] or (case["offloaded"] and case["first"] != "memory")
            assert found or not shared or not kept or not read, case
            loaded_pages += engine.stats().pages_loaded
            preemptions, hits = preemptions + engine.stats().preemptions, hits + found
            engine.update_weights(old)
    assert preemptions and hits and loaded_pages


def test_what_does_not_go_together_is_refused_by_name():
    drafts = drafts_of({"drafts": "mtp"})
    for options, *named in (
        ({"speculative_config": drafts, "deterministic": True}, "speculative_config", "deterministic=True"),
        ({"mesh": MeshSpec(fsdp=2, context=2)}, "fsdp, context", "tensor, expert, pipeline or data"),
        ({"max_loras": 2}, "max_loras=2", "enable_lora=True or lora_modules"),
        ({"enable_lora": True, "max_loras": 0}, "max_loras=0", "at least 1"),
    ):
        with pytest.raises(ShardlmError) as refusal:
            EngineConfig(**options)
        assert all(name in str(refusal.value) for name in named)
