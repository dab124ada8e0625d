"""The command line that all launchers share: absl flags, `--config=FILE`, typed `--config.path=value` overrides, and
the exit without a traceback for a problem that the user can solve. Imports no jax."""

import sys
from collections.abc import Callable, Sequence

from absl import app, flags

from shardlm.config import Resolved, format_resolved, resolve
from shardlm.errors import ShardlmError

PREFIX = "--config."

_CONFIG = flags.DEFINE_string("config", None, "Python file whose get_config() returns the run's configuration.")
_PRINT_CONFIG = flags.DEFINE_bool("print_config", False, "Print the resolved configuration with sources, and stop.")
_COORDINATOR = flags.DEFINE_string("coordinator_address", None, "HOST:PORT of process 0, for several processes.")
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "How many processes run together.")
_PROCESS_ID = flags.DEFINE_integer("process_id", None, "Which of them this is, from 0.")


def cluster() -> dict[str, object]:
    """What the command line says about the job's processes; None where it is silent."""
    return {
        "coordinator_address": _COORDINATOR.value,
        "num_processes": _NUM_PROCESSES.value,
        "process_id": _PROCESS_ID.value,
    }


def run(main: Callable[..., int | None], *, needs_config: bool = True) -> None:
    """Parses the command line and exits with main's status: 1 and one line on stderr for a ShardlmError.

    `main` takes the Resolved configuration, or nothing without `needs_config`.
    """
    overrides: list[tuple[str, str]] = []

    def parse(argv: Sequence[str]) -> list[str]:
        plain, found = split_overrides(argv)
        overrides.extend(found)
        return flags.FLAGS(plain)

    def guarded(argv: list[str]) -> None:
        try:
            if len(argv) > 1:
                raise ShardlmError(f"unexpected arguments: {' '.join(argv[1:])}; options begin with --")
            sys.exit(_with_config(main, overrides) if needs_config else main())
        except ShardlmError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(1)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            sys.exit(130)

    app.run(guarded, flags_parser=parse)


def _with_config(main: Callable[[Resolved], int | None], overrides: Sequence[tuple[str, str]]) -> int | None:
    if not _CONFIG.value:
        raise ShardlmError("--config=FILE is needed, for instance --config=configs/tiny.py")
    resolved = resolve(_CONFIG.value, overrides)
    if _PRINT_CONFIG.value:
        print(format_resolved(resolved))
        return 0
    return main(resolved)


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Takes `--config.path=value` and `--config.path value` out of a command line; (the rest, overrides).

    Raises SystemExit with a message for an override without a value.
    """
    rest, overrides = [], []
    words = iter(argv)
    for word in words:
        if not word.startswith(PREFIX):
            rest.append(word)
            continue
        path, equals, value = word.removeprefix(PREFIX).partition("=")
        if not equals:
            value = next(words, None)
            if value is None:
                sys.exit(f"error: {word} needs a value: {word}=VALUE")
        overrides.append((path, value))
    return rest, overrides
