"""What a client sees of one worker on two cores, on seven workloads, beside plain transformers and beside peers.

    python -m bench.serving [--quick] [--only W3 W6] [--repeats 3] [--model smollm2] [--dtype auto]

Every request goes through the whole stack: gateway, Redis, cache manager, worker. One JSON object a line:

- `value` is the median of the repeats, `prefilled` the number of prompt tokens that were computed in one of them: what
  requests share is prefilled once, whether they come one after another or together.
- `plain` is the same work done by transformers' `generate` in this process, between the repeats, with the same number
  type and threads: all requests of a workload as one batch. It has no memory, so what was asked for before is computed
  again. `ratio` says how many times better we are.
- `peer` is the best figure of four engines that were measured elsewhere, on another day, in bfloat16 with two threads,
  on a machine whose memory gave 45 GB/s; `memory_gb_s` is what it gives here, and a decode mostly waits for it.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from deploy.local import Cluster
from gateway.client import AsyncClient
from gateway.core.events import Delta, Usage
from gateway.core.request import Generation, TokenPrompt
from octavo.commands.model import fetch_model
from octavo.models import DEFAULT

THREADS = 2
MEMORY_ELSEWHERE = 45.0
"""GB/s, where the peers ran."""
_REQUEST_SECONDS = 600.0
_SWEPT_BYTES = 1 << 28


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests that arrive together."""

    name: str
    figures: tuple[str, ...]
    """What is told of it: `ttft_s` and `decode_tok_s` of a single request, `out_tok_s` of all."""
    requests: int = 1
    prompt_tokens: int
    shared_tokens: int = 0
    """Of each prompt, the leading ones that all of them have."""
    warm: bool = False
    """Whether a request with those has come before."""
    output_tokens: int
    samples: int = 1

    def small(self) -> "Workload":
        """The same on a small scale, what is shared in whole blocks of 16: shows that it runs."""
        shared = self.shared_tokens // 128 * 16
        return replace(self, prompt_tokens=self.prompt_tokens // 8, shared_tokens=shared, output_tokens=4)


WORKLOADS = (
    Workload(name="W1", figures=("ttft_s", "decode_tok_s"), prompt_tokens=1024, output_tokens=64),
    Workload(name="W2", figures=("ttft_s",), prompt_tokens=1024, shared_tokens=960, warm=True, output_tokens=2),
    Workload(name="W3", figures=("out_tok_s",), requests=32, prompt_tokens=544, shared_tokens=512, output_tokens=64),
    Workload(
        name="W3w",
        figures=("out_tok_s",),
        requests=32,
        prompt_tokens=544,
        shared_tokens=512,
        warm=True,
        output_tokens=64,
    ),
    Workload(name="W4", figures=("out_tok_s",), requests=32, prompt_tokens=256, output_tokens=64),
    Workload(name="W5", figures=("out_tok_s",), requests=8, prompt_tokens=64, output_tokens=256),
    Workload(name="W6", figures=("out_tok_s",), prompt_tokens=512, output_tokens=64, samples=4),
)

PEERS = {
    "W1_ttft_s": (0.730, "OpenVINO GenAI 2026.4"),
    "W1_decode_tok_s": (64.5, "llama.cpp"),
    "W2_ttft_s": (0.081, "OpenVINO GenAI 2026.4"),
    "W3_out_tok_s": (414.0, "vLLM 0.32"),
    "W3w_out_tok_s": (488.0, "OpenVINO GenAI 2026.4"),
    "W4_out_tok_s": (250.0, "OpenVINO GenAI 2026.4"),
    "W5_out_tok_s": (319.0, "OpenVINO GenAI 2026.4"),
    "W6_out_tok_s": (158.0, "OpenVINO GenAI 2026.4"),
}
"""The best of each figure, and whose it is."""

Figures = dict[str, float]
"""By name: seconds, or tokens a second."""


class Prompts:
    """Token ids that no two prompts share a beginning of, unless they are meant to."""

    def __init__(self) -> None:
        self._drawn = 0

    def fresh(self, count: int) -> list[int]:
        """`count` ids, the first of them like in no other prompt."""
        self._drawn += 1
        return [1000 + self._drawn, *((7919 * self._drawn + 104729 * i) % 20000 + 1000 for i in range(1, count))]

    def of(self, workload: Workload, shared: Sequence[int]) -> list[list[int]]:
        """The prompts of a workload, with what they share."""
        return [[*shared, *self.fresh(workload.prompt_tokens - len(shared))] for _ in range(workload.requests)]


# ---- through the stack ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """When one request was answered, in seconds from when all were sent, and its bill."""

    first: float
    """Its first token was at the client."""
    last: float
    """Its last one was."""
    usage: Usage

    @property
    def prefilled(self) -> int:
        """Prompt tokens that had to be computed for it."""
        return self.usage.prompt_tokens - self.usage.cached_tokens


async def ask(
    client: AsyncClient, prompts: Iterable[Sequence[int]], output_tokens: int, samples: int
) -> list[Answered]:
    """Send all at once, and read them to their ends."""
    began = time.perf_counter()

    async def one(prompt: Sequence[int]) -> Answered:
        request = Generation(
            prompt=TokenPrompt(tuple(prompt)),
            max_tokens=output_tokens,
            ignore_eos=True,
            samples=samples,
            temperature=0.0 if samples == 1 else 1.0,
        )
        times: list[float] = []
        usage = None
        async for event in client.generate(request):
            if isinstance(event, Delta):
                times.append(time.perf_counter() - began)
            elif isinstance(event, Usage):
                usage = event
        assert usage is not None
        assert usage.output_tokens == output_tokens * samples, usage
        return Answered(first=times[0], last=times[-1], usage=usage)

    async with asyncio.timeout(_REQUEST_SECONDS), asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(prompt)) for prompt in prompts]
    return [task.result() for task in tasks]


