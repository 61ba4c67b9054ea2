"""The chaos run: a fleet under mixed load of which something is killed, frozen, replaced or cut off every few seconds.

    python -m tests.fault.chaos --minutes 10 --seed 1

Three workers, two cache managers, two gateways and Redis serve SmolLM2 in float32. Before anything breaks, every
request of the load is asked once of the quiet fleet, and greedy ones are compared with plain transformers; that is what
each of them has to be later, to the token. Then eight callers ask at random: greedy, sampled, several samples, long
ones, and some that leave in mid-stream.

A request may end in three ways: whole and right; with a typed refusal; or with its gateway, if that was killed or
frozen. What came of it before must be right in any case. The run fails if any request got a wrong token, none of its
ends within its deadline, or left something behind: when all is healed, every counter must be 0 and all books balance.
"""

import argparse
import asyncio
import json
import random
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field

from deploy.local import Cluster
from deploy.process import Process
from gateway.client import AsyncClient
from gateway.core.events import Delta, Usage
from gateway.core.request import Generation, TokenPrompt
from gateway.core.retries import NEVER
from octavo.commands.model import fetch_model
from octavo.errors import OctavoError
from octavo.service import open_channel
from octavo.v1 import gateway_pb2, gateway_pb2_grpc
from tests.support.cluster import Client, greedy, prose
from tests.support.tcp_proxy import LOOPBACK, TcpProxy, tcp_proxy

BEAT_SECONDS = 5.0
"""From one mishap to the next."""
BROKEN_SECONDS = 4.0
"""How long somebody stays frozen or cut off: longer than it takes to be found."""
DEADLINE_SECONDS = 120.0
"""Of a request; one that has not ended by then hangs."""
CALLERS = 8
HEAL_SECONDS = 120.0

Tokens = dict[int, list[int]]
"""By sample."""


def requests_of_the_load() -> list[Generation]:
    """A dozen, which are asked again and again."""
    plain = [_ask(40 * i, 20 + 7 * i, 24) for i in range(4)]
    long = [_ask(300 + 100 * i, 60, 96) for i in range(2)]
    sampled = [_ask(600 + 50 * i, 30, 24, temperature=0.9, seed=i) for i in range(3)]
    several = [_ask(900 + 50 * i, 40, 16, samples=2 + i, temperature=0.7, top_p=0.9, seed=9 + i) for i in range(3)]
    return [*plain, *long, *sampled, *several]


def _ask(start: int, length: int, max_tokens: int, **fields: float) -> Generation:
    prompt = TokenPrompt(tuple(prose(start, length)))
    return Generation(prompt=prompt, max_tokens=max_tokens, ignore_eos=True, **fields)  # pyright: ignore[reportArgumentType]


@dataclass
class Account:
    """What became of everything."""

    ends: Counter[str] = field(default_factory=Counter[str])
    mishaps: Counter[str] = field(default_factory=Counter[str])
    carried_over: int = 0
    tokens: int = 0
    wrong: list[str] = field(default_factory=list[str])
    hung: int = 0

    @property
    def good(self) -> bool:
        return not self.wrong and not self.hung and self.ends["right"] > 0


