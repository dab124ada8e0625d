"""The transformers side of the serving comparison: greedy generation of a random Llama batch by batch, as `launch.bench
serve` does it offline, on the CPU in float32 or with --device=cuda --dtype=bfloat16 on a GPU. Prints one JSON line.
Needs torch and transformers.

python benchmarks/peers/transformers_generate.py --batches=1,8,32
"""

import argparse
import json
import time

import torch
import transformers

SIZES = {
    "vocab_size": 8192,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "intermediate_size": 2048,
    "max_position_embeddings": 4096,
}


def timed(model, batch: int, prompt_len: int, new: int) -> float:
    tokens = torch.randint(0, model.config.vocab_size, (batch, prompt_len), device=model.device)
    started = time.perf_counter()
    model.generate(tokens, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--prompt_len", type=int, default=128)
    parser.add_argument("--output_len", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sizes_json", default="{}", help="fields of LlamaConfig as JSON, in place of the model's")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_default_dtype(getattr(torch, args.dtype))  # an 8B model made in float32 first would need twice the memory
    with torch.device(args.device):
        config = transformers.LlamaConfig(**SIZES | json.loads(args.sizes_json))
        model = transformers.LlamaForCausalLM(config).eval()
    rows = []
    for batch in map(int, args.batches.split(",")):
        timed(model, batch, args.prompt_len, 2)
        first = timed(model, batch, args.prompt_len, 1)
        seconds = timed(model, batch, args.prompt_len, args.output_len)
        decoded = batch * (args.output_len - 1)
        rows.append(
            {
                "batch": batch,
                "seconds": seconds,
                "prefill_seconds": first,
                "decode_tokens_per_second": decoded / (seconds - first),
                "output_tokens_per_second": batch * args.output_len / seconds,
            }
        )
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({"offline": rows, "threads": args.threads, "versions": versions}))


if __name__ == "__main__":
    main()
