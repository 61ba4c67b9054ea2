"""What plain transformers generates: the text that every road through our code must give."""

from collections.abc import Collection, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.support.adapters import run_beside


def solo_greedy(
    folder: Path,
    prompt: Sequence[int],
    count: int,
    stop: Collection[int] = (),
    *,
    adapter: Path | None = None,
    **generation: Any,
) -> list[int]:
    """The `count` tokens that follow `prompt`, greedily, in float32; fewer if one of `stop` comes (it is the last).

    `adapter` is the folder of one that runs beside the model's weights. `generation` are further arguments of
    transformers' `generate`, by name and plain value; `bias` is a tuple of (token, what is added to its logit).
    """
    tokens = _generated(folder, adapter, tuple(prompt), count, **generation)
    ends = [at for at, token in enumerate(tokens) if token in stop]
    return list(tokens[: ends[0] + 1] if ends else tokens)


@lru_cache(maxsize=256)
def _generated(
    folder: Path, adapter: Path | None, prompt: tuple[int, ...], count: int, **generation: Any
) -> tuple[int, ...]:
    ids = torch.tensor([prompt])
    generate: Any = _model(folder, adapter).generate
    if bias := generation.pop("bias", None):
        generation["sequence_bias"] = [[[token], value] for token, value in bias]
    out = generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, **generation)
    return tuple(out[0, len(prompt) :].tolist())


def solo_beams(
    folder: Path, prompt: Sequence[int], count: int, *, width: int, samples: int, stop: int, **generation: Any
) -> list[list[int]]:
    """The best `samples` outputs of transformers' beam search, in float32, each without `stop` and what pads it."""
    ids = torch.tensor([list(prompt)])
    out = _model(folder).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        num_beams=width,
        num_return_sequences=samples,
        eos_token_id=stop,
        pad_token_id=stop,
        **generation,
    )
    texts: list[list[int]] = out[:, len(prompt) :].tolist()
    return [text[: text.index(stop)] if stop in text else text for text in texts]


@torch.inference_mode()
def log_softmax(folder: Path, tokens: Sequence[int]) -> torch.Tensor:
    """Logarithms of the probabilities of what follows each token, float32 [len(tokens), vocabulary]."""
    return _model(folder)(torch.tensor([list(tokens)])).logits[0].log_softmax(-1)


@lru_cache(maxsize=4)
def _model(folder: Path, adapter: Path | None = None) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    model.generation_config.eos_token_id = None  # `stop` ends a text here
    if adapter is not None:
        run_beside(model, adapter)
    return model
