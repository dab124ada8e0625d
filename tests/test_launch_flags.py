"""The command line as a user meets it: a launcher in a process of its own, its output and its exit status."""

import errno
import os
import subprocess
import sys

import pytest

from launch import flags

CONFIG = """
import dataclasses
from shardlm.errors import ShardlmError

@dataclasses.dataclass(frozen=True)
class Mesh:
    tensor: int = 1

@dataclasses.dataclass(frozen=True)
class Run:
    steps: int = 100
    rate: float = 0.1
    mesh: Mesh = Mesh()

def get_config():
    return Run(steps=10)
"""
LAUNCHER = """
import sys
from launch.flags import cluster, run
from shardlm.errors import ShardlmError

def main(resolved):
    assert "jax" not in sys.modules
    config = resolved.config
    if config.steps == 13:
        raise ShardlmError("thirteen steps bring bad luck; take another number")
    if config.steps == 14:
        raise KeyboardInterrupt
    if config.steps == 15:
        return 7
    print(config.steps, config.rate, config.mesh.tensor, cluster())

run(main, processes=True)
"""


@pytest.fixture
def launch(tmp_path):
    """Runs a launcher over the configuration above; returns its status, output and errors."""
    (tmp_path / "example.py").write_text(CONFIG)

    def run(*words, launcher=LAUNCHER):
        words = [word.replace("EXAMPLE", str(tmp_path / "example.py")) for word in words]
        done = subprocess.run([sys.executable, "-c", launcher, *words], capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    return run


def test_overrides_in_both_forms_reach_main(launch):
    status, out, err = launch(
        "--config=EXAMPLE", "--config.steps=50", "--config.mesh.tensor", "4", "--config.rate", "-1"
    )
    assert (status, err) == (0, "")
    assert out.startswith("50 -1.0 4 {'coordinator_address': None, 'num_processes': None, 'process_id': None}")


def test_flags_of_the_cluster_are_read(launch):
    _, out, _ = launch("--config=EXAMPLE", "--coordinator_address=a:1", "--num_processes=2", "--process_id=1")
    assert out.endswith("{'coordinator_address': 'a:1', 'num_processes': 2, 'process_id': 1}\n")


def test_print_config_shows_values_and_sources_and_stops(launch):
    status, out, _ = launch("--config=EXAMPLE", "--config.rate=1", "--print_config")
    rows = [line.split(None, 4) for line in out.splitlines()]
    assert status == 0
    assert rows[0][:4] == ["steps", "=", "10", "#"]
    assert rows[0][4].startswith("file ")
    assert rows[1] == ["rate", "=", "1.0", "#", "command line"]
    assert rows[2] == ["mesh.tensor", "=", "1", "#", "default"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "error: --config=FILE is needed, for instance --config=configs/tiny.py"),
        (["--config=nowhere.py"], "error: config file nowhere.py does not exist"),
        (["--config=EXAMPLE", "--config.stepz=1"], "error: stepz: Run has no field 'stepz'; did you mean steps?"),
        (["--config=EXAMPLE", "--config.steps=many"], "error: steps: expected int, got 'many'"),
        (["--config=EXAMPLE", "--config.steps"], "error: --config.steps needs a value: --config.steps=VALUE"),
        (["--config=EXAMPLE", "--config.steps", "--config.rate=1"], "error: --config.steps needs a value"),
        (["--config=EXAMPLE", "config.steps=1"], "error: unexpected arguments: config.steps=1; options begin with --"),
        (["--config=EXAMPLE", "--config.steps=13"], "error: thirteen steps bring bad luck; take another number"),
        (["--config=EXAMPLE", "--stepz=1"], "Unknown command line flag 'stepz'"),
        (["--config=EXAMPLE", "--steps=1"], "no flag --steps; the configuration has --config.steps=VALUE"),
        (["--config=EXAMPLE", "--mesh=auto"], "no flag --mesh; the configuration has --config.mesh.tensor=VALUE"),
        (["--config=EXAMPLE", "--mesh.tensor=2"], "no flag --mesh.tensor; the configuration has --config.mesh.tensor="),
        (["--config=EXAMPLE", "--num_processes=two"], "flag --num_processes=two: invalid literal"),
    ],
)
def test_what_a_user_gets_wrong_exits_1_without_a_traceback(launch, words, message):
    status, out, err = launch(*words)
    assert (status, out) == (1, "")
    assert message in err
    assert "Traceback" not in err


