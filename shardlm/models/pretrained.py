"""A model that is a checkpoint of Hugging Face: what a configuration says to train one further."""

import dataclasses
import functools
import json
import pathlib

from shardlm.hf_files import Folder, holds_weights, read_config
from shardlm.hf_quantised import OPTIONS
from shardlm.models import registry
from shardlm.models.text_parts import alone
from shardlm.models.transformer import TransformerConfig


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """folder  with config.json and *.safetensors; weights are read from it when a run begins
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
        and leaves them out. Raises ShardlmError where the folder has none."""
        found = json.loads(self.config) if self.config else dict(read_config(pathlib.Path(self.folder)))
        text = found.get("text_config") or found
        if text.get("num_nextn_predict_layers") and not (self.mtp and (self.config or self._holds_further(text))):
            without = {**text, "num_nextn_predict_layers": 0}
            return without if text is found else {**found, "text_config": without}
        return found

    def _holds_further(self, options: dict) -> bool:
        """Whether the folder has a layer after the last; without any weights, as its config.json says."""
        if not holds_weights(pathlib.Path(self.folder)):
            return True
        own = f"model.layers.{options.get('num_hidden_layers')}."
        names = Folder.open(pathlib.Path(self.folder)).tensors
        return any(name.removeprefix("language_model.").startswith(own) for name in names)

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
