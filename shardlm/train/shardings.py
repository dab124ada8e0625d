"""A table of every parameter: its shape, the names of its dimensions, where it rests and what that costs."""

import math

import jax

from shardlm.train.program import Program

HEADER = ("parameter", "shape", "names", "at rest", "MiB/device")


def format_shardings(program: Program) -> str:
    """One aligned line a parameter that is trained, and the totals; bytes are of the float32 master weights."""
    leaves = jax.tree_util.tree_leaves_with_path(program.trained.shapes)
    names = jax.tree.leaves(program.trained.names, is_leaf=lambda leaf: isinstance(leaf, tuple))
    rows, total_bytes, total_parameters = [HEADER], 0, 0
    for (path, leaf), (stack_names, own_names) in zip(leaves, names, strict=True):
        dims = (*stack_names, *own_names)
        nbytes = program.rules.bytes_per_device(leaf.shape, leaf.dtype.itemsize, *dims)
        total_bytes += nbytes
        total_parameters += math.prod(leaf.shape)
        spec = program.rules.rest.spec(*dims)
        name = ".".join(str(getattr(part, "key", part)) for part in path)
        rows.append((name, "x".join(map(str, leaf.shape)), ", ".join(dims), str(tuple(spec)), f"{nbytes / 2**20:.2f}"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    total = f"{total_parameters:,} parameters, {total_bytes / 2**20:,.2f} MiB a device on {program.rules.mesh}"
    return "\n".join([*lines, f"{total}, rules {program.rules.preset}"])
