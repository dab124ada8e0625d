"""A model that is a checkpoint of Hugging Face: what a configuration says to train one further."""

import dataclasses
import functools
import json
import pathlib

from shardlm.hf_files import read_config
from shardlm.models import registry
from shardlm.models.transformer import TransformerConfig


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """folder  with config.json and *.safetensors; weights are read from it when a run begins
    length  longest row of this use, which decides the rotation of some stretched models (ops/rope.py); 0: the length
            that the model was first trained with
    config  the text of its config.json, kept with a run so that its checkpoints outlive the folder; "": read it
    """

    folder: str
    length: int = 0
    config: str = ""

    @functools.cached_property
    def options(self) -> dict:
        """config.json. Raises ShardlmError where the folder has none."""
        return json.loads(self.config) if self.config else dict(read_config(pathlib.Path(self.folder)))

    def transformer(self) -> TransformerConfig:
        """The decoder it describes."""
        return registry.transformer(self.options, self.length)

    def to_hf(self) -> dict:
        """config.json, for writing a checkpoint of the same architecture; not quantised, and without the layers that
        predict further tokens (weights.py leaves them out)."""
        changed = {"num_nextn_predict_layers": 0} if "num_nextn_predict_layers" in self.options else {}
        return {name: value for name, value in self.options.items() if name != "quantization_config"} | changed

    def pinned(self) -> "Pretrained":
        """With its options inside."""
        return dataclasses.replace(self, config=json.dumps(self.options))