async def serve(client: AsyncClient, workload: Workload, prompts: Prompts) -> tuple[Figures, int]:
    """The figures of one run with fresh prompts, and how many prompt tokens it computed."""
    shared = prompts.fresh(workload.shared_tokens) if workload.shared_tokens else []
    if workload.warm:
        await ask(client, [[*shared, *prompts.fresh(1)]], 1, 1)
    answers = await ask(client, prompts.of(workload, shared), workload.output_tokens, workload.samples)
    ended = max(answer.last for answer in answers)
    figures = {
        "ttft_s": answers[0].first,
        "decode_tok_s": (workload.output_tokens - 1) / (answers[0].last - answers[0].first),
        "out_tok_s": workload.requests * workload.samples * workload.output_tokens / ended,
    }
    return figures, sum(answer.prefilled for answer in answers)


# ---- plain transformers --------------------------------------------------------------------------------------


class Plain:
    """transformers' `generate`."""

    def __init__(self, folder: Path, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        from worker.model.loader import dtype_of

        logging.disable_progress_bar()
        torch.set_num_threads(THREADS)
        wanted = dtype_of(dtype, torch.device("cpu"))
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=wanted, local_files_only=True).eval()
        self._model.generation_config.eos_token_id = None
        self._seconds([Prompts().fresh(8)], 2)

    def run(self, workload: Workload, prompts: Prompts) -> Figures:
        """The figures of a workload, its samples as so many requests."""
        asked = [prompt for prompt in prompts.of(workload, []) for _ in range(workload.samples)]
        first = self._seconds(asked, 1) if "ttft_s" in workload.figures else 0.0
        whole = self._seconds(asked, workload.output_tokens)
        return {
            "ttft_s": first,
            "decode_tok_s": (workload.output_tokens - 1) / (whole - first),
            "out_tok_s": len(asked) * workload.output_tokens / whole,
        }

    def _seconds(self, prompts: list[list[int]], count: int) -> float:
        """To answer prompts of one length greedily with `count` tokens each."""
        import torch

        ids = torch.tensor(prompts)
        began = time.perf_counter()
        with torch.inference_mode():
            self._model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
        return time.perf_counter() - began


def memory_gb_s() -> float:
    """What reading memory with all threads gives: the best of five sweeps over 256 MiB."""
    import torch

    torch.set_num_threads(THREADS)
    values = torch.ones(_SWEPT_BYTES // 4)
    sweeps: list[float] = []
    for _ in range(5):
        began = time.perf_counter()
        values.sum()
        sweeps.append(time.perf_counter() - began)
    return _SWEPT_BYTES / min(sweeps) / 1e9


# ---- both ----------------------------------------------------------------------------------------------------


async def measure(workloads: Sequence[Workload], folder: Path, model: str, dtype: str, repeats: int) -> None:
    """Print every figure, through a cluster of one worker."""
    _tell({"name": "memory_gb_s", "value": round(memory_gb_s(), 1), "unit": "GB/s", "peer": MEMORY_ELSEWHERE})
    plain, prompts = Plain(folder, dtype), Prompts()
    env = {"OCTAVO_MODEL": model, "OCTAVO_DTYPE": dtype, "OCTAVO_THREADS": str(THREADS), "OCTAVO_KV_MEMORY": "512MiB"}
    async with Cluster(workers=1, env=env) as cluster, AsyncClient(cluster.address) as client:
        await ask(client, [prompts.fresh(8)], 2, 1)  # the first step of a process is slower than any other
        for workload in workloads:
            runs = [await serve(client, workload, prompts) for _ in range((repeats + 1) // 2)]
            rival = await asyncio.to_thread(plain.run, workload, prompts)
            runs += [await serve(client, workload, prompts) for _ in range(repeats // 2)]
            for figure in workload.figures:
                value = median(run[figure] for run, _ in runs)
                _tell(_line(f"{workload.name}_{figure}", value, rival[figure], runs[0][1]))


def _line(name: str, value: float, plain: float, prefilled: int) -> dict[str, object]:
    is_time = name.endswith("ttft_s")
    peer, by = PEERS[name]
    return {
        "name": name,
        "value": round(value, 4),
        "unit": "s" if is_time else "tokens/s",
        "prefilled": prefilled,
        "plain": round(plain, 4),
        "ratio": round(plain / value if is_time else value / plain, 2),
        "peer": peer,
        "peer_is": by,
    }


def _tell(line: dict[str, object]) -> None:
    print(json.dumps(line), flush=True)


def main() -> None:
    """Print every figure."""
    parser = argparse.ArgumentParser(prog="python -m bench.serving", description="Serving through the whole stack.")
    parser.add_argument("--quick", action="store_true", help="small numbers of everything: shows that it runs")
    parser.add_argument("--only", nargs="+", choices=[one.name for one in WORKLOADS], help="these workloads")
    parser.add_argument("--repeats", type=int, default=3, help="of each workload (default: %(default)s)")
    parser.add_argument("--model", default=DEFAULT)
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    options = parser.parse_args()
    wanted = [one for one in WORKLOADS if options.only is None or one.name in options.only]
    workloads = [one.small() for one in wanted] if options.quick else wanted
    repeats = 1 if options.quick else options.repeats
    folder = fetch_model(options.model)
    asyncio.run(measure(workloads, folder, options.model, options.dtype, repeats))


if __name__ == "__main__":
    main()
