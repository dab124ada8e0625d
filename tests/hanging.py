"""A process of a job, as its launcher's variables describe it: the one named hangs, the others in a collective that it
never enters."""

import os
import sys
import threading

import jax
from jax.experimental.multihost_utils import process_allgather

from shardlm.distributed import detect, joined
from shardlm.train.stuck import Patience

with joined(detect(os.environ)):
    me = jax.process_index()
    process_allgather(me)
    patience = Patience(2.0, wait=4.0)
    if sys.argv[1:] == [str(me)]:
        patience.begin(11, "data")
        threading.Event().wait()
    patience.begin(11, "step")
    process_allgather(me)