def test_status_of_main_and_of_an_interrupt(launch):
    assert launch("--config=EXAMPLE", "--config.steps=15")[0] == 7
    status, _, err = launch("--config=EXAMPLE", "--config.steps=14")
    assert (status, err) == (130, "interrupted\n")


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        (["train"], 0, "ran train\n"),
        ([], 1, "error: missing arguments: WHAT\n"),
        (["train", "fast"], 1, "error: unexpected arguments: fast; options begin with --\n"),
        (["train", "--config=EXAMPLE"], 1, "error: this command takes no configuration: leave out --config, "),
        (["train", "--config.steps=1"], 1, "error: this command takes no configuration: leave out --config, "),
        (["train", "--print_config"], 1, "error: this command takes no configuration: leave out --config, "),
    ],
)
def test_a_command_with_arguments_and_without_configuration(launch, words, status, text):
    launcher = (
        "from launch.flags import run\nrun(lambda what: print('ran', what), needs_config=False, arguments=['WHAT'])"
    )
    got, out, err = launch(*words, launcher=launcher)
    assert got == status
    assert (out + err).startswith(text)


def test_ctrl_c_in_the_garbage_collector_ends_the_process(launch):
    """What is raised there is lost, as it was in jax's callback while jax was imported."""
    launcher = """
import gc, signal, time
from launch.flags import run

def main():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell starts in the background
    once = [signal.SIGINT]
    gc.callbacks.append(lambda *_: once and signal.raise_signal(once.pop()))
    gc.collect()
    time.sleep(20)

run(main, needs_config=False)
"""
    status, out, err = launch(launcher=launcher)
    assert (status, out, err) == (130, "", "interrupted\n")


@pytest.mark.parametrize("lines", [1, 100_000], ids=["at the end", "on the way"])
def test_output_that_nobody_reads_ends_without_a_traceback(lines):
    launcher = f"""
from launch.flags import run
run(lambda: print(*range({lines}), sep="\\n"), needs_config=False)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", launcher], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 141


def test_a_terminal_of_few_characters_shows_the_others_by_their_numbers(monkeypatch, launch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    launcher = "from launch.flags import run; run(lambda: print('\\u65e5'), needs_config=False)"
    assert launch(launcher=launcher) == (0, "\\u65e5\n", "")


def test_help_has_the_flags_that_launchers_share(launch):
    launcher = "import launch.http_flags\nfrom launch.flags import run\nrun(print, needs_config=False, processes=True)"
    status, out, _ = launch("--help", launcher=launcher)
    assert status == 0
    assert "--port:" in out and "--coordinator_address:" in out and "--config:" not in out
    status, out, _ = launch("--help")
    assert status == 0 and "--config:" in out and "--num_processes:" in out and "--port:" not in out


def test_flags_of_several_processes_are_refused_where_one_runs_alone(launch):
    alone = "from launch.flags import run\nrun(print, needs_config=False)"
    assert launch("--num_processes=2", launcher=alone) == (
        1,
        "",
        "error: --num_processes: this command runs in one process: leave it out\n",
    )


def test_a_path_that_is_not_permitted_is_no_traceback(capsys):
    with pytest.raises(SystemExit, match="1"), flags._without_traceback():
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "runs/theirs")
    assert capsys.readouterr().err == (
        "error: runs/theirs: Permission denied; permit it to this user, or name another path\n"
    )
