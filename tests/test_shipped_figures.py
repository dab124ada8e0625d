"""The memory that README.md and the configurations say is the recorded one of the compiled programs."""

import json
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
RECORDS = sorted((ROOT / "configs").glob("*.collectives.json"))
GIB = 2**30


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.name.partition(".")[0])
def test_what_is_said_of_a_shipped_program_is_its_record(record):
    name, told = record.name.partition(".")[0], json.loads(record.read_text())
    state, temporaries = (f"{told[key] / GIB:.1f}" for key in ("argument_bytes", "temporary_bytes"))
    row = re.search(rf"^\| `{name}`.*\|(.*)\|$", (ROOT / "README.md").read_text(), re.M)[1]
    said = " ".join((ROOT / "configs" / f"{name}.py").read_text().split())
    if name == "diloco_two_sites":  # the record is of a step in which nothing is exchanged
        assert f"{state} + " in row and f"({temporaries} where nothing is exchanged)" in row
        return
    assert row.strip() == f"{state} + {temporaries}"
    assert f"{state} GiB of state and {temporaries} GiB of temporaries a GPU" in said
