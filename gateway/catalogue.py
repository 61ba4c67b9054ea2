"""The models that this gateway has the words for, and the workers that serve them now.

A worker serves a model if it says so by name and has the gateway's very tokenizer: another one's token ids would mean
other words.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from gateway.core.fleet import Fleet, WorkerProcess, process_of
from gateway.tokenizer import Tokenizer
from octavo.errors import Draining, NoWorker, UnknownModel
from octavo.records.fleet import WorkerInfo

log = logging.getLogger("octavo.gateway")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model as a gateway knows it."""

    name: str
    """What clients ask for."""
    tokenizer: Tokenizer
    tokenizer_digest: bytes
    """32 bytes."""
    stop_tokens: frozenset[int]
    """Tokens that end a text."""
    public_prefixes: tuple[tuple[int, ...], ...] = ()
    """Beginnings of prompts that are nobody's secret."""


@dataclass(frozen=True, slots=True)
class ModelInService:
    """A model that some worker serves now."""

    name: str
    max_model_tokens: int
    workers: int


class Catalogue:
    """Which workers there are for a request. Reads the fleet view, and writes it when news come."""

    def __init__(self, models: Sequence[ServedModel], fleet: Fleet) -> None:
        """Know `models`, at least one, and find their workers in `fleet`."""
        self._models = {model.name: model for model in models}
        self._fleet = fleet

    def named(self, name: str) -> ServedModel:
        """The model that a request means; no name means the only one.

        Raises:
            UnknownModel: naming those there are.
        """
        if not name and len(self._models) == 1:
            return next(iter(self._models.values()))
        if name not in self._models:
            raise UnknownModel(f"model: {repr(name) if name else 'none named'}; there are: {self._names()}")
        return self._models[name]

    def in_service(self) -> tuple[ModelInService, ...]:
        """The models that some worker serves now, by name."""
        serving = [(name, self._serving(model)) for name, model in sorted(self._models.items())]
        return tuple(
            ModelInService(name, max(worker.pool.max_model_tokens for worker in workers), len(workers))
            for name, workers in serving
            if workers
        )

    def available(self, model: ServedModel) -> list[WorkerInfo]:
        """The workers that take new requests for a model, at least one.

        Raises:
            NoWorker: nobody serves it just now.
            Draining: everybody who serves it is about to leave.
        """
        serving = self._serving(model)
        if not serving:
            raise NoWorker(f"model: no worker serves {model.name!r} now; there are: {self._names()}")
        taking = self.taking(model)
        if not taking:
            raise Draining(f"all {len(serving)} workers of {model.name} finish what they have and take nothing new")
        return taking

    def taking(self, model: ServedModel) -> list[WorkerInfo]:
        """The workers that take new requests for a model. May be none."""
        return [worker for worker in self._serving(model) if not worker.draining]

    def fitting(self, model: ServedModel, tokens: int, but: Collection[WorkerProcess]) -> list[WorkerInfo]:
        """The workers that take a sequence of so many tokens, those in `but` left out. May be none."""
        return [
            worker
            for worker in self.taking(model)
            if worker.pool.capacity_tokens >= tokens and process_of(worker) not in but
        ]

    def change(self, change: Callable[[Fleet], None]) -> tuple[Collection[WorkerProcess], Collection[WorkerInfo]]:
        """Let news change the fleet view, and log who came and went.

        Returns:
            (processes that are there now, workers that are not any more).
        """
        before = _by_process(self._fleet)
        change(self._fleet)
        after = _by_process(self._fleet)
        for newcomer in after.keys() - before.keys():
            self._log_joined(after[newcomer])
        leavers = [info for process, info in before.items() if process not in after]
        for info in leavers:
            log.info("worker_left", extra={"worker": info.worker_id, "epoch": info.epoch})
        return after.keys(), leavers

    def _serving(self, model: ServedModel) -> list[WorkerInfo]:
        return [
            worker
            for worker in self._fleet.workers
            if worker.pool.model == model.name and worker.pool.tokenizer_digest == model.tokenizer_digest
        ]

    def _names(self) -> str:
        return ", ".join(model.name for model in self.in_service()) or "none"

    def _log_joined(self, worker: WorkerInfo) -> None:
        fields = {"worker": worker.worker_id, "epoch": worker.epoch, "model": worker.pool.model}
        model = self._models.get(worker.pool.model)
        if model is None:
            log.warning("worker_of_unknown_model", extra=fields)
        elif model.tokenizer_digest != worker.pool.tokenizer_digest:
            log.error("worker_with_another_tokenizer", extra=fields)
        else:
            log.info("worker_joined", extra=fields)


def _by_process(fleet: Fleet) -> dict[WorkerProcess, WorkerInfo]:
    return {process_of(worker): worker for worker in fleet.workers}
