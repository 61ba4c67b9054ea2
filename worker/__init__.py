"""Holds a KV pool and runs a model; asks for blocks, never chooses them."""

import os

# Threads of torch that wait for one another spin unless told otherwise before torch is imported, and on a machine that
# runs more than one busy process they spin away the very time they wait for: a step took 2.2 s in place of 0.18.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
