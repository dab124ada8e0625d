"""shardlm plans, trains and serves large language models. Importing it imports no jax and starts no backend."""

__version__ = "0.1.0"
