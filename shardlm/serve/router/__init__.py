"""A router in front of several servers: which of them a request goes to, and its way there and back. No jax."""
