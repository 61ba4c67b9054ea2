"""`octavo up`: a whole Octavo on this machine until Ctrl-C."""

import asyncio
import shlex
import signal
from collections.abc import Coroutine, Sequence
from typing import Any

from rich.markup import escape

from deploy.local import Cluster, Ports, worker_names
from octavo.commands import defaults
from octavo.commands.console import ServiceLog, as_curl, err, out


def checked_cluster(*, workers: int, ports: Ports, env: dict[str, str]) -> Cluster:
    """A cluster that shows what its services write, before anything is started, or fetched for it.

    Raises:
        StartFailed: it could not start.
        FileNotFoundError: there is no redis-server.
    """
    names = ["octavo", "redis", "manager", *worker_names(workers), "gateway"]
    cluster = Cluster(workers=workers, ports=ports, env=env, on_line=ServiceLog(names))
    cluster.check()
    return cluster


async def up(cluster: Cluster, models: Sequence[str]) -> None:
    """Start a cluster and keep it running, crashed services included, until the caller is told to stop.

    Raises StartFailed where a service did not come up.
    """
    await _until_interrupted(_serve(cluster, models), cluster)


async def _serve(cluster: Cluster, models: Sequence[str]) -> None:
    async with cluster:
        _greet(cluster, models)
        await cluster.keep_running()


async def _until_interrupted(work: Coroutine[Any, Any, None], cluster: Cluster) -> None:
    """Run `work`; the first Ctrl-C, SIGTERM or SIGHUP cancels it, the next one kills the cluster under it."""
    task = asyncio.ensure_future(work)
    interrupted = False

    def stop() -> None:
        nonlocal interrupted
        if interrupted:
            cluster.kill_now()
            return
        interrupted = True
        err.print("stopping; once more to stop at once", style="bold")
        task.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop)
    try:
        await task
    except asyncio.CancelledError:
        if not interrupted:
            raise


def _greet(cluster: Cluster, models: Sequence[str]) -> None:
    count = len(cluster.workers)
    workers, which = (f"{count} workers", "each of which") if count > 1 else ("1 worker", "which")
    pools = cluster.workers[0].events("kv_pool")
    holds = f", {which} remembers {pools[-1]['tokens']:,} tokens ({_size(pools[-1]['bytes'])})" if pools else ""
    at = "" if cluster.address == defaults.ADDRESS else f" --address {cluster.address}"
    manager = cluster.manager.address
    managed_at = "" if manager == defaults.CACHE_MANAGER else f" --cache-manager {manager}"
    out.print(
        f"\n[bold]Octavo serves {escape(' and '.join(models))} at {cluster.address}[/bold] with {workers}{holds}.\n"
    )
    of = f" --model {shlex.quote(models[0])}" if len(set(models)) > 1 else ""
    out.print(f'  octavo chat{at}{of} "Why is the sky blue?"', markup=False, soft_wrap=True)
    out.print(f'  octavo explain{at}{of} "Why is the sky blue?"', markup=False, soft_wrap=True)
    out.print(f"  octavo stats{at}")
    out.print(f"  octavo audit{managed_at}")
    out.print(f"  octavo reset{managed_at}\n")
    out.print(f"OpenAI's API is at {cluster.http_url}/v1:\n")
    question = as_curl(
        cluster.http_url, models[0], with_key=cluster.asks_for_keys, authorities=cluster.http_authorities
    )
    out.print(f"{question}\n", markup=False, soft_wrap=True)
    out.print("Ctrl-C stops everything.\n")


def _size(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MiB"
