"""Holds a KV pool and runs a model; asks for blocks, never chooses them."""

import os

# How long torch's threads spin while they wait for one another, which they read when torch is imported. Left alone they
# spin for milliseconds, and where more than one busy process runs they spin away the very time they wait for: a step
# took 2.2 s in place of 0.18. Not to spin costs as well, as they meet hundreds of times a step, microseconds apart, and
# waking takes longer: so a moment, some 50 microseconds. A step of one stream takes 13.1 ms with it, 14.3 without, and
# beside another busy process 28 instead of 22.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
