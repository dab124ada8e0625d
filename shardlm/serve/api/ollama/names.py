"""Names of models as Ollama understands them: `llama3.2` is registry.ollama.ai/library/llama3.2:latest, in capitals or
not."""

from collections.abc import Iterable

_USUAL = ("registry.ollama.ai/", "library/")


def tagged(name: str) -> str:
    """As Ollama lists it: always with a tag."""
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


def known_as(name: str, here: Iterable[str]) -> str | None:
    """Which of the names that are here is meant, the same text before another spelling; None: none is."""
    names = list(here)
    if name in names:
        return name
    return next((one for one in names if _full(one) == _full(name)), None)


def listed_as(name: str, here: Iterable[str]) -> str:
    """Which of the names that are here is listed as this by Ollama, whose clients ask OpenAI's paths by it as well (VS
    Code's Copilot Chat does); others as they are."""
    names = list(here)
    return name if name in names else next((one for one in names if tagged(one) == name), name)


def _full(name: str) -> str:
    name = name.casefold()
    for usual in _USUAL:
        name = name.removeprefix(usual)
    return tagged(name)
