"""A runner driven by hand: a pool that holds NaN wherever nobody wrote, and block tables that are scrambled."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from octavo import models
from octavo.ids import BlockId, SequenceId
from octavo.records.sampling import SamplingParams
from worker.core.step import Chunk, Draw, StepPlan
from worker.kernels import Attend
from worker.kv_pool import KVPool
from worker.model.graphs import Capture, DecodeGraphs
from worker.model.loader import Road, load
from worker.runner import Runner

BLOCK_SIZE = 16
CPU = torch.device("cpu")
GREEDY = SamplingParams()


@dataclass(slots=True)
class Stream:
    """A sequence that is computed `chunk` tokens at a time, then goes on by what it draws."""

    prompt: Sequence[int]
    count: int
    """Tokens wanted after the prompt."""
    chunk: int = 10_000
    sampling: SamplingParams = GREEDY
    sample: int = 0
    begins: int = 0
    """The step in which its first chunk runs."""
    table: list[BlockId] = field(default_factory=list)
    drawn: list[int] = field(default_factory=list)
    computed: int = 0

    @property
    def done(self) -> bool:
        return len(self.drawn) == self.count

    def next_chunk(self, sequence: int) -> Chunk:
        tokens = [*self.prompt, *self.drawn][self.computed : self.computed + self.chunk]
        end = self.computed + len(tokens)
        draws = (Draw(self.sampling, self.sample, end),) if end >= len(self.prompt) else ()
        return Chunk(
            sequence=SequenceId(sequence), start=self.computed, tokens=tuple(tokens), table=self.table, draws=draws
        )

    def take(self, chunk: Chunk, drawn: Sequence[int]) -> None:
        self.computed = chunk.end
        self.drawn += drawn


class HandRunner:
    """A runner and its pool, and blocks handed out in no order."""

    def __init__(
        self,
        folder: Path,
        attend: Attend | None = None,
        num_blocks: int = 300,
        dtype: torch.dtype = torch.float32,
        *,
        adapter: Path | None = None,
        kv_dtype: torch.dtype | None = None,
        road: Road = "auto",
        shares_prefixes: bool = False,
        device: torch.device = CPU,
        capture: Capture | None = None,
        most_decodes: int = 8,
        longest: int = 20 * BLOCK_SIZE,
    ) -> None:
        """`capture`: run decodes from graphs, of up to `most_decodes` sequences of up to `longest` positions."""
        described = models.find(f"{folder}+{adapter}" if adapter else str(folder), folder.parent)
        loaded = load(
            described, dtype=dtype, kv_dtype=kv_dtype, device=device, block_size=BLOCK_SIZE, attend=attend, road=road
        )
        self.pool = KVPool(loaded.shape, num_blocks, device, has_idle_block=capture is not None)
        graphs = None
        if capture is not None:
            graphs = DecodeGraphs(loaded.forward, self.pool, device, capture, most=most_decodes, longest=longest)
        self.runner = Runner(loaded.forward, self.pool, device, shares_prefixes=shares_prefixes, graphs=graphs)
        for layer in range(loaded.shape.num_layers):
            for tensor in self.pool.layer(layer):
                tensor.fill_(torch.nan)
        self._free = [BlockId(block) for block in range(num_blocks)]
        random.Random(0).shuffle(self._free)

    def blocks_for(self, positions: int) -> list[BlockId]:
        """A table of blocks that nobody has."""
        return [self._free.pop() for _ in range(-(-positions // BLOCK_SIZE))]

    def run(self, *streams: Stream) -> list[list[int]]:
        """All streams together, each from its step on, until they are done: what each drew."""
        for stream in streams:
            stream.table = stream.table or self.blocks_for(len(stream.prompt) + stream.count)
        step = 0
        while not all(stream.done for stream in streams):
            live = [(at, s) for at, s in enumerate(streams) if s.begins <= step and not s.done]
            chunks = [stream.next_chunk(at) for at, stream in live]
            result = self.runner.execute(StepPlan(tuple(chunks)))
            for (_, stream), chunk, drawn in zip(live, chunks, result.tokens, strict=True):
                stream.take(chunk, drawn)
            step += 1
        for stream in streams:
            self._free += stream.table
        return [stream.drawn for stream in streams]
