"""Config files, overrides and provenance, on a small tree with every kind of field that shipped
configs use."""

import math
import subprocess
import sys

import pytest
from example_config import EXAMPLE, Dense, Example, Mesh, Mixture, Segment

from shardlm import config
from shardlm.errors import ShardlmError

EXAMPLE_FILE = f"""
from {EXAMPLE} import Dense, Example, Train

def get_config():
    return Example(model=Dense(width=128), train=Train(steps=10))
"""


def write(tmp_path, text):
    path = tmp_path / "example.py"
    path.write_text(text)
    return str(path)


def set_(*assignments, base=None):
    return config.override(base or Example(model=Dense()), [tuple(a.split("=", 1)) for a in assignments])


def refused(*assignments, base=None):
    with pytest.raises(ShardlmError) as error:
        set_(*assignments, base=base)
    return str(error.value)


# ---- overrides ----


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("steps", "50", 50),
        ("steps", "1e3", 1000),
        ("rate", "1e-3", 1e-3),
        ("rate", "1", 1.0),
        ("rate", "inf", math.inf),
        ("name", "50", "50"),
        ("name", "none", "none"),
        ("name", '"quoted"', '"quoted"'),
        ("name", "", ""),
        ("note", "true", "true"),
        ("note", "none", None),
        ("packed", "false", False),
        ("packed", "True", True),
        ("packed", "0", False),
        ("optimizer", "lion", "lion"),
        ("window", "128", 128),
        ("window", "None", None),
        ("files", "a.txt,b.txt", ("a.txt", "b.txt")),
        ("files", "a.txt", ("a.txt",)),
        ("files", '["a,b", "c"]', ("a,b", "c")),
        ("files", "", ()),
        ("betas", "0.8,0.9", (0.8, 0.9)),
        ("betas", "[0.8, 1]", (0.8, 1.0)),
        ("betas", "(0.8, 1)", (0.8, 1.0)),
        ("files", "('a,b', 'c')", ("a,b", "c")),
        ("files", "('a',)", ("a",)),
        ("files", "(draft) a.txt,(1)", ("(draft) a.txt", "(1)")),
        ("files", "(1)", ("(1)",)),
        ("size", "auto", "auto"),
        ("size", "7", 7),
    ],
)
def test_text_is_read_by_the_type_of_the_field(field, text, value):
    result = getattr(set_(f"train.{field}={text}").train, field)
    assert result == value
    assert type(result) is type(value)


def test_overrides_reach_groups_of_any_class_and_groups_in_tuples():
    assert set_("model.width=32").model == Dense(width=32)
    assert set_("model.experts=4", base=Example(model=Mixture())).model == Mixture(experts=4)
    assert set_("segments.0.repeats=3").segments == (Segment(repeats=3),)
    assert set_("evaluation=none", base=Example(model=Dense(), evaluation=Mesh())).evaluation is None
    assert set_("evaluation.tensor=4", base=Example(model=Dense(), evaluation=Mesh())).evaluation.tensor == 4
    assert set_("train.steps=1", "train.steps=2").train.steps == 2


def test_a_field_of_open_type_keeps_the_type_it_has():
    assert set_("seed=5").seed == 5
    assert set_("seed=none").seed is None
    assert set_("seed=[1,2]", base=Example(model=Dense(), seed=None)).seed == (1, 2)
    assert "seed: expected int, got 'five'" in refused("seed=five")


def test_coupled_fields_change_together():
    # each alone breaks width % heads == 0
    assert set_("model.width=30", "model.heads=5").model == Dense(width=30, heads=5)


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        (
            "train.stepz=1",
            "train.stepz: Train has no field 'stepz'; did you mean steps? (it has: steps, rate, name",
        ),
        ("trian.steps=1", "trian: Example has no field 'trian'; did you mean train?"),
        ("segments.3.repeats=1", "segments.3: tuple has no field '3' (it has: 0)"),
        ("train.steps=many", "train.steps: expected int, got 'many'"),
        ("train.steps=1.5", "train.steps: expected int, got '1.5'"),
        ("train.steps=true", "train.steps: expected int, got 'true'"),
        ("train.packed=yes", "train.packed: expected true or false, got 'yes'"),
        ("train.window=wide", "train.window: expected int or none, got 'wide'"),
        (
            "train.betas=1,2,3",
            "train.betas: expected a tuple of float and float (a,b,c or JSON), got '1,2,3'",
        ),
        ("train.optimizer=adam", "expected one of 'adamw', 'lion', got 'adam'; did you mean adamw?"),
        ("train.size=big", "train.size: expected int or one of 'auto', got 'big'"),
        ("train.steps.x=1", "train.steps.x: train.steps is 100, not a group of fields"),
        (
            "evaluation.tensor=1",
            "evaluation.tensor: evaluation is None, not a group of fields; set it as a whole",
        ),
        (
            "mesh=8",
            "mesh is a group (Mesh), not one value; set its fields one by one, as in --config.mesh.fsdp=",
        ),
        ("evaluation=8", "evaluation: expected none, got '8'"),
        ("model.heads=5", "model: width=64 does not divide over heads=5 (set by --config.model.heads)"),
        ("mesh.tensor=0", "mesh.tensor=0: an axis size is positive (set by --config.mesh.tensor)"),
    ],
)
def test_what_cannot_be_set_is_refused_with_its_path_and_remedy(assignment, message):
    assert message in refused(assignment)


