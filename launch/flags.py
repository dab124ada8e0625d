"""The command line that all launchers share: absl flags, `--config=FILE`, typed `--config.path=value` overrides, and
the exit without a traceback for a problem that the user can solve. Imports no jax."""

import contextlib
import functools
import gc
import importlib
import logging
import math
import os
import pathlib
import re
import select
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

from absl import app, flags

from shardlm.config import format_resolved, leaves, load, resolve
from shardlm.errors import ShardlmError
from shardlm.no_driver import expect_no_driver

PREFIX = "--config."
_CONSTRAINT = re.compile(r"--(\w+\.[\w.]+|rules|remat|matmul)(<=|>=|=)")

# Of launch/plan_serve_flags.py, which is imported with --serve alone.
OF_SERVING = (
    *("prompt_len", "output_len", "range_ratio", "shared_prefix", "file", "request_rate"),
    *("ttft_seconds", "itl_seconds", "attainment", "acceptance_rate", "images_per_prompt", "image_size"),
)

_CONFIG = flags.DEFINE_string("config", None, "Python file whose get_config() returns the run's configuration.")
_PRINT_CONFIG = flags.DEFINE_bool("print_config", False, "Print the resolved configuration with sources, and stop.")
_COORDINATOR = flags.DEFINE_string("coordinator_address", None, "HOST:PORT of process 0, for several processes.")
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "How many processes run together.")
_PROCESS_ID = flags.DEFINE_integer("process_id", None, "Which of them this is, from 0.")


class Amount(flags.ArgumentParser):
    """Of flags in the words of targets: 15T, 500k. absl refuses a flag with the message of a ValueError."""

    syntactic_help = "a number such as 2e12 or 2T"

    def parse(self, argument: str | float) -> float:
        from shardlm.plan.target import parse_amount

        return float(argument) if isinstance(argument, int | float) else parse_amount(argument)


flags.disclaim_key_flags()  # of whoever calls `define_amount` are its flags


def define_amount(name: str, default: float, help: str) -> flags.FlagHolder:
    """A flag whose value is an Amount."""
    return flags.DEFINE(Amount(), name, default, help, serializer=flags.ArgumentSerializer())


def config_name() -> str:
    """The file that --config names."""
    return _CONFIG.value or ""


def cluster() -> dict[str, object]:
    """What the command line says about the job's processes; None where it is silent."""
    return {
        "coordinator_address": _COORDINATOR.value,
        "num_processes": _NUM_PROCESSES.value,
        "process_id": _PROCESS_ID.value,
    }


