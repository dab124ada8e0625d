"""Flax NNX modules: parameters with named dimensions, attention, MLP, blocks and the stack that scans them."""
