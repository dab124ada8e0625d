"""A plugin of pytest that writes each test's outcome as it ends: what ended is known of a run that did not."""

import json
import os
import sys

ROWS = "SHARDLM_TEST_ROWS"  # the file


def pytest_configure(config):
    """In workers of pytest-xdist nothing is written: the process that started them hears of all tests."""
    if hasattr(config, "workerinput"):
        config.pluginmanager.unregister(sys.modules[__name__])


def pytest_runtest_logreport(report):
    """Of a test itself, or of what it needs where that failed or said that it is skipped; of one that its worker died
    of, `when` is "???"."""
    if report.when != "call" and report.passed:
        return
    row = {"name": report.nodeid.split("::", 1)[-1], "seconds": report.duration, "outcome": report.outcome}
    if report.skipped:
        row |= {"outcome": "skipped", "reason": str(report.longrepr[-1] if report.longrepr else "")}
    elif report.failed:
        row |= {"outcome": "failure" if report.when == "call" else "error", "error": report.longreprtext[-2000:]}
    with open(os.environ[ROWS], "a") as out:
        print(json.dumps(row), file=out, flush=True)
