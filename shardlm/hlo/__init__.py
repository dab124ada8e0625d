"""Reads optimised HLO, the text of a compiled program: what it sends between devices and what it computes. Pure text,
no jax: `jax.stages.Compiled.as_text()` is the input."""
