"""`octavo stats`: the fleet as the gateway sees it, as one table or as JSON."""

import json
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from gateway.client import Client, GatewayLoad
from gateway.core.retries import NEVER
from octavo.commands.connection import transport
from octavo.commands.console import out
from octavo.commands.key import api_key
from octavo.commands.problems import speaking_to
from octavo.records.fleet import PoolSpec, WorkerInfo
from octavo.records.generate import IndexState

_TIMEOUT_SECONDS = 5.0


def stats(address: str, *, as_json: bool) -> None:
    """Print what the gateway at `address` knows.

    Raises:
        CommandFailed: nobody answers there.
        Unauthenticated: it wants an API key.
    """
    with (
        speaking_to(address),
        Client(address, api_key=api_key(), transport=transport(), retries=NEVER) as client,
    ):
        fleet = client.fleet(timeout_seconds=_TIMEOUT_SECONDS)
    workers = sorted(fleet.workers, key=lambda worker: worker.worker_id)
    if as_json:
        print(json.dumps(_plain(workers, fleet.gateway), indent=2, default=_hexadecimal))
        return
    out.print(_table(workers))
    out.print(_summary(workers, fleet.gateway))


def _table(workers: list[WorkerInfo]) -> Table:
    """A row a worker, fit for 80 columns; it names the model where there are several."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title_justify="left", caption_justify="left")
    table.title = escape("; ".join(sorted({_pool_name(worker.pool) for worker in workers}))) or "no workers"
    table.caption = "held, cached: of the pool. prompt, output: tokens. hit: of prompt."
    table.add_column("worker", no_wrap=True)
    several = len({worker.pool.model for worker in workers}) > 1
    if several:
        table.add_column("model", overflow="fold")
    for header in ("runs", "waits", "held", "cached", "prompt", "hit", "output", "preempted"):
        table.add_column(header, justify="right", no_wrap=True)
    for worker in workers:
        load, pool = worker.load, worker.pool
        table.add_row(
            Text(f"{worker.worker_id} (draining)" if worker.draining else worker.worker_id),
            *([Text(pool.model)] if several else []),
            f"{load.running_sequences:,}",
            f"{load.waiting_sequences:,}",
            _share(load.held_blocks, pool.num_blocks),
            _share(load.cached_blocks, pool.num_blocks),
            f"{load.prompt_tokens:,}",
            _share(load.cached_tokens, load.prompt_tokens),
            f"{load.output_tokens:,}",
            f"{load.preemptions:,}",
        )
    return table


def _pool_name(pool: PoolSpec) -> str:
    return f"{pool.model} in {pool.dtype}, room for {pool.num_blocks * pool.block_size:,} tokens a worker"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _summary(workers: list[WorkerInfo], gateway: GatewayLoad) -> str:
    prompt = sum(worker.load.prompt_tokens for worker in workers)
    cached = sum(worker.load.cached_tokens for worker in workers)
    saved = f"{cached:,} of {prompt:,} prompt tokens were remembered and not computed. " if prompt else ""
    return (
        f"{saved}Requests so far: {gateway.requests:,} ({gateway.refused:,} refused); "
        f"{gateway.running_requests:,} run, {gateway.waiting_requests:,} wait. {index_in_words(gateway.index_state)}"
    )


def index_in_words(state: IndexState | None) -> str:
    """What a look-up in the prefix index was worth."""
    match state:
        case IndexState.EXACT:
            return "The prefix index is exact."
        case IndexState.DEGRADED:
            return "The prefix index is degraded: it does not tell all that workers hold."
        case IndexState.FALLBACK:
            return "The prefix index does not answer: requests go where the load is least."
        case None:
            return ""


def _plain(workers: list[WorkerInfo], gateway: GatewayLoad) -> dict[str, Any]:
    state = gateway.index_state
    return {
        "workers": [asdict(worker) | {"load": worker.load._asdict()} for worker in workers],
        "gateway": asdict(gateway) | {"index_state": state.value if state else None},
    }


def _hexadecimal(value: object) -> str:
    """A digest, which JSON cannot hold as it is."""
    assert isinstance(value, bytes), value
    return value.hex()
