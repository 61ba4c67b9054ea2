"""Decoding as one CUDA graph: a random model of 8B shape, its pool, its kernels, nothing else.

    python -m bench.graph_decode
    python -m bench.graph_decode --device cpu --layers 2 --hidden 512 --vocab 999 --sequences 2 --length 40 --steps 4

What a step costs when nobody waits for Python: weights and cached keys and values have to be read once, so the time is
held against the bytes that are and the bandwidth that a copy reaches. Beside it: the same steps launched one by one,
which must choose the same tokens. Where there is no CUDA, only those run.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from bench.kernels import copy_bandwidth
from worker.kernels import Attend, choose
from worker.kv_pool import KVPool, PoolShape
from worker.model.graphs import CudaCapture

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Of a model; the defaults are those of Llama's 8B."""

    layers: int = 32
    hidden: int = 4096
    head_dim: int = 128
    group: int = 4
    vocab: int = 128_256

    @property
    def heads(self) -> int:
        """Hq."""
        return self.hidden // self.head_dim

    @property
    def kv_heads(self) -> int:
        """Hkv."""
        return self.heads // self.group

    @property
    def inner(self) -> int:
        """Width of the feed-forward layers: 3.5 times the hidden one."""
        return 7 * self.hidden // 2


class Model:
    """A decoder of the Llama family with random weights, one new token a sequence and step."""

    def __init__(self, shape: Shape, attend: Attend, device: torch.device, dtype: torch.dtype) -> None:
        self.shape = shape
        self._attend = attend
        random = torch.Generator(device).manual_seed(0)

        def weight(outputs: int, inputs: int) -> torch.Tensor:
            scaled = torch.empty(outputs, inputs, dtype=dtype, device=device)
            return scaled.normal_(std=inputs**-0.5, generator=random)

        rows = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        self._layers = [
            (
                weight(rows, shape.hidden),
                weight(shape.hidden, shape.heads * shape.head_dim),
                weight(2 * shape.inner, shape.hidden),
                weight(shape.hidden, shape.inner),
            )
            for _ in range(shape.layers)
        ]
        self._embedding = weight(shape.vocab, shape.hidden)
        self._head = weight(shape.vocab, shape.hidden)
        frequencies = torch.arange(0, shape.head_dim, 2, device=device) / shape.head_dim
        self._frequencies = 500_000.0**-frequencies

    @property
    def bytes_read(self) -> int:
        """Of weights, in one step."""
        return sum(w.nbytes for layer in self._layers for w in layer) + self._head.nbytes

    def step(self, ids: torch.Tensor, positions: torch.Tensor, tables: torch.Tensor, pool: KVPool) -> torch.Tensor:
        """The tokens that follow: ids, positions int64 [B]; tables int32 [B, M] -> int64 [B]."""
        sequences = len(ids)
        blocks = tables.gather(1, (positions // BLOCK_SIZE)[:, None])[:, 0].long()
        slots = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
        lengths, starts = (positions + 1).int(), torch.arange(sequences + 1, dtype=torch.int32, device=ids.device)
        angles = positions[:, None, None] * self._frequencies
        turn = angles.cos(), angles.sin()
        x = self._embedding[ids]
        for number, (qkv, out, gate_up, down) in enumerate(self._layers):
            x = x + self._attention(number, _norm(x), qkv, (slots, lengths, starts, tables), turn, pool) @ out.T
            gate, up = (_norm(x) @ gate_up.T).chunk(2, dim=-1)
            x = x + (nn.functional.silu(gate) * up) @ down.T
        return (_norm(x) @ self._head.T).argmax(dim=-1)

    def _attention(
        self,
        layer: int,
        x: torch.Tensor,
        qkv: torch.Tensor,
        plan: tuple[torch.Tensor, ...],
        turn: tuple[torch.Tensor, torch.Tensor],
        pool: KVPool,
    ) -> torch.Tensor:
        shape, (slots, lengths, starts, tables) = self.shape, plan
        heads = (x @ qkv.T).unflatten(1, (-1, shape.head_dim))
        q, k, v = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
        pool.write(layer, _rotate(k, *turn), v, slots)
        attended = self._attend(_rotate(q, *turn), *pool.layer(layer), tables, lengths, starts, shape.head_dim**-0.5)
        return attended.flatten(1)


def _norm(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.rms_norm(x, x.shape[-1:])


def _rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotary positions: x [B, heads, D]; cosine, sine [B, 1, D / 2]."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1).to(x.dtype)


@dataclass(slots=True)
class Loop:
    """Sequences of one length that decode together; their state stays at the same addresses, as a graph wants it."""

    model: Model
    pool: KVPool
    tables: torch.Tensor
    ids: torch.Tensor
    positions: torch.Tensor
    length: int

    @classmethod
    def start(
        cls, model: Model, sequences: int, length: int, steps: int, device: torch.device, dtype: torch.dtype
    ) -> "Loop":
        """A pool with room for `steps` more tokens of each, filled with small random numbers."""
        width = -(-(length + steps) // BLOCK_SIZE)
        shape = PoolShape(
            num_layers=model.shape.layers,
            kv_heads=model.shape.kv_heads,
            block_size=BLOCK_SIZE,
            head_dim=model.shape.head_dim,
            dtype=dtype,
        )
        pool = KVPool(shape, sequences * width, device)
        for layer in range(model.shape.layers):
            for plane in pool.layer(layer):
                plane.normal_()
        tables = torch.randperm(sequences * width, device=device).int().reshape(sequences, width)
        ids, positions = (torch.zeros(sequences, dtype=torch.int64, device=device) for _ in range(2))
        return cls(model, pool, tables, ids, positions, length)

    def rewind(self) -> None:
        """Back to the first token; what was written behind it is not read."""
        self.ids.copy_(torch.arange(len(self.ids), device=self.ids.device))
        self.positions.fill_(self.length)

    def step(self) -> None:
        """One token for everybody."""
        self.ids.copy_(self.model.step(self.ids, self.positions, self.tables, self.pool))
        self.positions += 1

    def as_graph(self) -> Callable[[], object]:
        """`step` as one CUDA graph."""

        def step() -> torch.Tensor:
            self.step()
            return self.ids

        return CudaCapture()(step)


def run(loop: Loop, step: Callable[[], object], steps: int) -> tuple[float, list[int]]:
    """Seconds a step, and the tokens of the last one."""
    device = loop.ids.device
    loop.rewind()
    step()
    _wait(device)
    begun = time.perf_counter()
    for _ in range(steps - 1):
        step()
    _wait(device)
    return (time.perf_counter() - begun) / (steps - 1), loop.ids.tolist()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.inference_mode()
def measure(shape: Shape, sequences: int, length: int, steps: int, device: torch.device) -> list[dict[str, object]]:
    """Steps one by one and, on CUDA, as a graph: one line each."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    attend = choose(device=device, dtype=dtype, head_dim=shape.head_dim)
    model = Model(shape, attend, device, dtype)
    loop = Loop.start(model, sequences, length, steps + 1, device, dtype)
    cached = sequences * (length + steps / 2) * loop.pool.shape.bytes_per_block / BLOCK_SIZE
    least = (model.bytes_read + cached) / copy_bandwidth(device)
    ways: dict[str, Callable[[], object]] = {"one_by_one": loop.step}
    if device.type == "cuda":
        ways["graph"] = loop.as_graph()
    lines: list[dict[str, object]] = []
    tokens: dict[str, list[int]] = {}
    for name, step in ways.items():
        seconds, tokens[name] = run(loop, step, steps)
        lines.append(
            {
                "name": f"decode_step_ms_{name}",
                "value": round(seconds * 1e3, 3),
                "unit": "ms",
                "tokens_per_second": round(sequences / seconds, 1),
                "share_of_copy_bandwidth": round(least / seconds, 3),
                "sequences": sequences,
                "length": length,
                "layers": shape.layers,
            }
        )
    if len({tuple(last) for last in tokens.values()}) > 1:
        raise AssertionError(f"the graph chose other tokens than its steps one by one: {tokens}")
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Print one JSON object a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--layers", type=int, default=Shape.layers)
    parser.add_argument("--hidden", type=int, default=Shape.hidden, help="a multiple of 512: four heads a group")
    parser.add_argument("--vocab", type=int, default=Shape.vocab)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--length", type=int, default=4096, help="cached positions of each")
    parser.add_argument("--steps", type=int, default=64)
    options = parser.parse_args(argv)
    shape = Shape(layers=options.layers, hidden=options.hidden, vocab=options.vocab)
    for line in measure(shape, options.sequences, options.length, options.steps, torch.device(options.device)):
        print(json.dumps(line))


if __name__ == "__main__":
    main()
