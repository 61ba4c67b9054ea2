"""What reaches the kernels of what a model's layers ask for."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from worker.kv_pool import KVPool, PoolShape
from worker.model.batch import HostBatch
from worker.model.generic import ATTENTION, GenericModel

CPU = torch.device("cpu")


class Layers(nn.Module):
    """A model as transformers writes them, reduced to the attention of its layers: one head, sinks or none."""

    config = SimpleNamespace(max_position_embeddings=64)

    def __init__(self, *sinks: torch.Tensor | None) -> None:
        super().__init__()
        self.sinks = sinks
        self.embedding = nn.Embedding(10, 16)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def forward(self, input_ids: torch.Tensor, octavo_step: Any, **_: Any) -> SimpleNamespace:
        heads = self.embedding(input_ids)[:, None]
        for layer, sinks in enumerate(self.sinks):
            self.layer_idx = layer
            ALL_ATTENTION_FUNCTIONS[ATTENTION](self, heads, heads, heads, None, octavo_step=octavo_step, s_aux=sinks)
        return SimpleNamespace(logits=heads[:, 0])


def test_sinks_are_a_layers_own() -> None:
    asked: list[float | None] = []

    def attend(q: torch.Tensor, *_: object, **options: Any) -> torch.Tensor:
        sinks = options.get("sinks")
        asked.append(None if sinks is None else sinks.item())
        return q

    model = GenericModel(Layers(torch.tensor([1.0]), None, torch.tensor([2.0])), attend)  # type: ignore[arg-type]
    shape = PoolShape(num_layers=3, kv_heads=1, block_size=4, head_dim=16, dtype=torch.float32)
    two = np.arange(2)
    batch = HostBatch(
        ids=two,
        positions=two,
        slots=two,
        tables=np.zeros((1, 1), np.int64),
        lengths=np.array([2]),
        query_starts=np.array([0, 2]),
        logit_rows=np.array([1]),
    )
    with torch.inference_mode():
        model(batch.on(CPU, None), KVPool(shape, 1, CPU))
    assert asked == [1.0, None, 2.0]