class Load:
    """Callers, and what they have to hear."""

    def __init__(self, clients: dict[str, AsyncClient], account: Account, dice: random.Random) -> None:
        self._clients = clients
        self._account = account
        self._dice = dice
        self._requests = requests_of_the_load()
        self._expected: list[Tokens] = []
        self.stopped = False

    async def learn(self) -> None:
        """Ask everything of a quiet fleet, one after the other."""
        client = next(iter(self._clients.values()))
        for request in self._requests:
            answer = await client.complete(request, timeout_seconds=DEADLINE_SECONDS)
            self._expected.append({at: [*sample.token_ids] for at, sample in enumerate(answer.samples)})
            if request.temperature == 0 and isinstance(request.prompt, TokenPrompt):
                assert self._expected[-1][0] == greedy(request.prompt.ids, request.max_tokens or 0), request

    async def call(self) -> None:
        """Ask at random until stopped."""
        while not self.stopped:
            at = self._dice.randrange(len(self._requests))
            heard: Tokens = {sample: [] for sample in self._expected[at]}
            name = self._dice.choice([*self._clients])
            leaves_after = self._dice.randint(1, 12) if self._dice.random() < 0.2 else None
            end = await self._one(self._clients[name], self._requests[at], heard, leaves_after)
            self._account.ends[end] += 1
            self._account.tokens += sum(map(len, heard.values()))
            self._judge(at, heard, whole=end == "right")
            if end not in ("right", "left"):
                await asyncio.sleep(0.2)  # as clients do

    async def _one(self, client: AsyncClient, request: Generation, heard: Tokens, leaves_after: int | None) -> str:
        """How it ended; `heard` is filled meanwhile."""
        try:
            async with aclosing(client.generate(request, timeout_seconds=DEADLINE_SECONDS)) as events:
                count = 0
                async for event in events:
                    count += 1
                    if isinstance(event, Delta):
                        heard[event.sample] += event.token_ids
                    if isinstance(event, Usage):
                        self._account.carried_over += event.carried_over
                    if count == leaves_after:
                        return "left"
        except OctavoError as refusal:
            return type(refusal).__name__
        except ConnectionError:
            return "gateway lost"
        except TimeoutError:
            self._account.hung += 1
            return "hung"
        return "right"

    def _judge(self, at: int, heard: Tokens, *, whole: bool) -> None:
        for sample, tokens in heard.items():
            expected = self._expected[at][sample]
            if tokens != (expected if whole else expected[: len(tokens)]):
                self._account.wrong.append(f"request {at}, sample {sample}: {tokens}, wanted {expected}")


class Mishaps:
    """What goes wrong, one after the other; whatever it is heals by itself after a while."""

    def __init__(self, cluster: Cluster, ways: dict[Process, TcpProxy], account: Account, dice: random.Random) -> None:
        self._cluster = cluster
        self._ways = ways
        """To each worker, for its gateways."""
        self._account = account
        self._dice = dice
        self._broken: set[Process] = set()

    async def go_on(self, seconds: float) -> None:
        """For so long; then return when everything is whole again."""
        async with asyncio.timeout(seconds + 2 * HEAL_SECONDS), asyncio.TaskGroup() as tasks:
            for _ in range(round(seconds / BEAT_SECONDS)):
                if (victim := self._victim()) is not None:
                    tasks.create_task(self._break(victim))
                await asyncio.sleep(BEAT_SECONDS)

    def _victim(self) -> Process | None:
        """Somebody who is well. One worker and one gateway are always left, as requests are to end somehow."""
        cluster = self._cluster
        well = [process for process in cluster.processes if process not in self._broken]
        for kind in (cluster.workers, cluster.gateways):
            if len(left := [process for process in kind if process in well]) == 1:
                well.remove(left[0])
        return self._dice.choice(well) if well else None

    async def _break(self, victim: Process) -> None:
        ways: dict[str, Callable[[Process], Awaitable[None]]] = {
            "killed": self._kill,
            "frozen": self._freeze,
            "replaced": self._replace,
        }
        if victim in self._ways:
            ways["cut off"] = self._cut_off
        how = self._dice.choice([*ways])
        self._account.mishaps[f"{victim.name.split('-')[0]} {how}"] += 1
        self._broken.add(victim)
        try:
            await ways[how](victim)
        finally:
            self._broken.discard(victim)

    async def _kill(self, victim: Process) -> None:
        await victim.kill()
        await self._start(victim)

    async def _replace(self, victim: Process) -> None:
        await victim.stop(grace_seconds=30)
        await self._start(victim)

    async def _freeze(self, victim: Process) -> None:
        victim.freeze()
        await asyncio.sleep(BROKEN_SECONDS)
        victim.thaw()

    async def _cut_off(self, victim: Process) -> None:
        way = self._ways[victim]
        way.flows.clear()
        await asyncio.sleep(BROKEN_SECONDS)
        way.flows.set()

    async def _start(self, victim: Process) -> None:
        async with asyncio.timeout(HEAL_SECONDS):
            await self._cluster.restart(victim)


