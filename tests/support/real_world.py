"""The real scheduler, a real ledger and a real model, with no service between them: steps by hand, in milliseconds."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from octavo import models
from octavo.models import ModelFolder
from octavo.records.serve import Submission
from tests.support.oracle import solo_greedy
from tests.support.scheduling import World, submission
from worker.draft_model import DraftModel
from worker.kv_pool import KVPool
from worker.model.loader import LoadedModel, Road, load
from worker.runner import Runner

BLOCK_SIZE = 16
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Loaded:
    """A model in float32, ready for any number of worlds."""

    folder: ModelFolder
    model: LoadedModel


@lru_cache(maxsize=2)
def loaded(folder: Path, road: Road = "auto") -> Loaded:
    """The model of a folder, on the road and the attention that a worker here would choose unless told."""
    described = models.find(str(folder), folder.parent)
    return Loaded(described, load(described, dtype=torch.float32, device=CPU, block_size=BLOCK_SIZE, road=road))


def draft_model(folder: Path, num_blocks: int = 32) -> DraftModel:
    """The model of a folder, to guess."""
    served = loaded(folder)
    pool = KVPool(served.model.shape, num_blocks, CPU)
    pool.planes.fill_(torch.nan)
    return DraftModel(
        Runner(served.model.forward, pool, CPU).execute,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_model_tokens=served.folder.max_model_tokens,
    )


class RealWorld(World):
    """A world whose texts are those of a model; its pool holds NaN wherever nobody wrote."""

    def __init__(self, folder: Path, *, num_blocks: int = 64, road: Road = "auto", **limits: Any) -> None:
        """`limits` as for World."""
        self.folder = folder
        served = loaded(folder, road)
        super().__init__(
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            vocab_size=served.folder.vocab_size,
            max_model_tokens=served.folder.max_model_tokens,
            **limits,
        )
        pool = KVPool(served.model.shape, num_blocks, CPU)
        pool.planes.fill_(torch.nan)
        self.runner = Runner(served.model.forward, pool, CPU)  # pyright: ignore[reportAttributeAccessIssue]

    def ask_for(self, number: int, prompt: Sequence[int], max_tokens: int, **fields: Any) -> Submission:
        """Submit a request, greedy unless told."""
        wanted = submission(number, prompt, max_tokens, **fields)
        self.submit(wanted)
        return wanted

    def text(self, request: int, sample: int = 0) -> list[int]:
        """What the gateway has heard."""
        return self.gateways.of(request).tokens.get(sample, [])

    def solo(self, request: int, sample: int = 0) -> list[int]:
        """What plain transformers generates."""
        wanted = self.submissions[request]
        assert wanted.sampling.temperature == 0
        return solo_greedy(self.folder, wanted.prompt, wanted.max_tokens)

    def assert_all_served(self) -> None:
        """Every request has the text of plain transformers, and nothing is left behind."""
        for request in self.submissions:
            self.assert_served(request)
        self.assert_at_rest()
