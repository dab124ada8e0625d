"""Which modules of a model a configuration of PEFT names, and what it says of each, by PEFT's own rules (peft 0.21,
check_target_module_exists and get_pattern_key): by the ends of their names, or by expressions for the whole of them."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from shardlm.errors import ShardlmError

Config = Mapping[str, Any]
ALL = "all-linear"
OPTIONS = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
_LAYER = r".*?\.[^.]*\.(\d+)\."  # the first number in a name


def names_of(config: Config) -> Callable[[str], bool]:
    """Whether a module, such as model.layers.0.self_attn.q_proj, has an adapter. All have where the configuration does
    not say which."""
    wanted, excluded = config.get("target_modules"), config.get("exclude_modules")
    if not wanted or (isinstance(wanted, str) and wanted.lower() == ALL):
        return lambda module: not _fits(excluded, module)
    return lambda module: not _fits(excluded, module) and _fits(wanted, module) and _in_layer(config, module)


def by_ends(config: Config) -> list[str]:
    """Ends of names, each of which is to be found in any layer; none where it is said otherwise which modules are
    adapted."""
    named = config.get("target_modules")
    return [] if isinstance(named, str) or any(config.get(option) for option in OPTIONS[1:]) else list(named or ())


def ends_with(end: str, modules: Iterable[str]) -> bool:
    """Whether one of the modules has this name, or this end of one."""
    return any(module == end or module.endswith(f".{end}") for module in modules)


def own(config: Config, pattern: str, module: str, usual: float) -> float:
    """What the first expression of `rank_pattern` or `alpha_pattern` that names a module gives it, else `usual`."""
    patterns = config.get(pattern) or {}
    return next((n for name, n in patterns.items() if re.match(rf"(.*\.)?({name})$", module)), usual)


def check(config: Config, where: str) -> None:
    """Raises ShardlmError for options that are no names, expressions or layers. `where`: the file."""
    for option in OPTIONS:
        given = config.get(option)
        try:
            if option == "layers_to_transform":
                _layers(given)
            elif isinstance(given, str):
                re.compile(given)
            elif not all(isinstance(name, str) for name in given or ()):
                raise TypeError
            if option == "layers_pattern":
                [re.compile(name) for name in given or ()]
        except (TypeError, re.error):
            kind = "layers' numbers" if option == "layers_to_transform" else "an expression, or a list of names"
            raise ShardlmError(f"{where} has {option}={given!r:.200}; it is {kind}") from None


def _fits(wanted: str | Iterable[str] | None, module: str) -> bool:
    if not wanted:
        return False
    return (
        re.fullmatch(wanted, module) is not None
        if isinstance(wanted, str)
        else any(ends_with(end, [module]) for end in wanted)
    )


def _in_layer(config: Config, module: str) -> bool:
    """As layers_to_transform says, which holds for ends of names and not for whole ones."""
    wanted, layers = config["target_modules"], _layers(config.get("layers_to_transform"))
    if not layers or isinstance(wanted, str) or module in wanted:
        return True
    patterns = config.get("layers_pattern") or ()
    patterns = [patterns] if isinstance(patterns, str) else patterns
    tried = [rf"(?:^|.*?\.)(?:{name})\.(\d+)\." for name in patterns] or [_LAYER]
    found = next(filter(None, (re.match(one, module) for one in tried)), None)
    return found is not None and int(found[found.lastindex]) in layers


def _layers(given: Any) -> list[int]:
    layers = [given] if isinstance(given, int) else list(given or ())
    if not all(isinstance(layer, int) and not isinstance(layer, bool) for layer in layers):
        raise TypeError
    return layers
