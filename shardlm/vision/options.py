"""The vision_config of a config.json, read so that no option is overlooked, as models/hf_options.py reads those of the
text."""

from collections.abc import Mapping, Sequence
from typing import Any

from shardlm.errors import ShardlmError
from shardlm.models.hf_options import ACTIVATIONS, Options
from shardlm.ops.swiglu import Activation

# Of generation and of training, which older versions of transformers wrote into every part of a config.json.
BESIDE = (
    *("diversity_penalty", "encoder_no_repeat_ngram_size", "length_penalty", "max_length", "min_length"),
    *("no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences", "repetition_penalty"),
    *("temperature", "tie_word_embeddings", "top_k", "top_p", "typical_p", "pruned_heads", "projection_dim"),
    *(
        "is_composition",
        "initializer_factor",
        "drop_path_rate",
        "hidden_dropout",
        "hidden_dropout_prob",
        "gradient_checkpointing",
    ),
)


def vision_options(told: Mapping[str, Any], usual: str) -> Options:
    """Those of vision_config, to be asked for and finished; `usual`: the model_type of one that says none."""
    own = Options({"model_type": usual, **told})
    own.aside("image_size", *BESIDE)
    own.only("num_channels", 3)
    return own


def activation_of(name: str) -> Activation:
    """By config.json's name. Raises ShardlmError for one that there is not."""
    if name not in ACTIVATIONS:
        raise ShardlmError(f"config.json has the activation {name!r} in what sees; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def layers_used(layers: int, feature: int | Sequence[int]) -> int:
    """How many layers run, of `layers`, where vectors are taken after that of `vision_feature_layer`: -1 the last, 1
    the first. Raises ShardlmError for those of several."""
    if not isinstance(feature, int):
        if len(feature) != 1:
            raise ShardlmError(f"config.json has vision_feature_layer={list(feature)}; supported: a single one")
        feature = feature[0]
    found = feature if feature >= 0 else layers + 1 + feature
    if not 0 < found <= layers:
        raise ShardlmError(f"config.json has vision_feature_layer={feature} of {layers} layers; there is no such")
    return found
