"""An engine of one process that gives its devices' memory to somebody else while nothing runs on it: its programs stay.
It is as before after `Engine.update_weights` and `Runner.allocate`."""

import jax

from shardlm.serve.engine import Engine


def rest(engine: Engine) -> None:
    """Lets go of the weights, of which those that were another's own arrays are left as they are, and of the pages with
    all that was cached. Nothing may be running. Also where it rests already, or has come back in part."""
    runner = engine.runner
    runner.settled()
    runner._parts = [jax.tree.map(_place_of, part) for part in runner._parts]
    for array in jax.tree.leaves(runner._state):
        if isinstance(array, jax.Array):
            array.delete()
    runner._state = runner._shape_of_empty()
    engine.reset_prefix_cache(reset_running_requests=True)


def _place_of(a: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding)