@asynccontextmanager
async def fleet() -> AsyncIterator[tuple[Cluster, dict[Process, TcpProxy]]]:
    """The processes, and the way to each worker, which can be cut."""
    fetch_model("smollm2")
    settings = {"MODEL": "smollm2", "DTYPE": "float32", "DEVICE": "cpu", "THREADS": "1", "KV_MEMORY": "64MiB"}
    settings |= {"AUDIT": "true", "MAX_STANDSTILL_SECONDS": "60"}
    cluster = Cluster(
        workers=3,
        managers=2,
        gateways=2,
        env={f"OCTAVO_{name}": value for name, value in settings.items()},
        grace_seconds=4,
    )
    async with AsyncExitStack() as stack:
        ways: dict[Process, TcpProxy] = {}
        for worker in cluster.workers:
            with socket.create_server((LOOPBACK, 0)) as probe:
                worker.port = probe.getsockname()[1]
            ways[worker] = way = await stack.enter_async_context(tcp_proxy(worker.port))
            worker.env["OCTAVO_ADVERTISE"] = f"{LOOPBACK}:{way.port}"
        await stack.enter_async_context(cluster)
        yield cluster, ways


async def at_rest(cluster: Cluster) -> None:
    """Raises where anything is left at a worker, a manager or a gateway."""
    async with asyncio.timeout(HEAL_SECONDS), AsyncExitStack() as stack:
        await cluster.until_fleet_is_whole()
        managers = [await stack.enter_async_context(open_channel(each.address)) for each in cluster.managers]
        for gateway in cluster.gateways:
            channel = await stack.enter_async_context(open_channel(gateway.address))
            await Client(cluster, channel, managers).at_rest()
            load = (await gateway_pb2_grpc.InferenceStub(channel).GetFleet(gateway_pb2.GetFleetRequest())).gateway
            assert (load.running_requests, load.waiting_requests) == (0, 0), gateway.name


async def run(minutes: float, seed: int) -> Account:
    """The whole run. Raises where something does not heal, or is left behind."""
    dice, account = random.Random(seed), Account()
    async with fleet() as (cluster, ways), AsyncExitStack() as stack:
        clients = {
            gateway.name: await stack.enter_async_context(AsyncClient(gateway.address, retries=NEVER))
            for gateway in cluster.gateways
        }
        load = Load(clients, account, dice)
        await load.learn()
        async with asyncio.TaskGroup() as callers:
            for _ in range(CALLERS):
                callers.create_task(load.call())
            try:
                await Mishaps(cluster, ways, account, dice).go_on(60 * minutes)
            finally:
                load.stopped = True
        await at_rest(cluster)
    return account


def report(account: Account, **of: float) -> str:
    """One JSON object."""
    return json.dumps(
        {
            **of,
            "requests": account.ends.total(),
            "tokens": account.tokens,
            "ends": dict(account.ends.most_common()),
            "carried_over": account.carried_over,
            "mishaps": dict(sorted(account.mishaps.items())),
            "wrong": len(account.wrong),
            "hung": account.hung,
        }
    )


def main() -> None:
    """From the command line."""
    parser = argparse.ArgumentParser(description="Break a fleet under load, and look that no request is lost.")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long things break (10)")
    parser.add_argument("--seed", type=int, default=1, help="of what breaks and what is asked (1)")
    asked = parser.parse_args()
    account = asyncio.run(run(asked.minutes, asked.seed))
    sys.stdout.write(f"{report(account, minutes=asked.minutes, seed=asked.seed)}\n")
    for wrong in account.wrong:
        sys.stderr.write(f"{wrong}\n")
    sys.exit(0 if account.good else 1)


if __name__ == "__main__":
    main()
