"""shardlm plans, trains and serves large language models. Importing it imports no jax and starts no backend."""

__version__ = "0.1.0"


def __getattr__(name: str):
    """`shardlm.load`, whose import needs jax."""
    if name == "load":
        from shardlm.opened import load

        return load
    raise AttributeError(f"module 'shardlm' has no attribute {name!r}")
