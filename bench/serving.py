"""What a client sees of one worker on two cores: time to first token, and tokens per second, beside plain transformers.

    python -m bench.serving [--quick] [--model smollm2] [--dtype auto]

Every request goes through the whole stack: gateway, Redis, cache manager, worker. One JSON object a line; `plain` is
the same work done by transformers' `generate` in this process with the same number type and threads (batched where
several requests run at once; it has no memory, so a hit is compared with the whole prompt), and `ratio` says how many
times better we are.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from deploy.local import Cluster
from gateway.client import AsyncClient
from gateway.core.events import Delta
from gateway.core.request import Generation, TokenPrompt
from octavo.commands.model import fetch_model

THREADS = 2
_REQUEST_SECONDS = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How much is asked for."""

    prompt_tokens: int = 1024
    shared_tokens: int = 960
    """Of the prompt, what the one before it had too."""
    repeats: int = 3
    short_prompt_tokens: int = 64
    output_tokens: int = 64
    crowds: tuple[int, ...] = (1, 8, 32)


QUICK = Load(prompt_tokens=96, shared_tokens=80, repeats=1, short_prompt_tokens=16, output_tokens=4, crowds=(1, 8, 32))


Numbers = dict[str, float]
"""Of one way to serve, by name: times to first token in seconds, and output tokens per second."""


# ---- prompts -------------------------------------------------------------------------------------------------


class Prompts:
    """Token ids that no two prompts share a beginning of, unless they are meant to."""

    def __init__(self) -> None:
        self._drawn = 0

    def fresh(self, count: int) -> list[int]:
        """`count` ids, the first of them like in no other prompt."""
        self._drawn += 1
        return [1000 + self._drawn, *((7919 * self._drawn + 104729 * i) % 20000 + 1000 for i in range(1, count))]


# ---- through the stack ---------------------------------------------------------------------------------------


async def time_to_first_token(client: AsyncClient, prompt: Sequence[int]) -> float:
    """Seconds from the call to its first token, at the client."""
    began = time.perf_counter()
    request = Generation(prompt=TokenPrompt(tuple(prompt)), max_tokens=1, ignore_eos=True)
    first = 0.0
    async for event in client.generate(request):
        if isinstance(event, Delta) and not first:
            first = time.perf_counter() - began
    return first


async def tokens_per_second(client: AsyncClient, prompts: Sequence[Sequence[int]], output_tokens: int) -> float:
    """Output tokens of all requests, sent at once, over the time until the last has ended."""
    began = time.perf_counter()
    async with asyncio.timeout(_REQUEST_SECONDS), asyncio.TaskGroup() as group:
        for prompt in prompts:
            request = Generation(prompt=TokenPrompt(tuple(prompt)), max_tokens=output_tokens, ignore_eos=True)
            group.create_task(client.complete(request))
    return len(prompts) * output_tokens / (time.perf_counter() - began)


async def served(load: Load, model: str, dtype: str) -> Numbers:
    """Every number, through a cluster of one worker."""
    prompts = Prompts()
    env = {"OCTAVO_MODEL": model, "OCTAVO_DTYPE": dtype, "OCTAVO_THREADS": str(THREADS), "OCTAVO_KV_MEMORY": "512MiB"}
    async with Cluster(workers=1, env=env) as cluster, AsyncClient(cluster.address) as client:
        await tokens_per_second(client, [prompts.fresh(8)], 2)  # the first step of a process is slower than any other
        cold: list[float] = []
        hit: list[float] = []
        for _ in range(load.repeats):
            prompt = prompts.fresh(load.prompt_tokens)
            similar = prompt[: load.shared_tokens] + prompts.fresh(load.prompt_tokens - load.shared_tokens)
            cold.append(await time_to_first_token(client, prompt))
            hit.append(await time_to_first_token(client, similar))
        numbers = {"ttft_cold_s": median(cold), "ttft_hit_s": median(hit)}
        for crowd in load.crowds:
            asked = [prompts.fresh(load.short_prompt_tokens) for _ in range(crowd)]
            numbers[f"out_tok_s_{crowd}"] = await tokens_per_second(client, asked, load.output_tokens)
        return numbers


# ---- plain transformers --------------------------------------------------------------------------------------


def plain(load: Load, folder: Path, dtype: str) -> Numbers:
    """The same work by `generate`."""
    generate = _generator(folder, dtype)
    prompts = Prompts()
    generate([prompts.fresh(8)], 2)
    first = median(generate([prompts.fresh(load.prompt_tokens)], 1) for _ in range(load.repeats))
    numbers = {"ttft_cold_s": first, "ttft_hit_s": first}
    for crowd in load.crowds:
        asked = [prompts.fresh(load.short_prompt_tokens) for _ in range(crowd)]
        numbers[f"out_tok_s_{crowd}"] = crowd * load.output_tokens / generate(asked, load.output_tokens)
    return numbers


def _generator(folder: Path, dtype: str) -> Callable[[list[list[int]], int], float]:
    """A function that has `generate` answer prompts of one length greedily, and returns the seconds it took."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from worker.model.loader import dtype_of

    logging.disable_progress_bar()
    torch.set_num_threads(THREADS)
    wanted = dtype_of(dtype, torch.device("cpu"))
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=wanted, local_files_only=True).eval()
    model.generation_config.eos_token_id = None

    def generate(prompts: list[list[int]], count: int) -> float:
        ids = torch.tensor(prompts)
        began = time.perf_counter()
        with torch.inference_mode():
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
        return time.perf_counter() - began

    return generate


def main() -> None:
    """Print every number."""
    parser = argparse.ArgumentParser(description="Measure serving through the whole stack.")
    parser.add_argument("--quick", action="store_true", help="small numbers of everything: shows that it runs")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    options = parser.parse_args()
    load = QUICK if options.quick else Load()
    folder = fetch_model(options.model)
    baseline = plain(load, folder, options.dtype)
    for name, value in asyncio.run(served(load, options.model, options.dtype)).items():
        print(json.dumps(_line(name, value, baseline[name])), flush=True)


def _line(name: str, value: float, plain: float) -> dict[str, str | float]:
    is_time = name.startswith("ttft")
    return {
        "name": name,
        "value": round(value, 4),
        "unit": "s" if is_time else "tokens/s",
        "plain": round(plain, 4),
        "ratio": round(plain / value if is_time else value / plain, 2),
    }


if __name__ == "__main__":
    main()
