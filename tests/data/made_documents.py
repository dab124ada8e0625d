"""Documents whose tokens are known, for `make_shards`."""


def documents_of(lengths: list[int]) -> list[list[int]]:
    """Documents of these lengths whose tokens tell them and their places apart, as far as a byte can."""
    return [[1 + (31 * d + t) % 256 for t in range(n - 1)] + [0] for d, n in enumerate(lengths)]
