"""How calls are tried again, and what their failures are called."""

import random
import time
from collections.abc import Generator
from contextlib import contextmanager

import grpc

from gateway.core.retries import Retries
from octavo.errors import OctavoError
from octavo.status import error_from


class Tries:
    """Of one call: how many there may still be, and how much time is left."""

    def __init__(self, retries: Retries, timeout_seconds: float | None) -> None:
        self._retries = retries
        self._ends = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        self._made = 0

    @property
    def seconds_left(self) -> float | None:
        """None: as many as it takes."""
        return None if self._ends is None else max(0.0, self._ends - time.monotonic())

    def pause_after(self, failure: Exception) -> float:
        """Seconds until the next try. Raises the failure where none may follow."""
        self._made += 1
        asked = failure.retry_after_seconds if isinstance(failure, OctavoError) else None
        pause = self._retries.pause(self._made, random.random(), asked)
        left = self.seconds_left
        if pause is None or (left is not None and pause >= left):
            raise failure
        return pause


@contextmanager
def failures_of(address: str) -> Generator[None]:
    """Turn an RPC's failure into the gateway's own error, or into the built-in one that says what happened."""
    try:
        yield
    except grpc.RpcError as failure:
        if (error := error_from(failure)) is not None:
            raise error from failure
        match failure.code():
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                raise TimeoutError(f"gateway {address}: {failure.details()}") from failure
            case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED:  # a server that ends cancels what is left
                raise ConnectionError(f"gateway {address}: {failure.details()}") from failure
            case _:
                raise
