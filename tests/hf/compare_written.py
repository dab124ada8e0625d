"""Opens pairs of folders with transformers, and prints the largest difference of the logits of each:

python tests/hf/compare_written.py ORIGINALS WRITTEN NAME ...  # needs torch and transformers
"""

import json
import pathlib
import sys

import torch
import transformers
from safetensors.torch import load_file


def logits(folder: pathlib.Path, tokens: torch.Tensor) -> torch.Tensor:
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    seeing = "vision_config" in json.loads((folder / "config.json").read_text())
    kind = transformers.AutoModelForImageTextToText if seeing else transformers.AutoModelForCausalLM
    return kind.from_pretrained(folder, **options)(input_ids=tokens, use_cache=False).logits


if __name__ == "__main__":
    originals, written = map(pathlib.Path, sys.argv[1:3])
    found = {}
    with torch.no_grad():
        for name in sys.argv[3:]:
            tokens = load_file(originals / name / "expected.safetensors.reference")["tokens"].long()
            found[name] = (logits(originals / name, tokens) - logits(written / name, tokens)).abs().max().item()
    print(json.dumps(found))
