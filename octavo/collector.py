"""Where many objects are made of which none is garbage, the garbage collector would go through them for nothing."""

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def collector_at_rest() -> Generator[None]:
    """It goes through nothing meanwhile; for moments, and one of them within another at most."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
