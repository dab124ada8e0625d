"""A model that is a checkpoint of Hugging Face: what a configuration says to train one further."""

import dataclasses
import functools
import json
import pathlib

from shardlm.errors import ShardlmError
from shardlm.hf_files import Folder, holds_weights, read_config
from shardlm.hf_quantised import OPTIONS
from shardlm.models import registry
from shardlm.models.text_parts import alone
from shardlm.models.transformer_config import TransformerConfig


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """folder  with config.json and weights; these are read from it when a run begins
    length  longest row of this use, which decides the rotation of some stretched models (ops/rope.py); 0: the length
            that the model was first trained with
    config  the text of its config.json, kept with a run so that its checkpoints outlive the folder; "": read it
    mtp     whether the modules that predict further tokens are trained and kept, where the checkpoint has any
    """

    folder: str
    length: int = 0
    config: str = ""
    mtp: bool = True

    @functools.cached_property
    def options(self) -> dict:
        """config.json, with as many modules that predict further tokens as there are: transformers keeps their number
        and leaves them out. Raises ShardlmError where the folder has none, and for a run."""
        found = json.loads(self.config) if self.config else dict(read_config(pathlib.Path(self.folder)))
        if "model_type" not in found and "model" in found:
            raise ShardlmError(
                f"{self.folder} is a run, and a checkpoint of Hugging Face is needed: write it as one (python -m "
                f"launch.convert --checkpoint={self.folder} --output=FOLDER), and name that folder"
            )
        text, modules = found.get("text_config") or found, registry.modules(found)
        option = modules.option if modules else "num_nextn_predict_layers"
        said = text.get(option) or 0
        count = said if self.mtp else 0
        if (said or modules) and self.mtp and not self.config and holds_weights(pathlib.Path(self.folder)):
            prefix = modules.prefix if modules else f"model.layers.{text.get('num_hidden_layers')}."
            count = (said or 1) if self._holds(prefix) else 0
        if count == said:
            return found
        counted = {**text, option: count}
        return counted if text is found else {**found, "text_config": counted}

    def _holds(self, prefix: str) -> bool:
        """Whether the folder has tensors whose names begin so."""
        names = Folder.open(pathlib.Path(self.folder)).tensors
        return any(name.removeprefix("language_model.").startswith(prefix) for name in names)

    def transformer(self) -> TransformerConfig:
        """The decoder it describes."""
        return registry.transformer(self.options, self.length)

    def to_hf(self) -> dict:
        """config.json, for writing a checkpoint of the same architecture, or of the language model in one that also
        sees; not quantised."""
        return {name: value for name, value in alone(self.options).items() if name not in OPTIONS}

    def pinned(self) -> "Pretrained":
        """With its options inside."""
        return dataclasses.replace(self, config=json.dumps(self.options))
