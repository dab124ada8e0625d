import pathlib
import subprocess
import sys

import pytest

from shardlm.data.shards import TokenShards

ROOT = pathlib.Path(__file__).parent.parent.parent


def tokenize(*flags) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "launch.tokenize", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture
def text(tmp_path):
    for i in range(20):
        (tmp_path / f"{i}.txt").write_text(f"some text, number {i}\n" * 50)
    return str(tmp_path / "*.txt")


def test_text_in_shards_out_and_a_summary(text, tmp_path):
    run = tokenize(f"--input={text}", f"--output={tmp_path}/s", "--tokenizer=bpe:280", "--num_workers=2")
    assert run.returncode == 0, run.stderr
    shards = TokenShards.open(tmp_path / "s")
    assert f"20 documents, {shards.num_tokens:,} tokens, {shards.num_bytes:,} bytes" in run.stdout
    assert "MB/s" in run.stdout
    run = tokenize(f"--verify={tmp_path}/s")
    assert run.returncode == 0 and "every byte is as it was written" in run.stdout


def test_bad_documents_are_counted(text, tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"caf\xe9")
    common = (f"--input={text}", f"--output={tmp_path}/s", "--tokenizer=bpe:280", "--num_workers=0")
    run = tokenize(*common)
    assert run.returncode == 1 and not run.stdout.count("Traceback")
    assert "bad.txt: not UTF-8" in run.stderr and "Traceback" not in run.stderr
    run = tokenize(*common, "--on_bad_utf8=skip")
    assert run.returncode == 0 and "1 documents were not UTF-8: on_bad_utf8=skip" in run.stdout


def test_problems_are_one_message_and_exit_1(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("mine")
    for flags, message in (
        ((), "error: --input=FILES and --output=DIR are needed"),
        (("--input=stdlib:train", f"--output={tmp_path}/full"), "holds other files (x)"),
        ((f"--verify={tmp_path}/none",), "no token shards in"),
        ((f"--verify={tmp_path}/s", "--on_bad_utf8=skip"), "--on_bad_utf8 is of shards that are written, and --verify"),
    ):
        run = tokenize(*flags)
        assert run.returncode == 1 and message in run.stderr and "Traceback" not in run.stderr