def run(
    main: Callable[..., int | None],
    *,
    needs_config: bool = True,
    processes: bool = False,
    arguments: Sequence[str] = (),
    other_names: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Parses the command line and exits with main's status: 1 and one line on stderr for a ShardlmError, 1 and absl's
    message for a flag that absl refuses, 130 when interrupted, 141 where nobody reads the output any more.

    `main` takes the Resolved configuration, unless it needs none, and then the positional `arguments` named here.
    `processes`: the command may be one of several processes that run together. `other_names`: what users of other
    programs call flags of this one, or, in several words, what is to be done instead.
    """

    def guarded(argv: list[str]) -> None:
        with _without_traceback():
            _refuse_endless()
            if not processes and (given := [name for name, value in cluster().items() if value is not None]):
                raise ShardlmError(f"--{given[0]}: this command runs in one process: leave it out")
            words = _positional(argv[1:], arguments)
            status = _with_config(main, overrides, words) if needs_config else _plain(main, overrides, words)
            sys.stdout.flush()  # here, where a pipe that was closed is no traceback
            sys.exit(status)

    show_help(needs_config=needs_config, processes=processes)
    _keep_interrupts()
    expect_no_driver()
    sys.stdout.reconfigure(errors="backslashreplace")  # what a terminal in latin-1 cannot show ends no training
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.WARNING)  # that there is no TPU, in every process
    with _without_traceback():
        plain, overrides = split_overrides(sys.argv)
    app.run(guarded, argv=plain, flags_parser=functools.partial(_parsed, other_names=other_names))


def _refuse_endless() -> None:
    """Raises ShardlmError for a number that is none, or without end where that is not what the flag has by itself."""
    for name in flags.FLAGS:
        flag = flags.FLAGS[name]
        number = flag.value if flag.present and isinstance(flag.value, float) else 0.0
        if math.isnan(number) or (math.isinf(number) and flag.default != number):
            raise ShardlmError(f"--{name}={number}: a finite number is needed")


def check_writable(flag: flags.FlagHolder, ending: str) -> None:
    """Before a minute's work, whose result the flag's file is to hold. Raises ShardlmError where it cannot."""
    if not flag.value:
        return
    path = pathlib.Path(flag.value)
    if path.suffix != ending or not path.parent.is_dir() or path.is_dir():
        raise ShardlmError(f"--{flag.name}={flag.value}: the name must end in {ending}, in a folder that exists")
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise ShardlmError(f"--{flag.name}={flag.value}: nothing can be written there: {error}") from None


def show_help(flag: str = "", *modules: str, needs_config: bool = True, processes: bool = False) -> None:
    """Where the command line asks for help, prints it and ends: the launcher's flags, those that it shares with others,
    and those of `modules`, which are there with `flag` alone."""
    if not {"--help", "-help", "-h", "-?", "--helpshort"} & set(sys.argv):
        return
    holders = (_CONFIG, _PRINT_CONFIG) if needs_config else ()
    for holder in (*holders, *((_COORDINATOR, _NUM_PROCESSES, _PROCESS_ID) if processes else ())):
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[holder.name])
    shared = sorted(name for name in flags.FLAGS.flags_by_module_dict() if name.startswith("launch."))
    with _without_traceback():
        app.usage(shorthelp=True, writeto_stdout=True)
        for name in shared:
            if name != __name__:
                print(flags.FLAGS.module_help(sys.modules[name]))
        if modules:
            print(f"with {flag} also:\n")
        for name in modules:
            print(flags.FLAGS.module_help(importlib.import_module(name)))
        sys.stdout.flush()
    sys.exit(0)


def plain_switch(flag: str) -> None:
    """Of a switch that decides before flags are parsed: --serve=true is --serve, --serve=false and --noserve are
    nothing."""
    off = {f"--no{flag.lstrip('-')}", *(f"{flag}={word}" for word in ("false", "0", "f", "no", "n"))}
    on = {f"{flag}={word}" for word in ("true", "1", "t", "yes", "y")}
    sys.argv[:] = [flag if word.lower() in on else word for word in sys.argv if word.lower() not in off]


def refuse_without(flag: str, names: Sequence[str]) -> None:
    """Ends with one line where one of these flags is on the command line without that which gives them a meaning."""
    given = {word.lstrip("-").partition("=")[0] for word in sys.argv[1:] if word.startswith("-")}
    if flag.lstrip("-") not in given and (alone := [name for name in names if name in given]):
        sys.exit(f"error: --{alone[0]} goes with {flag}: add that, or leave it out")


def collect_rarely() -> None:
    """For a command that makes millions of small objects, keeps few of them and ends: Python's garbage collector looked
    through all of jax's each time, a fifth of an advice's time (measured)."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)


def _parsed(argv: Sequence[str], other_names: Mapping[str, str]) -> list[str]:
    """As absl parses them; an unknown flag that is called as a field of the configuration is told how that is set, and
    one that is spelt otherwise here how it is."""
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        unknown = isinstance(error, flags.UnrecognizedFlagError)
        own = error.flagname.replace("-", "_") if unknown else ""
        own = other_names.get(own, own)
        if " " in own:
            with _without_traceback():
                raise ShardlmError(f"there is no flag --{error.flagname}: {own}") from None
        switch = own.removeprefix("no_")
        if own and own != error.flagname and switch in flags.FLAGS:
            with _without_traceback():
                here = own if switch == own else f"no{switch}"
                raise ShardlmError(f"there is no flag --{error.flagname}; here it is --{here}") from None
        if unknown and (paths := _fields_called(error.flagname, argv)):
            with _without_traceback():
                which = " or ".join(f"{PREFIX}{path}=VALUE" for path in paths[:3])
                raise ShardlmError(f"there is no flag --{error.flagname}; the configuration has {which}") from None
        if unknown and own in _of_engine(argv):
            with _without_traceback():
                raise ShardlmError(f"--{own} goes with --serve: add that, or leave it out") from None
        return app.parse_flags_with_usage(argv)


def _of_engine(argv: Sequence[str]) -> set[str]:
    """Names of the engine's flags, of a launcher that has them with --serve alone and is started without it."""
    if "serve" not in flags.FLAGS or "--serve" in argv:
        return set()
    module = importlib.import_module("launch.engine_flags").__name__
    return {flag.name for flag in flags.FLAGS.flags_by_module_dict()[module]}


def _fields_called(name: str, argv: Sequence[str]) -> list[str]:
    """Paths of the configuration's fields of that name or, if dotted, of that path, or in a group of that name; none
    where it cannot be read."""
    files = [word.removeprefix("--config=") for word in argv if word.startswith("--config=")]
    try:
        return [path for path in leaves(load(files[-1])) if name == path or name in path.split(".")] if files else []
    except ShardlmError:
        return []


@contextlib.contextmanager
def _without_traceback() -> Iterator[None]:
    try:
        yield
    except ShardlmError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except PermissionError as error:
        if error.filename is None:
            raise
        print(
            f"error: {error.filename}: {error.strerror}; permit it to this user, or name another path", file=sys.stderr
        )
        sys.exit(1)
    except BrokenPipeError:
        if not _unread():
            raise
        sys.exit(141)  # as a process that SIGPIPE ended


def _unread() -> bool:
    """Whether what reads the standard output has gone, as `| head` has; then nothing more is written there."""
    output, look = sys.stdout.fileno(), select.poll()
    look.register(output, 0)
    gone = any(event & select.POLLERR for _, event in look.poll(0))
    if gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)  # for what Python writes at its end
    return gone


