"""A step's plan becomes tensors, a forward pass and drawn tokens. No policy: what runs when is decided elsewhere.

In one step, in this order: block copies, then the forward pass, which writes the new keys and values, then the draws.
Runs on one thread of its caller's choice; the tensors it holds belong to nobody else.
"""

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
import torch

from octavo.ids import BlockId, SequenceId
from octavo.models import ModelFolder
from octavo.records.fleet import PoolSpec
from octavo.records.sampling import SamplingParams
from worker import pool_size
from worker.core.step import Chunk, Draw, StepPlan, StepResult
from worker.kernels import SharedPrefixes, shared_prefix
from worker.kv_pool import KVPool
from worker.model.batch import Forward, HostBatch
from worker.model.graphs import CudaCapture, DecodeGraphs
from worker.model.loader import LoadedModel, Road, device_of, dtype_of, kv_dtype_of, load
from worker.model.outcome import logit_rows, outcome

log = logging.getLogger("octavo.worker")

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOptions:
    """How to run a model."""

    kv_memory_bytes: int | None = None
    """Memory of the pool; None: what a GPU has left, on a CPU `pool_size.CPU_BUDGET_BYTES`."""
    gpu_memory_share: float = 0.9
    """How far a GPU may be taken, by whomever, where the pool gets what is left."""
    max_step_tokens: int = 512
    """Tokens that a step computes, at most."""
    max_running: int = 64
    """Sequences in a step, at most."""
    block_size: int = 16
    """Positions of a block."""
    dtype: str = "auto"
    """Of weights and activations: auto, float32, bfloat16 or float16."""
    kv_dtype: str = "auto"
    """Of the pool: one of those, float8_e4m3fn or float8_e5m2; auto is `dtype`."""
    device: str = "auto"
    """auto, cpu or cuda."""
    road: Road = "auto"
    """Our own layers or transformers'; see `worker.model.loader.Road`."""
    threads: int = 0
    """Threads of torch on the CPU; 0 leaves its own choice."""
    deterministic: bool = False
    """Compute each sequence in the same way, to the bit, whatever runs beside it and however it is cut into chunks."""
    cuda_graphs: bool = True
    """Record decode steps when the runner is opened, on CUDA."""

    def shares_prefixes_on(self, device: torch.device) -> bool:
        """Whether decodes read common blocks once for all. On a CPU its caches do as much."""
        return device.type == "cuda" and not self.deterministic


