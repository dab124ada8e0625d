"""Speculative decoding: several tokens a step of the model, and the same text as without it."""
