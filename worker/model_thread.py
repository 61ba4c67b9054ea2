"""The model in a thread of its own: one step at a time, while the event loop does something else."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from worker.core.step import StepPlan, StepResult


class StepRunner(Protocol):
    """The model on its pool."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step; called from one thread at a time."""
        ...


@dataclass(slots=True)
class StepCounts:
    """Since the process started."""

    steps: int = 0
    """Forward passes begun."""
    computed_tokens: int = 0
    """Put through the model."""
    failed_steps: int = 0
    """That raised."""
    step_seconds: float = 0.0
    """In which a step ran."""


class ModelThread:
    """Runs steps in the event loop's default executor, which is to have one thread."""

    def __init__(self, runner: StepRunner, counts: StepCounts, over: Callable[[], None]) -> None:
        """`over` is called on the event loop when a step is over, however it ended."""
        self._runner = runner
        self._counts = counts
        self._over = over
        self._step: asyncio.Future[StepResult] | None = None
        self._began = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether a step has begun and was not ended yet."""
        return self._step is not None

    @property
    def is_over(self) -> bool:
        """Whether that step can be ended."""
        return self._step is not None and self._step.done()

    @property
    def has_failed(self) -> bool:
        """Whether it has raised."""
        return self._step is not None and self._step.done() and self._step.exception() is not None

    def begin(self, plan: StepPlan) -> None:
        """Begin a step."""
        assert self._step is None, "one step at a time"
        self._counts.steps += 1
        self._counts.computed_tokens += sum(len(chunk.tokens) for chunk in plan.chunks)
        loop = asyncio.get_running_loop()
        self._began = loop.time()
        self._step = loop.run_in_executor(None, self._runner.execute, plan)
        self._step.add_done_callback(lambda _: self._over())

    def end(self) -> StepResult | BaseException:
        """What came of the step, which is over: its result, or what it raised."""
        assert self._step is not None, "no step has begun"
        step, self._step = self._step, None
        self._counts.step_seconds += asyncio.get_running_loop().time() - self._began
        failure = step.exception()
        self._counts.failed_steps += failure is not None
        return step.result() if failure is None else failure

    async def until_over(self) -> None:
        """Return when no step runs."""
        if self._step is not None:
            await asyncio.wait({self._step})