class Runner:
    """Runs steps of one model over one pool.

    Invariant: after `execute`, the pool holds keys and values of every token of the plan, and of no other new one.
    """

    def __init__(
        self,
        forward: Forward,
        pool: KVPool,
        device: torch.device,
        *,
        shares_prefixes: bool = False,
        one_by_one: bool = False,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        """Take a model and its pool; `shares_prefixes`: plan, each step, to read common blocks once for all.

        `one_by_one`: let each token attend by itself, so that nothing depends on how a prompt is cut into chunks.

        `graphs` are of that model and pool; decodes run from them.
        """
        self.pool = pool
        self._graphs = graphs
        self._shares_prefixes = shares_prefixes
        self._one_by_one = one_by_one
        self._forward = forward
        self._device = device

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step and draw what its chunks ask for.

        A plan without chunks only copies blocks.

        Raises:
            FloatingPointError: logits that are drawn from are not finite.
        """
        self.pool.copy_blocks([(copy.source, copy.target) for copy in plan.copies])
        if not plan.chunks:
            return StepResult(())
        with torch.inference_mode():
            batch = self._lay_out(plan.chunks)
            return outcome(plan.chunks, self._logits(batch.one_by_one() if self._one_by_one else batch))

    def _logits(self, batch: HostBatch) -> torch.Tensor:
        """Logits [R, V], which hold until the next step; keys and values are in the pool afterwards."""
        shared = self._shared(batch)
        if shared is None and self._graphs is not None and self._graphs.takes(batch):
            return self._graphs.logits(batch)
        return self._forward(batch.on(self._device, shared), self.pool)

    def warm_up(self) -> None:
        """Run a small step, so that the first request does not pay for first uses. No block may be in use yet."""
        tokens = (0,) * self.pool.shape.block_size
        draws = (Draw(SamplingParams(temperature=1.0), 0, len(tokens)),)
        chunk = Chunk(sequence=SequenceId(0), start=0, tokens=tokens, table=(BlockId(0),), draws=draws)
        self.execute(StepPlan((chunk,)))

    def _lay_out(self, chunks: Sequence[Chunk]) -> HostBatch:
        """The arrays of a step.

        A chunk that its table does not cover, a block outside the pool, an unknown token, and two tokens for one slot
        are bugs of the caller.
        """
        block_size = self.pool.shape.block_size
        counts = np.array([len(chunk.tokens) for chunk in chunks])
        assert counts.all(), f"chunk {counts.argmin()} of {len(chunks)} has no tokens"
        starts = np.concatenate(([0], counts.cumsum()))
        tables = _tables(chunks, block_size)
        ids = np.concatenate([np.asarray(chunk.tokens, np.int64) for chunk in chunks])
        positions = np.concatenate([np.arange(chunk.start, chunk.end) for chunk in chunks])
        owners = np.repeat(np.arange(len(chunks)), counts)
        slots = tables[owners, positions // block_size] * block_size + positions % block_size
        self._check(ids, slots, tables)
        return HostBatch(
            ids=ids,
            positions=positions,
            slots=slots,
            tables=tables,
            lengths=np.array([chunk.end for chunk in chunks]),
            query_starts=starts,
            logit_rows=logit_rows(chunks, starts),
        )

    def _shared(self, batch: HostBatch) -> SharedPrefixes | None:
        if not self._shares_prefixes:
            return None
        block_size = self.pool.shape.block_size
        return shared_prefix.plan(
            batch.tables, batch.lengths, batch.query_starts, block_size=block_size, device=self._device
        )

    def _check(self, ids: Ints, slots: Ints, tables: Ints) -> None:
        for what, values, end in (("token", ids, self._forward.vocab_size), ("block", tables, self.pool.num_blocks)):
            lowest, highest = values.min(), values.max()
            assert 0 <= lowest <= highest < end, f"{what}s {lowest} to {highest}, wanted [0, {end})"
        assert len(np.unique(slots)) == len(slots), f"{len(slots)} tokens for {len(np.unique(slots))} slots"


def _tables(chunks: Sequence[Chunk], block_size: int) -> Ints:
    """The rows of all block tables, each as far as its chunk reaches; 0 behind."""
    widths = [-(-chunk.end // block_size) for chunk in chunks]
    tables = np.zeros((len(chunks), max(widths)), np.int64)
    for row, (chunk, width) in enumerate(zip(chunks, widths, strict=True)):
        held = len(chunk.table)
        assert held >= width, f"sequence {chunk.sequence}: {held} blocks for {chunk.end} positions, wanted {width}"
        tables[row, :width] = chunk.table[:width]
    return tables


def open_runner(folder: ModelFolder, options: RunnerOptions) -> tuple[Runner, PoolSpec]:
    """Load the model, make its pool, and run one small step.

    Returns:
        The runner, and what the cache manager must know of its pool.

    Raises:
        ValueError: the model is not served (`UnsupportedModel`), the device is not there, or the memory holds no block.
        FileNotFoundError: a weight file is missing.
    """
    if options.threads:
        torch.set_num_threads(options.threads)
    device = device_of(options.device)
    dtype = dtype_of(options.dtype, device)
    kv_dtype = kv_dtype_of(options.kv_dtype, dtype)
    loaded = load(
        folder,
        dtype=dtype,
        kv_dtype=kv_dtype,
        device=device,
        block_size=options.block_size,
        road=options.road,
        deterministic=options.deterministic,
    )
    records = options.cuda_graphs and device.type == "cuda"
    pool = KVPool.within_budget(loaded.shape, _budget(folder, loaded, options), device, has_idle_block=records)
    log.info("kv_pool", extra={"bytes": pool.num_bytes, "blocks": pool.num_blocks, "tokens": pool.capacity_tokens})
    graphs = _record(loaded, pool, options, folder.max_model_tokens) if records else None
    runner = Runner(
        loaded.forward,
        pool,
        device,
        shares_prefixes=options.shares_prefixes_on(device),
        one_by_one=options.deterministic,
        graphs=graphs,
    )
    runner.warm_up()
    return runner, _pool_spec(folder, loaded, pool)


def _record(loaded: LoadedModel, pool: KVPool, options: RunnerOptions, max_model_tokens: int) -> DecodeGraphs | None:
    """Graphs of the decode steps, or None where the model does what they cannot repeat.

    Their memory, about that of a largest decode step, is of the share that `gpu_memory_share` leaves alone.
    """
    longest = min(max_model_tokens, pool.capacity_tokens)
    try:
        return DecodeGraphs(
            loaded.forward, pool, loaded.device, CudaCapture(), most=options.max_running, longest=longest
        )
    except RuntimeError as error:
        log.warning("graphs_not_recorded", extra={"reason": str(error).partition("\n")[0]})
        return None


def _budget(folder: ModelFolder, loaded: LoadedModel, options: RunnerOptions) -> int:
    """Bytes that the pool may take."""
    if options.kv_memory_bytes is not None:
        return options.kv_memory_bytes
    if loaded.device.type == "cpu":
        return pool_size.CPU_BUDGET_BYTES
    meter = pool_size.CudaMeter(loaded.device)
    memory = profile_memory(loaded, meter, options, folder.max_model_tokens)
    log.info("gpu_profiled", extra={"share": options.gpu_memory_share, **asdict(memory)})
    return memory.budget(options.gpu_memory_share)


def profile_memory(
    loaded: LoadedModel, meter: pool_size.Meter, options: RunnerOptions, max_model_tokens: int
) -> pool_size.DeviceMemory:
    """Run a largest step of the model, on a pool of its own, under a meter."""
    limits = pool_size.Limits(
        step_tokens=options.max_step_tokens, sequences=options.max_running, sequence_tokens=max_model_tokens
    )

    def execute(plan: StepPlan) -> int:
        pool = KVPool(loaded.shape, pool_size.blocks_of(plan), loaded.device)
        Runner(loaded.forward, pool, loaded.device).execute(plan)
        return pool.num_bytes

    return pool_size.profile(meter, pool_size.largest_step(limits, loaded.shape.block_size), execute)


def _pool_spec(folder: ModelFolder, loaded: LoadedModel, pool: KVPool) -> PoolSpec:
    return PoolSpec(
        model=folder.name,
        model_digest=folder.model_digest,
        tokenizer_digest=folder.tokenizer_digest,
        dtype=_name(loaded.dtype),
        kv_dtype=_name(pool.shape.dtype),
        block_size=pool.shape.block_size,
        num_blocks=pool.num_blocks,
        max_model_tokens=folder.max_model_tokens,
        vocab_size=folder.vocab_size,
        adapter_digest=folder.adapter.digest if folder.adapter else b"",
        block_bytes=pool.shape.bytes_per_block,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
