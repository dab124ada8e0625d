"""What users give the classes that serve, LLM and AsyncLLM, as the configuration of an engine."""

import dataclasses
import difflib
import logging
from collections.abc import Mapping
from typing import Any

from shardlm.errors import ShardlmError
from shardlm.mesh import MeshSpec
from shardlm.serve.engine_config import EngineConfig
from shardlm.serve.other_names import ENGINE, MEANINGLESS

log = logging.getLogger(__name__)


def config_of(sizes: MeshSpec, mesh: MeshSpec | None, options: Mapping[str, Any]) -> EngineConfig:
    """`options`: fields of EngineConfig; None is as good as left out. Raises ShardlmError for others, and where
    mesh and sizes are both given."""
    if mesh is not None and sizes != MeshSpec():
        raise ShardlmError(f"mesh={mesh} and parallel sizes that make {sizes}: give mesh or the sizes, not both")
    for name in sorted(options.keys() & set(MEANINGLESS)):
        log.warning("%s=%r is vLLM's and decides nothing here", name, options[name])
    own = {name: value for name, value in options.items() if name not in MEANINGLESS and value is not None}
    known = [field.name for field in dataclasses.fields(EngineConfig) if field.name != "mesh"]
    if unknown := sorted(own.keys() - set(known)):
        near = difflib.get_close_matches(unknown[0], known, 1)
        hint = ENGINE.get(unknown[0]) or (f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}")
        raise ShardlmError(f"no option {unknown[0]}={own[unknown[0]]!r}; {hint}")
    if own.get("dtype") == "auto":
        own["dtype"] = None
    return EngineConfig(mesh=sizes if mesh is None else mesh, **own)
