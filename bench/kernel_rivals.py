"""What paged attention is measured against: the same attention, computed by others, from the same memory.

Each function here takes a `Case`'s tensors and returns a call of one argument, the layer that it reads.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch.nn.functional import scaled_dot_product_attention

from worker.kernels import choose, prepare
from worker.kv_pool import KVPool, PoolShape

Attention = Callable[[int], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A uniform batch: every sequence has `history` positions in the pool and `new` queries behind them."""

    sequences: int
    history: int
    new: int
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    """Of the pool; `dtype` by default."""
    block_size: int = 16

    @property
    def length(self) -> int:
        """Positions of a sequence, the new ones included."""
        return self.history + self.new

    @property
    def bytes_read(self) -> int:
        """Keys and values of all sequences, once: what no implementation can do without."""
        per_position = 2 * self.kv_heads * self.head_dim * (self.kv_dtype or self.dtype).itemsize
        return self.sequences * self.length * per_position


class Batch:
    """A case's tensors: layers of scrambled blocks, and queries.

    A step of a model reads a layer's keys and values once and comes back to them a step later, so the calls of a race
    go through many layers: none finds in a cache what the call before it read.
    """

    LAYERS = 30
    MAX_BYTES = 2 << 30

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case = case
        self.device = device
        width = -(-case.length // case.block_size)
        layers = max(2, min(self.LAYERS, self.MAX_BYTES // case.bytes_read))
        shape = PoolShape(
            num_layers=layers,
            kv_heads=case.kv_heads,
            block_size=case.block_size,
            head_dim=case.head_dim,
            dtype=case.kv_dtype or case.dtype,
        )
        self.layers = layers
        self.pool = KVPool(shape, case.sequences * width, device)
        for tensor in (tensor for layer in range(layers) for tensor in self.pool.layer(layer)):
            # The same numbers in every block: drawing gigabytes would take longer than the race.
            tensor.copy_(torch.randn(tensor.shape[1:], device=device).expand(tensor.shape))
        scrambled = torch.randperm(self.pool.num_blocks, device=device)
        self.tables = scrambled.reshape(case.sequences, width).int()
        self.lengths = torch.full((case.sequences,), case.length, dtype=torch.int32, device=device)
        self.query_starts = torch.arange(0, case.sequences * case.new + 1, case.new, dtype=torch.int32, device=device)
        self.q = torch.randn(
            case.sequences * case.new, case.heads, case.head_dim, dtype=torch.float32, device=device
        ).to(case.dtype)

    def contiguous(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The memory of a layer read without its table, as if nothing were paged: [B, Hkv, n, D] each.

        The same bytes; the positions and heads that they stand for are others, unless a sequence is one block.
        """
        case = self.case
        size = (case.sequences, case.kv_heads, -1, case.head_dim)
        keys, values = (tensor.view(size)[:, :, : case.length] for tensor in self.pool.layer(layer))
        return keys, values

    def gathered(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The blocks of a layer copied together: [B, Hkv, n, D] each."""
        keys, values = (tensor[self.tables].transpose(1, 2).flatten(2, 3) for tensor in self.pool.layer(layer))
        return keys[:, :, : self.case.length], values[:, :, : self.case.length]


def paged(batch: Batch) -> Attention:
    """Octavo's own, as `choose` picks it for this device, prepared once a step as a model calls it."""
    case = batch.case
    attend = choose(device=batch.device, dtype=case.dtype, kv_dtype=case.kv_dtype, head_dim=case.head_dim)
    plan = (batch.tables, batch.lengths, batch.query_starts)
    step = prepare(attend, batch.pool.planes, *plan, case.head_dim**-0.5, q_like=batch.q)
    return lambda layer: step(layer, batch.q)


def rivals(batch: Batch, *, flex: bool) -> Iterator[tuple[str, Attention]]:
    """The names and calls of all others that run here; `flex` also compiles flex attention, which takes seconds."""
    case = batch.case
    if case.kv_dtype not in (None, case.dtype):
        return  # torch's attention does not read 8 bits
    yield "contiguous_sdpa", lambda layer: _sdpa(batch, *batch.contiguous(layer))
    yield "gather_sdpa", lambda layer: _sdpa(batch, *batch.gathered(layer))
    if flex and case.new == 1:
        yield from if_it_runs("flex", lambda: _flex(batch))
    if batch.device.type == "cuda" and case.new == 1:
        if find_spec("flash_attn"):
            yield from if_it_runs("flash_attn", lambda: _flash_attention(batch))
        if find_spec("flashinfer"):
            yield from if_it_runs("flashinfer", lambda: _flashinfer(batch))


def if_it_runs(name: str, make: Callable[[], Attention]) -> Iterator[tuple[str, Attention]]:
    """A rival that compiles here, or was installed from elsewhere, if it can be called; else why not, on stderr.

    Whatever is wrong with it, the others still race.
    """
    try:
        attention = make()
        attention(0)
    except Exception as error:  # not our code: anything may come
        print(f"{name} does not run here: {error}", file=sys.stderr, flush=True)
    else:
        yield name, attention


def _sdpa(batch: Batch, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Torch's fused attention in its fastest form. keys, values [B, Hkv, n, D] -> [T, Hq, D].

    A decode takes the heads of a group as queries of their KV head, so nothing is read twice; with more queries the
    KV heads are repeated, as torch's own `enable_gqa` is slower on a CPU.
    """
    case = batch.case
    group = case.heads // case.kv_heads
    if case.new == 1:
        q = batch.q.view(case.sequences, case.kv_heads, group, case.head_dim)
        return scaled_dot_product_attention(q, keys, values).view(batch.q.shape)
    q = batch.q.view(case.sequences, case.new, case.heads, case.head_dim).transpose(1, 2)
    keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
    visible = None
    if case.history:
        visible = torch.ones(case.new, case.length, dtype=torch.bool, device=batch.device).tril(case.history)
    out = scaled_dot_product_attention(q, keys, values, visible, is_causal=visible is None)
    return out.transpose(1, 2).reshape(batch.q.shape)


def _flex(batch: Batch) -> Attention:
    """Flex attention on the pool itself: a mask knows which slots are whose. Compiles here."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    case, pool = batch.case, batch.pool
    slots = pool.capacity_tokens
    owner = torch.empty(pool.num_blocks, dtype=torch.int64, device=batch.device)
    owner[batch.tables.long()] = torch.arange(case.sequences, device=batch.device)[:, None]

    def visible(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        return owner[slot // case.block_size] == b  # uniform lengths that fill their blocks

    mask = create_block_mask(
        visible, case.sequences, None, 1, slots, device=str(batch.device), BLOCK_SIZE=(1, case.block_size)
    )
    compiled = torch.compile(flex_attention, dynamic=False)
    q = batch.q.view(case.sequences, case.heads, 1, case.head_dim)

    # The layout that it wants, [1, Hkv, slots, D], is made before the race.
    size = (1, case.kv_heads, slots, case.head_dim)
    pools = [[x.transpose(0, 1).reshape(size) for x in pool.layer(layer)] for layer in range(batch.layers)]

    def call(layer: int) -> torch.Tensor:
        keys, values = pools[layer]
        return compiled(q, keys, values, block_mask=mask, enable_gqa=True)

    call(0)
    return call


def _flash_attention(batch: Batch) -> Attention:
    """FlashAttention on contiguous keys and values, in the layout that it wants."""
    from flash_attn import flash_attn_func  # pyright: ignore[reportMissingImports] - where it is installed

    case = batch.case
    q = batch.q.view(case.sequences, 1, case.heads, case.head_dim)
    pools = [[x.transpose(1, 2).contiguous() for x in batch.contiguous(layer)] for layer in range(batch.layers)]
    return lambda layer: flash_attn_func(q, *pools[layer], causal=True)


def _flashinfer(batch: Batch) -> Attention:
    """FlashInfer's paged decode on our pool as it lies."""
    import flashinfer  # pyright: ignore[reportMissingImports] - where it is installed

    case = batch.case
    width = batch.tables.shape[1]
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=batch.device)
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND")
    last = (case.length - 1) % case.block_size + 1
    decode.plan(
        torch.arange(0, (case.sequences + 1) * width, width, dtype=torch.int32, device=batch.device),
        batch.tables.flatten(),
        torch.full((case.sequences,), last, dtype=torch.int32, device=batch.device),
        case.heads,
        case.kv_heads,
        case.head_dim,
        case.block_size,
        q_data_type=case.dtype,
        kv_data_type=case.kv_dtype or case.dtype,
    )
    return lambda layer: decode.run(batch.q, batch.pool.layer(layer))