def test_of_several_settings_the_one_that_is_wrong_is_named():
    assert refused("mesh.fsdp=2", "mesh.tensor=0").endswith("an axis size is positive (set by --config.mesh.tensor)")
    both = refused("model.width=66", "model.heads=5")
    assert both.endswith("(set by --config.model.width --config.model.heads)")


def test_a_group_as_a_whole_and_in_part_is_refused():
    base = Example(model=Dense(), evaluation=Mesh())
    assert "given both as a whole and in part" in refused("evaluation=none", "evaluation.tensor=2", base=base)
    assert "given both as a whole and in part" in refused("evaluation.tensor=2", "evaluation=none", base=base)


# ---- files ----


def test_a_file_that_is_not_there_names_the_nearest(tmp_path):
    path = write(tmp_path, EXAMPLE_FILE)
    with pytest.raises(ShardlmError, match="is a folder; name a file in it"):
        config.load(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ShardlmError, match=r"config.json: a configuration is a Python file whose get_config\(\)"):
        config.load(str(tmp_path / "config.json"))
    with pytest.raises(ShardlmError, match=r"exampel.py does not exist; did you mean .*example.py\?"):
        config.load(path.replace("example.py", "exampel.py"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n", "example.py: it has no get_config()"),
        ("def get_config():\n    return 1 / 0\n", "example.py:2: ZeroDivisionError: division by zero"),
        ("import no_such_module_here\n", "example.py:1: ModuleNotFoundError"),
        ("\n\ndef get_config(:\n", "example.py:3: SyntaxError"),
        ("def get_config():\n    return {}\n", "get_config() returned {}; it must return a frozen dataclass"),
        ("def get_config(size):\n    return size\n", "TypeError: get_config() missing 1 required positional"),
        (
            f"from {EXAMPLE} import *\ndef get_config():\n    return Example(Dense(), Train(steps='9'))\n",
            "train.steps: expected int, got '9'",
        ),
        (
            f"from {EXAMPLE} import *\ndef get_config():\n    return Example(Dense(), train=Mesh())\n",
            "train: expected Train, got a Mesh",
        ),
        (
            f"from {EXAMPLE} import *\ndef get_config():\n    return Example(Dense(), train=None)\n",
            "train: expected Train, got None",
        ),
        (
            f"from {EXAMPLE} import *\ndef get_config():\n    return Example(Dense(), seed=[1])\n",
            "seed: [1] would not be read back as it is saved; use tuples",
        ),
        (
            f"from {EXAMPLE} import *\ndef get_config():\n    return Example(Dense(), seed=len)\n",
            "seed: expected numbers, text or tuples of them, got <built-in function len>",
        ),
        (
            f"from {EXAMPLE} import *\ndef get_config():\n\n    return Example(Dense(heads=7))\n",
            "example.py:4: ValueError: width=64 does not divide over heads=7",
        ),
        (
            "import dataclasses\n@dataclasses.dataclass\nclass C:\n    a: int = 1\nget_config = C\n",
            "C must be a frozen dataclass",
        ),
    ],
)
def test_a_bad_file_is_refused_with_its_line(tmp_path, text, message):
    with pytest.raises(ShardlmError) as error:
        config.load(write(tmp_path, text))
    assert str(error.value).startswith("config file ")
    assert message in str(error.value)


# ---- provenance ----


def test_each_leaf_knows_where_it_came_from(tmp_path):
    path = write(tmp_path, EXAMPLE_FILE)
    resolved = config.resolve(path, [("train.rate", "0.1"), ("mesh.tensor", "1")])
    assert resolved.sources["train.steps"] == f"file {path}"
    assert resolved.sources["model.width"] == f"file {path}"
    assert resolved.sources["model.heads"] == "default"
    assert resolved.sources["train.rate"] == "command line"
    assert resolved.sources["mesh.tensor"] == "command line"  # said, though it is the default
    assert resolved.sources["mesh.fsdp"] == "default"  # 2: the default of Example.mesh, not of Mesh.fsdp
    assert resolved.sources["segments.0.repeats"] == "default"
    assert set(resolved.sources) == set(config.leaves(resolved.config))


def test_print_config_is_aligned_and_names_chosen_classes(tmp_path):
    path = write(tmp_path, EXAMPLE_FILE)
    lines = config.format_resolved(config.resolve(path, [("train.steps", "7")])).splitlines()
    assert lines[0] == f"# model is a {EXAMPLE}.Dense"
    rows = lines[1:]
    assert len({row.index(" = ") for row in rows}) == 1
    assert len({row.index("   # ") for row in rows}) == 1
    assert any(row.split() == ["train.steps", "=", "7", "#", "command", "line"] for row in rows)
    assert any(row.split() == ["train.optimizer", "=", "'adamw'", "#", "default"] for row in rows)


def test_importing_config_does_not_import_jax():
    code = "import shardlm.config, sys; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
