"""Which modules a configuration names, and what its patterns give them: as peft 0.21.2 says of the same
(check_target_module_exists, get_pattern_key)."""

import pytest

from shardlm.errors import ShardlmError
from shardlm.peft_modules import check, names_of, own

MODULES = (
    "model.layers.0.self_attn.q_proj",
    "model.layers.2.self_attn.q_proj",
    "model.layers.12.mlp.up_proj",
    "model.language_model.layers.0.self_attn.q_proj",
    "transformer.h.2.attn.c_attn",
    "lm_head",
    "q_proj",
    "model.layers.1.mlp.experts.0.up_proj",
)
QU, QUC = ["q_proj", "up_proj"], ["q_proj", "up_proj", "c_attn"]
BOTH = (  # as unsloth writes it
    r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|up_proj).*?)|"
    r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|up_proj)))"
)
NAMED = [  # (the configuration, whether it names each of the modules)
    ({"target_modules": ["q_proj"]}, "11010010"),
    ({"target_modules": ["proj"]}, "00000000"),
    ({"target_modules": "q_proj"}, "00000010"),
    ({"target_modules": r".*\.(q|up)_proj"}, "11110001"),
    ({"target_modules": BOTH}, "11110000"),
    ({"target_modules": [MODULES[0], "up_proj"], "layers_to_transform": [2, 12]}, "10100000"),
    ({"target_modules": QUC, "layers_to_transform": 2}, "01001010"),
    ({"target_modules": QUC, "layers_to_transform": [2], "layers_pattern": "h"}, "00001010"),
    ({"target_modules": QU, "layers_to_transform": [0], "layers_pattern": ["h", "layers"]}, "10010010"),
    ({"target_modules": QU, "layers_to_transform": []}, "11110011"),
    ({"target_modules": QU, "layers_to_transform": [1]}, "00000011"),
    ({"target_modules": QU, "exclude_modules": ["self_attn.q_proj"]}, "00100011"),
    ({"target_modules": QU, "exclude_modules": r".*layers\.\d\..*"}, "00100010"),
    ({"target_modules": "all-linear"}, "11111111"),
]
PATTERNS = {
    "^model.layers.0.self_attn.q_proj": "10000000",
    "q_proj": "11010010",
    "up_proj|q_proj": "11110011",
    r"layers\.\d+\.self_attn.*": "11010000",
    "proj": "00000000",
    r"model\.layers\.(0|1)\..*": "10000001",
    "0.self_attn.q_proj": "10010000",
}


@pytest.mark.parametrize("config, expected", NAMED)
def test_which_modules_are_named(config, expected):
    check(config, "here")
    assert "".join(str(int(names_of(config)(module))) for module in MODULES) == expected


def test_what_patterns_give():
    for pattern, expected in PATTERNS.items():
        config = {"alpha_pattern": {pattern: 1, ".*": 0}}
        assert "".join(str(own(config, "alpha_pattern", module, 7)) for module in MODULES) == expected
    assert own({}, "alpha_pattern", MODULES[0], 7) == 7


def test_options_of_other_kinds():
    for option, given in (
        ("target_modules", "("),
        ("target_modules", [3]),
        ("exclude_modules", 3),
        ("layers_to_transform", ["a"]),
        ("layers_to_transform", True),
        ("layers_pattern", ["("]),
    ):
        with pytest.raises(ShardlmError, match=f"^here has {option}="):
            check({option: given}, "here")