def _keep_interrupts() -> None:
    """Ctrl-C where Python can raise nothing - in jax's callback of the garbage collector, in a finaliser - is sent once
    more, instead of a traceback and no end: of 24 interrupts while jax was imported, four were lost (measured)."""
    report = sys.unraisablehook

    def hook(info: "sys.UnraisableHookArgs") -> None:
        if info.exc_type is KeyboardInterrupt:
            threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT)).start()
        else:
            report(info)

    sys.unraisablehook = hook


def _positional(words: Sequence[str], names: Sequence[str]) -> Sequence[str]:
    if len(words) > len(names):
        more = words[len(names) :]
        likely = ("config",) if more[0].endswith(".py") else ("model", "checkpoint")
        unset = [name for name in likely if name in flags.FLAGS and not flags.FLAGS[name].value]
        hint = f", as --{unset[0]}={more[0]}" if unset and "=" not in more[0] else ""
        raise ShardlmError(f"unexpected arguments: {' '.join(more)}; options begin with --{hint}")
    if len(words) < len(names):
        raise ShardlmError(f"missing arguments: {' '.join(names[len(words) :])}")
    return words


def _with_config(
    main: Callable[..., int | None], overrides: Sequence[tuple[str, str]], words: Sequence[str]
) -> int | None:
    if not _CONFIG.value:
        raise ShardlmError("--config=FILE is needed, for instance --config=configs/tiny.py")
    resolved = resolve(_CONFIG.value, overrides)
    if _PRINT_CONFIG.value:
        print(format_resolved(resolved))
        return 0
    return main(resolved, *words)


def _plain(main: Callable[..., int | None], overrides: Sequence[tuple[str, str]], words: Sequence[str]) -> int | None:
    if _CONFIG.value or _PRINT_CONFIG.value or overrides:
        raise ShardlmError("this command takes no configuration: leave out --config, --config.PATH and --print_config")
    return main(*words)


def split_constraints(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Takes constraints, such as `--mesh.tensor<=8` or `--rules=zero3,hybrid`, out of a command line; (the rest, they
    without the dashes)."""
    found = [word for word in argv if _CONSTRAINT.match(word) and not word.startswith(PREFIX)]
    return [word for word in argv if word not in found], [word.removeprefix("--") for word in found]


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Takes `--config.path=value` and `--config.path value` out of a command line; (the rest, overrides).

    Raises: ShardlmError for an override without a value.
    """
    rest, overrides = [], []
    words = iter(argv)
    for word in words:
        if not word.startswith(PREFIX):
            rest.append(word)
            continue
        path, equals, value = word.removeprefix(PREFIX).partition("=")
        if not equals:
            value = next(words, "--")
            if value.startswith("--"):
                raise ShardlmError(f"{word} needs a value: {word}=VALUE")
        overrides.append((path, value))
    return rest, overrides
