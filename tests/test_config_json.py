"""Configurations as JSON: saved, read again, compared."""

import dataclasses
import json

import hypothesis.strategies as st
import pytest
from example_config import EXAMPLE, Dense, Example, Mesh, Mixture, Model, Segment, Train
from hypothesis import given, settings

from shardlm import config
from shardlm.errors import ShardlmError

FLOATS = st.floats(allow_nan=False)
TRAINS = st.builds(
    Train,
    steps=st.integers(-(2**53), 2**53),
    rate=FLOATS,
    name=st.text(),
    packed=st.booleans(),
    optimizer=st.sampled_from(["adamw", "lion"]),
    window=st.none() | st.integers(0, 9),
    files=st.lists(st.text(), max_size=3).map(tuple),
    betas=st.tuples(FLOATS, FLOATS),
    size=st.just("auto") | st.integers(0, 9),
    note=st.none() | st.text(),
)
OPEN = st.recursive(
    st.none() | st.booleans() | st.integers(0, 9) | FLOATS | st.text(), lambda item: st.tuples(item, item)
)
TREES = st.builds(
    Example,
    model=st.builds(Dense, width=st.sampled_from([4, 8])) | st.builds(Mixture, experts=st.integers(1, 9)),
    train=TRAINS,
    segments=st.lists(st.builds(Segment, kind=st.text()), max_size=3).map(tuple),
    evaluation=st.none() | st.builds(Mesh, fsdp=st.integers()),
    seed=OPEN,
)


@settings(deadline=None, max_examples=100)
@given(TREES)
def test_json_gives_back_an_equal_tree(tree):
    text = json.dumps(config.to_json(tree))
    assert config.from_json(Example, json.loads(text)) == tree
    assert config.difference(config.from_json(Example, json.loads(text)), tree) == []


@settings(deadline=None, max_examples=100)
@given(TRAINS)
def test_every_leaf_can_be_set_from_its_own_json(train):
    plain = config.to_json(train)
    text = {key: value if isinstance(value, str) else json.dumps(value) for key, value in plain.items()}
    base = Train(steps=-1)
    if isinstance(train.note, str) and train.note.lower() in ("none", "null"):
        del text["note"]  # the one text that an optional string cannot be given
    result = config.override(base, list(text.items()))
    assert dataclasses.replace(result, note=train.note) == train


def test_json_names_only_the_classes_that_declarations_leave_open():
    data = config.to_json(Example(model=Mixture(), evaluation=Mesh()))
    assert data["model"] == {"_type": f"{EXAMPLE}.Mixture", "width": 64, "experts": 8}
    assert "_type" not in data["train"]
    assert "_type" not in data["evaluation"]
    assert data["segments"] == [{"kind": "full", "repeats": 1}]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda d: d["train"].update(stepz=1),
            "train.stepz: Train has no field 'stepz'; did you mean steps?",
        ),
        (lambda d: d.pop("model"), "configuration: Example needs model, which is not there"),
        (lambda d: d["train"].update(steps="1"), "train.steps: expected int, got '1'"),
        (lambda d: d["train"].update(_type=f"{EXAMPLE}.Mesh"), "train: expected Train, got a Mesh"),
        (lambda d: d.update(train=3), "train: expected Train, got 3"),
        (lambda d: d["model"].pop("_type"), "model: expected Model, got {'width': 64, 'heads': 4}"),
        (lambda d: d.update(seed={}), "seed: several classes are possible here; say which with '_type'"),
        (lambda d: d["model"].update(_type=f"{EXAMPLE}.Train"), "model: expected Model, got a Train"),
        (lambda d: d["model"].update(_type="os.system"), "model: os.system is not a class of shardlm"),
        (lambda d: d["model"].update(_type="shardlmx.A"), "model: shardlmx.A is not a class of shardlm"),
        (lambda d: d["model"].update(_type=5), "model: 5 is not a class of shardlm"),
        (lambda d: d["model"].update(_type="shardlm.no.Dense"), "there is no dataclass shardlm.no.Dense"),
        (
            lambda d: d["model"].update(_type="shardlm.config.msgspec"),
            "there is no dataclass shardlm.config.ms",
        ),
        (lambda d: d["model"].update(heads=5), "model: width=64 does not divide over heads=5"),
    ],
)
def test_saved_configurations_that_do_not_fit_are_refused(change, message):
    data = config.to_json(Example(model=Dense()))
    change(data)
    with pytest.raises(ShardlmError) as error:
        config.from_json(Example, data)
    assert message in str(error.value)


def test_a_field_that_came_after_a_tree_was_saved_has_its_default():
    tree = Example(model=Dense(), train=Train(steps=7))
    data = config.to_json(tree)
    del data["train"]["rate"], data["mesh"], data["model"]["heads"]
    assert config.from_json(Example, data) == tree


def test_a_class_outside_the_package_is_not_saved_by_name():
    @dataclasses.dataclass(frozen=True)
    class Local(Model):
        a: int = 1

    with pytest.raises(ShardlmError, match="Local is not a class of shardlm"):
        config.to_json(Example(model=Local()))


def test_leaves_and_difference_go_by_path():
    one = Example(model=Dense())
    two = Example(model=Mixture(experts=2), train=Train(files=("a",)))
    assert config.leaves(one)["train.files"] == ()
    assert config.leaves(one)["segments.0.kind"] == "full"
    assert config.difference(one, two) == [
        ("model._type", f"{EXAMPLE}.Dense", f"{EXAMPLE}.Mixture"),
        ("model.heads", 4, config.ABSENT),
        ("train.files", (), ("a",)),
        ("model.experts", config.ABSENT, 2),
    ]
    assert config.difference(Train(packed=True), dataclasses.replace(Train(), packed=1)) == [("packed", True, 1)]
