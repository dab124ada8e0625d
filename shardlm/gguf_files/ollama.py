"""Models that Ollama has pulled, by the names that it gives them (llama3.2, llama3.2:3b): which of its files holds the
weights. A manifest lists a model's layers by digest, and blobs are named by theirs
(https://github.com/ollama/ollama/blob/main/docs/faq.mdx, "Where are models stored?"). Its templates and parameters are
written for its own engine and left aside: the weights' file has the template that the model came with. No jax."""

import json
import os
import pathlib
import re
from collections.abc import Iterator

from shardlm.errors import ShardlmError

# Without an owner, which is the hub's on Hugging Face.
_NAME = re.compile(r"([\w.-]+)(?::([\w.-]+))?")
_LAYER = "application/vnd.ollama.image."


def installed(name: str) -> pathlib.Path | None:
    """The file of a model's weights; None where Ollama has none of this name. Raises ShardlmError for one that is more
    than such a file."""
    for manifest in _manifests(name):
        layers = json.loads(manifest.read_bytes())["layers"]
        weights, adapters = (
            [one["digest"] for one in layers if one["mediaType"] == _LAYER + kind] for kind in ("model", "adapter")
        )
        if adapters or len(weights) != 1:
            raise ShardlmError(
                f"Ollama's {name} has {len(weights)} files of weights and {len(adapters)} adapters; what is opened is "
                "one file of weights, and adapters are those of PEFT"
            )
        blob = manifest.parents[4] / "blobs" / weights[0].replace(":", "-")
        if not blob.is_file():
            raise ShardlmError(f"Ollama's {name} lacks its weights, {blob}; pull it again: ollama pull {name}")
        return blob
    return None


def _manifests(name: str) -> Iterator[pathlib.Path]:
    """Of this name, wherever Ollama keeps its models: as its server's service on Linux, too."""
    if not (parts := _NAME.fullmatch(name)) or parts[1].startswith("."):
        return
    given = os.environ.get("OLLAMA_MODELS")
    places = [given] if given else ["~/.ollama/models", "/usr/share/ollama/.ollama/models"]
    for place in places:
        tag = pathlib.Path("library", parts[1], parts[2] or "latest")
        manifest = pathlib.Path(place).expanduser() / "manifests" / "registry.ollama.ai" / tag
        if os.access(manifest, os.R_OK) and manifest.is_file():
            yield manifest
