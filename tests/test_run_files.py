"""Finding a run by any of its directories, and saying what is wrong where there is none."""

import pytest

from shardlm.errors import ShardlmError
from shardlm.run_files import find_run, save_run_files

CONFIG = {"model": {"num_layers": 2}}


@pytest.fixture
def run(tmp_path):
    save_run_files(tmp_path / "run", CONFIG, b'{"version": "1.0"}')
    for step in (10, 9, 100):
        (tmp_path / "run" / "checkpoints" / str(step)).mkdir(parents=True)
    return tmp_path / "run"


@pytest.mark.parametrize(("inside", "step"), [("", None), ("checkpoints", None), ("checkpoints/100", 100)])
def test_a_run_is_found_by_any_of_its_directories(run, monkeypatch, inside, step):
    monkeypatch.chdir(run / inside)
    for path in (run / inside, str(run / inside) + "/", "."):
        found = find_run(path)
        assert (found.run_dir, found.step, found.config_json) == (run, step, CONFIG)
        assert found.tokenizer_path.read_bytes() == b'{"version": "1.0"}'
        assert found.checkpoints_dir == run / "checkpoints"


def test_saving_again_replaces_and_leaves_nothing_else(run, tmp_path):
    (tmp_path / "new.json").write_text("{}")
    save_run_files(run, {"model": {}}, tmp_path / "new.json")
    assert find_run(run).config_json == {"model": {}}
    assert (run / "tokenizer.json").read_text() == "{}"
    assert sorted(path.name for path in run.iterdir()) == ["checkpoints", "config.json", "tokenizer.json"]


def test_a_run_without_a_tokenizer(tmp_path):
    save_run_files(tmp_path, CONFIG)
    assert find_run(tmp_path).tokenizer_path is None


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere", r"There is no directory .*/nowhere: check the path"),
        ("run/checkpoints/15", r"There is no directory .*/15: the run has 9, 10, 100"),
        ("empty", r"empty is not a run: it has no config\.json\. Give the directory that training printed"),
    ],
)
def test_where_there_is_no_run(run, tmp_path, path, message):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ShardlmError, match=message):
        find_run(tmp_path / path)


def test_a_damaged_configuration_and_an_unreadable_tokenizer(run, tmp_path):
    (run / "config.json").write_text('{"model": ')
    with pytest.raises(ShardlmError, match=r"config\.json is damaged .* restore it from a copy of the run"):
        find_run(run)
    (run / "config.json").write_text('{"hidden_size": 64}')  # of Hugging Face, without its model_type
    with pytest.raises(ShardlmError, match=r"config\.json has neither model_type, .* nor model"):
        find_run(run)
    with pytest.raises(ShardlmError, match=r"Cannot read .*/none: No such file or directory"):
        save_run_files(run, CONFIG, tmp_path / "none")


def test_a_directory_that_refuses_keeps_the_old_file(run):
    (run / "tokenizer.json").unlink()
    (run / "tokenizer.json").mkdir()  # which a file cannot replace
    with pytest.raises(ShardlmError, match=r"Cannot write .*tokenizer\.json: Is a directory .* GiB free"):
        save_run_files(run, CONFIG, b"{}")
    assert sorted(path.name for path in run.iterdir()) == ["checkpoints", "config.json", "tokenizer.json"]
