"""Reinforcement learning: a checkpoint samples replies, functions judge them, and it is trained on what they say."""
