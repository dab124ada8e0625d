"""Writes tests/hf/references/llama/beams.json: what transformers' beam search finds there, by the number of beams,
where nothing ends a text. (Where something does, transformers leaves out ends that are none of the likeliest tokens of
all beams, as many as there are beams; vLLM, which is followed, keeps them.) Needs torch and transformers."""

import json
import pathlib

import torch
import transformers
from safetensors.torch import load_file

FOLDER = pathlib.Path(__file__).parent / "references" / "llama"
NEW = 10


def main() -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    tokens = load_file(str(FOLDER / "expected.safetensors.reference"))["tokens"][:1].long()
    how = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = {}
    for width in (2, 4, 10):
        options = {"num_beams": width, "num_return_sequences": width, "return_dict_in_generate": True}
        out = model.generate(tokens, output_scores=True, **options, **how)
        sums = (out.sequences_scores * NEW).tolist()
        found[width] = {"tokens": out.sequences[:, tokens.shape[1] :].tolist(), "sums": sums}
    (FOLDER / "beams.json").write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
