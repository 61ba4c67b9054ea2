"""What a step of the engine is measured against: the model's weights read, its products alone, and another engine."""

import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.utils import logging as transformers_logging

from worker.model.linear import MakeLinear, plain

PAGE = 16
MOST_TOKENS = 1024
"""Of one of its batches."""
NEW_TOKENS = 24
"""That each request of a decode asks for: more than there are steps until the last prompt of a crowd is computed."""


class Linears:
    """Every matrix product of a model once, each a plain `F.linear`: what a step cannot do without."""

    def __init__(self, model: PreTrainedModel, make: MakeLinear = plain) -> None:
        """Take the weights of `model`; `make` holds those of a product in another way than as they are."""
        layers, head = _weights(model)
        self._products = [(make(weight, None), weight.shape[1]) for weight in layers]
        self._head = make(head, None), head.shape[1]
        self._dtype = head.dtype
        self._inputs: dict[tuple[int, int], torch.Tensor] = {}

    def __call__(self, rows: int, logit_rows: int) -> torch.Tensor:
        """Multiply: so many rows by the layers' weights, so many by the head's."""
        with torch.inference_mode():
            for multiply, width in self._products:
                multiply(self._input(rows, width))
            multiply, width = self._head
            return multiply(self._input(logit_rows, width))

    def _input(self, rows: int, width: int) -> torch.Tensor:
        size = rows, width
        if size not in self._inputs:
            self._inputs[size] = torch.randn(size).to(self._dtype)
        return self._inputs[size]


class Reading:
    """Every weight of a model's products summed once by torch: a measure of memory, which prefetching can beat."""

    def __init__(self, model: PreTrainedModel) -> None:
        layers, head = _weights(model)
        self._weights = [weight.contiguous().flatten().view(torch.float32) for weight in (*layers, head)]
        self.num_bytes = sum(weight.nbytes for weight in self._weights)

    def __call__(self) -> None:
        """Read."""
        for weight in self._weights:
            weight.sum()


def _weights(model: PreTrainedModel) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Those of the layers' products, and the head's."""
    head = cast(nn.Linear, model.get_output_embeddings())
    layers = [m.weight.detach() for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
    return layers, head.weight.detach()


class ContinuousBatching:
    """transformers' own engine, with pages, on torch's fused attention."""

    def __init__(self, folder: Path, dtype: str) -> None:
        transformers_logging.disable_progress_bar()
        options: dict[str, Any] = {"dtype": getattr(torch, dtype), "local_files_only": True}
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
        self._embedding = cast(nn.Embedding, self.model.get_input_embeddings()).weight

    def decode_seconds(self, sequences: int, length: int) -> float:
        """The median step of so many sequences about `length` long, from when all decode until the first ends."""
        new = NEW_TOKENS * max(1, sequences // 8)  # or the first would end before the last begins
        stamps = [times for _, times in self._run(sequences, length - NEW_TOKENS // 2, new)]
        begun, ended = max(times[0] for times in stamps), min(times[-1] for times in stamps)
        steps = [time for time in stamps[0] if begun <= time <= ended]
        return statistics.median(after - before for before, after in pairwise(steps))

    def prefill_seconds(self, tokens: int) -> float:
        """From the request to its first token; the median of three."""
        runs = [self._run(1, tokens, 1) for _ in range(3)]
        return statistics.median(times[0] - came for ((came, times),) in runs)

    def _run(self, sequences: int, prompt_tokens: int, new_tokens: int) -> list[tuple[float, list[float]]]:
        """Requests that come together: when each came, and when each of its tokens did."""
        random = torch.Generator().manual_seed(0)
        prompts = torch.randint(len(self._embedding), (sequences, prompt_tokens), generator=random).tolist()
        pages = sequences * -(-(prompt_tokens + new_tokens) // PAGE) + 1
        answers = cast(Any, self.model).generate_batch(
            prompts,
            generation_config=GenerationConfig(
                max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=PAGE, num_blocks=pages, max_batch_tokens=MOST_TOKENS, allow_block_sharing=False
            ),
            record_timestamps=True,
        )
        assert len(answers) == sequences, f"{len(answers)} answers to {sequences} requests"
        return [(answer.created_time, answer.timestamps) for answer in answers.values()]
