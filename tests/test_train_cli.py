"""`python -m launch.train` with bad input: one clear line, exit 1, no traceback, nothing lost. What launch.flags
refuses is in test_launch_flags.py; refusals of sizes are in test_state.py."""

import shutil

import pytest
import tiny_run

from shardlm.run_lock import only_trainer


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return tiny_run.write(tmp_path_factory.mktemp("cli"))


@pytest.fixture(scope="module")
def finished(config):
    """A run with checkpoints at 4 and 6."""
    assert tiny_run.train(config, "train.steps=6").returncode == 0
    return config.parent / "run"


def refused(done, message):
    assert done.returncode == 1, done.stdout + done.stderr
    assert message in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_print_config_and_shardings(config):
    printed = tiny_run.train(config, "train.steps=7", extra=("--print_config",)).stdout
    row = next(line for line in printed.splitlines() if line.startswith("train.steps"))
    assert "= 7 " in row and row.endswith("# command line")
    table = tiny_run.train(config, extra=("--print_shardings",)).stdout
    assert "segments.0.blocks.0.attention.wq" in table and "layers, embed, heads, head_dim" in table
    assert "a device on data=2 x fsdp=2 x tensor=2, rules zero3" in table


@pytest.mark.parametrize(
    "flags,message",
    [
        (["mesh.tensor=3"], "it needs 12 devices and there are 8; change one axis: tensor=2"),
        (["mesh.tensr=2"], "did you mean tensor"),
        (["train.steps=many"], "expected int"),
        (["model.vocab_size=256"], "tokens and the model embeds 256; set model.vocab_size to at least"),
        (["data.train=/nowhere/*.txt"], "/nowhere"),
        (["data.train={home}/empty.txt"], "empty"),
        (["data.train={home}/latin.txt"], "latin.txt"),
        (["train.global_batch=10"], "global_batch=10 cannot be split over data=2 x fsdp=2 x accumulation=1, 4 ways"),
        (["train.seq_len=100000"], "smaller than one batch"),
    ],
)
def test_bad_input(config, tmp_path, flags, message):
    home = config.parent
    (home / "empty.txt").write_text("")
    (home / "latin.txt").write_bytes("déjà vu ".encode("latin-1") * 100)
    flags = [flag.format(home=home) for flag in flags]
    refused(tiny_run.train(config, f"run_dir={tmp_path / 'run'}", *flags), message)


def test_corrupt_checkpoint_is_named_and_the_others_survive(config, finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    largest = max((run / "checkpoints" / "6").rglob("*"), key=lambda p: p.stat().st_size if p.is_file() else 0)
    largest.write_bytes(largest.read_bytes()[:-7])
    done = tiny_run.train(config, f"run_dir={run}", "train.steps=8")
    refused(done, "checkpoints/6 is damaged")
    assert "to continue from step 4" in done.stderr
    shutil.rmtree(run / "checkpoints" / "6")
    again = tiny_run.train(config, f"run_dir={run}", "train.steps=8")
    assert again.returncode == 0 and "resuming after step 4" in again.stdout


def test_another_model_in_the_run_directory_is_refused(config, finished):
    done = tiny_run.train(config, "model.mlp_dim=96")
    refused(done, "holds checkpoints of another run: model.mlp_dim was 64, is 96")


def test_a_refused_start_leaves_the_run_as_it_was(config, finished):
    """Whoever serves or scores it goes by what is written there."""
    before = (finished / "config.json").read_bytes()
    refused(tiny_run.train(config, "train.steps=8", "train.seq_len=16"), "position in the data does not fit this run")
    assert (finished / "config.json").read_bytes() == before


def test_a_run_that_another_trainer_writes_is_refused(config, tmp_path):
    with only_trainer(tmp_path / "run"):
        refused(tiny_run.train(config, f"run_dir={tmp_path / 'run'}"), "run is being trained by process")
    assert not (tmp_path / "run" / "config.json").exists()


def test_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_checkpoint(config, finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    # An update of this size overflows float32 in the next forward pass.
    explode = ("optim.name=adamw", "optim.learning_rate=1e38", "optim.schedule=constant", "train.steps=30")
    done = tiny_run.train(config, f"run_dir={run}", "train.max_bad_steps=2", "checkpoint.every_steps=100", *explode)
    refused(done, "not finite for 2 steps in a row (train.max_bad_steps=2)")
    assert "rows" in done.stderr and f"The last good checkpoint is {run}/checkpoints/6" in done.stderr
    again = tiny_run.train(config, f"run_dir={run}", "train.steps=8")
    assert again.returncode == 0 and "resuming after step 6" in again.stdout
