"""A worker whose model runs one step at a time, as the test says, and two requests to see through whatever happens."""

import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from octavo.records.serve import Submission
from tests.support import books
from tests.support.fakes import FunctionRunner, solo_text
from tests.support.scheduling import submission
from tests.support.worker_service import GatewayStandIn, WorkerService, until
from worker.core.step import StepPlan

POOL = books.pool_spec(num_blocks=64, vocab_size=1000)
LONG = submission(1, range(5), 200)
SHORT = submission(2, range(40, 47), 3)
PATIENCE_SECONDS = 60
"""How long a step may wait to be let through: tests hold it while they start processes anew."""


def solo(wanted: Submission, sample: int = 0) -> list[int]:
    return solo_text(
        wanted.prompt, wanted.max_tokens, vocab_size=POOL.vocab_size, sampling=wanted.sampling, sample=sample
    )


def assert_served(gateway: GatewayStandIn, *requests: Submission) -> None:
    for wanted in requests:
        heard = gateway.heard.of(wanted.request)
        assert heard.error is None
        assert heard.tokens == {sample: solo(wanted, sample) for sample in range(wanted.samples)}


class Turnstile:
    """Lets the model run one step at a time, as the test says."""

    def __init__(self, runner: FunctionRunner) -> None:
        self._open = threading.Semaphore(0)
        self.waiting = 0
        runner.before_step = self._wait

    def _wait(self, _: StepPlan) -> None:
        self.waiting += 1
        assert self._open.acquire(timeout=PATIENCE_SECONDS)

    def let_through(self, steps: int = 1) -> None:
        self._open.release(steps)

    async def until_waiting(self, steps: int) -> None:
        """Until that many steps have begun in all."""
        await until(lambda: self.waiting >= steps)


def computed_once(wanted: Submission) -> int:
    """Tokens put through the model for a request of one sample of which nothing is computed twice, nor found cached."""
    return len(wanted.prompt) + wanted.max_tokens - 1


@asynccontextmanager
async def running_long(worker: WorkerService, runner: FunctionRunner) -> AsyncGenerator[GatewayStandIn]:
    """A long request after its third step, held there; afterwards it must end as if nothing had happened."""
    turnstile, gateway = Turnstile(runner), worker.gateway()
    await gateway.submit(LONG)
    turnstile.let_through(3)
    await turnstile.until_waiting(4)
    yield gateway
    turnstile.let_through(1000)
    await gateway.until_ended(LONG)
    assert_served(gateway, LONG)
