"""The serving wing: what a request is, which tokens run next, where their keys and values rest, and what runs them."""
