"""What a model is, for who asks before using it. No jax."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ModelFacts:
    """
    family      of its architecture, as config.json calls it (llama, qwen3_moe)
    parameters  how many numbers it has, adapters aside
    nbytes      of its weights as they are held, of one replica
    held_in     what most of them are held in (BF16, INT8, GPTQ)
    format      of the files: safetensors or gguf
    on_gpu      whether they are on GPUs
    """

    family: str
    parameters: int
    nbytes: int
    held_in: str
    format: str
    on_gpu: bool
    embed_dim: int
    layers: int
    vocab_size: int
