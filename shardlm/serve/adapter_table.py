"""Which adapters are loaded, by name, and where. No jax."""

import dataclasses
import os
from collections.abc import Collection, Sequence
from typing import Any

from shardlm.errors import ShardlmError


@dataclasses.dataclass(frozen=True)
class LoRARequest:
    """Which adapter a prompt is for; of vLLM's name and fields. Here the name says which one it is.

    lora_path  adapters of PEFT or a run with `lora.rank`; not needed of one that is loaded
    """

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""

    def __post_init__(self):
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise ShardlmError(f"LoRARequest needs a lora_name, which is a text; given is {self.lora_name!r}")
        if not isinstance(self.lora_path, str | os.PathLike):
            raise ShardlmError(f"LoRARequest has lora_path={self.lora_path!r}; give a folder")


LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None  # for all prompts, or for each


@dataclasses.dataclass(frozen=True)
class Room:
    """For so many adapters, each of this rank or a lower one."""

    count: int = 0
    rank: int = 0


NO_ROOM = Room()


@dataclasses.dataclass(frozen=True)
class Adapter:
    """One that is loaded. number: from 1, its part; 0: none, the model as it is. version: of all that were ever
    loaded, for what is cached of it."""

    name: str = ""
    path: str = ""
    number: int = 0
    version: int = 0


class AdapterTable:
    """Those that an engine, or all replicas of one, have room for, and has, by name."""

    def __init__(self, room: Room, base: Any = None):
        """`base`: the configuration of the architecture that they stand on (opened.Found.source), where it is known."""
        self.room, self.base = room, base
        self._loaded: dict[str, Adapter] = {}  # replaced and not changed: other threads read it
        self._used: dict[str, int] = {}  # names, the one that was used last at the end
        self._versions = 0

    @property
    def loaded(self) -> tuple[Adapter, ...]:
        """In the order in which they came."""
        return tuple(sorted(self._loaded.values(), key=lambda adapter: adapter.version))

    def __contains__(self, name: str) -> bool:
        return name in self._loaded

    def of(self, name: str) -> Adapter:
        """ "" is none. Raises ShardlmError for one that is not loaded."""
        if not name:
            return Adapter()
        if name not in self._loaded:
            here = f"; loaded are {', '.join(self._loaded)}" if self._loaded else "; none is loaded"
            raise ShardlmError(f"there is no adapter {name!r}{here}")
        self._used[name] = self._used.pop(name)
        return self._loaded[name]

    def salted(self, salt: str, adapter: str) -> str:
        """What requests with an adapter share pages by, within those of equal `salt`. Raises as `of`."""
        version = self.of(adapter).version
        return f"{version}\0{salt}" if self.room.count else salt

    def make_room(self, wanted: Collection[str]) -> None:
        """Lets go of the one that was used longest ago, where all places are taken and there is one that is not
        `wanted`."""
        others = [name for name in self._used if name not in wanted]
        if len(self._loaded) >= self.room.count and others:
            self.leave(others[0])

    def entering(self, name: str, path: str, used: Collection[int]) -> Adapter:
        """Where a new one goes; `used` are the numbers that requests have. Raises ShardlmError without room."""
        held = {adapter.number for adapter in self._loaded.values() if adapter.name != name}
        free = [number for number in range(1, self.room.count + 1) if number not in held and number not in used]
        if not free:
            busy = len(set(used) - held - {0})
            waits = f", and requests run of {busy} that were unloaded" if busy else ""
            raise ShardlmError(
                f"no room for the adapter {name!r}: max_loras={self.room.count}, loaded are "
                f"{', '.join(self._loaded) or 'none'}{waits}; unload one, or start with a larger max_loras"
            )
        return Adapter(name, str(path), free[0], self._versions + 1)

    def enter(self, adapter: Adapter) -> None:
        """It is in its place; another of its name is no more."""
        self._versions = adapter.version
        self._used.pop(adapter.name, None)
        self._used[adapter.name] = adapter.number
        self._loaded = self._loaded | {adapter.name: adapter}

    def leave(self, name: str) -> None:
        """Requests that run go on with it. Raises ShardlmError for one that is not loaded."""
        del self._used[self.of(name).name]
        self._loaded = {other: adapter for other, adapter in self._loaded.items() if other != name}
