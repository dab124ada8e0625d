"""What the kernels of Mamba 2 (summed_kernel.py, summed_back_kernel.py) fit, and how they cut it: told without Pallas
and jax, for whoever counts what they do."""

ROWS = 64  # tokens that a program looks at together
HEADS = 16  # that share keys and are summed by a program, at most


def has_kernels(chunk: int, H: int, V: int, itemsize: int) -> bool:
    """Of chunks of so many tokens, keys of H numbers and values of V: of 16 bits, and whole tiles."""
    return itemsize == 2 and H in (16, 32, 64, 128, 256) and V in (32, 64, 128) and chunk % ROWS == 0


def parts_of(group: int) -> int:
    """How many programs share the heads of a group."""
    return next(n for n in range(1, group + 1) if group % n == 0 and group // n <= HEADS)
