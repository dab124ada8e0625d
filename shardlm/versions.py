"""Versions of packages, for what is said beside a measurement. Imports no jax."""

import importlib.metadata
import platform
from collections.abc import Sequence


def versions(names: Sequence[str]) -> dict[str, str]:
    """Python's, and those of the packages that are installed: shardlm itself may be a folder on PYTHONPATH."""
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
