"""The chaos run: a fleet under mixed load of which something is killed, frozen, replaced or cut off every five seconds.

    python -m tests.fault.chaos --minutes 10 --seed 1

Three workers, two cache managers, two gateways and Redis serve SmolLM2 in float32; every way between two of them can
be cut (tests/support/partitions.py). Before anything breaks, every request of the load is asked once of the quiet
fleet, and greedy ones are compared with plain transformers; that is what each of them has to be later, to the token and
to the letter, whichever way it is asked for (tests/support/mixed_load.py).

A request may end in four ways: whole and right; left by its client; with a typed refusal that may pass; or with its
gateway, if that was killed or frozen. What came of it before must be right in any case. The run fails if an answer was
wrong, ended without saying so, or did not end within its deadline, or if something was left behind: when all is healed,
every counter must be 0, all books balance, and everything is asked once more.
"""

import argparse
import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

import httpx2

from deploy.local import Cluster
from deploy.process import Process
from gateway.client import AsyncClient
from gateway.core.retries import NEVER
from octavo.commands.model import fetch_model
from octavo.service import open_channel
from octavo.v1 import gateway_pb2, gateway_pb2_grpc
from tests.support.cluster import Client
from tests.support.mixed_load import (
    CutShort,
    Door,
    GatewayLost,
    Heard,
    Refused,
    answer_of,
    learn,
    problem_with,
    rehearse,
)
from tests.support.partitions import Network, kind_of, network

BEAT_SECONDS = 5.0
"""From one mishap to the next."""
BROKEN_SECONDS = (4.0, 8.0)
"""How long somebody stays frozen or cut off: longer than pings take to find it, and longer than a lease, too."""
DEADLINE_SECONDS = 240.0
"""Of a request; one that has not ended by then hangs."""
CALLERS = 8
HEAL_SECONDS = 120.0


@dataclass(frozen=True, slots=True, order=True)
class Mishap:
    """Something that may go wrong."""

    whom: str
    """The kind of its victim."""
    how: str
    whence: str = ""
    """From which kind it is cut off."""

    def __str__(self) -> str:
        return " ".join(filter(None, (self.whom, self.how, self.whence)))


MISHAPS = (
    *(Mishap(whom, how) for whom in ("worker", "manager", "gateway", "redis") for how in ("killed", "frozen")),
    *(Mishap(whom, "replaced") for whom in ("worker", "manager", "gateway", "redis")),
    Mishap("worker", "cut off from", "gateway"),
    Mishap("worker", "cut off from", "manager"),
    Mishap("manager", "cut off from", "worker"),
    Mishap("gateway", "cut off from", "manager"),
    Mishap("gateway", "cut off from", "redis"),
    Mishap("manager", "cut off from", "redis"),
)


@dataclass
class Account:
    """What became of everything."""

    asked: Counter[str] = field(default_factory=Counter[str])
    """By the way of asking."""
    ends: Counter[str] = field(default_factory=Counter[str])
    refused: Counter[str] = field(default_factory=Counter[str])
    """By the type of the error."""
    mishaps: Counter[Mishap] = field(default_factory=Counter[Mishap])
    carried_over: int = 0
    """Requests that ended elsewhere than they began; gRPC tells it, HTTP does not."""
    moves: int = 0
    """Of those together."""
    tokens: int = 0
    wrong: list[str] = field(default_factory=list[str])
    lost: list[str] = field(default_factory=list[str])
    hung: list[str] = field(default_factory=list[str])

    @property
    def faults(self) -> list[str]:
        """What must not be."""
        return [*self.wrong, *self.lost, *self.hung, *([] if self.ends["right"] else ["no request ended right"])]


class Load:
    """Callers, and what they have to hear."""

    def __init__(self, clients: Sequence[AsyncClient], doors: Sequence[Door], account: Account) -> None:
        self._clients = clients
        self._doors = doors
        self._account = account
        self.stopped = False

    async def learn(self) -> None:
        """The right answers, of a quiet fleet: the same at every gateway."""
        client, *others = self._clients
        self._right = await learn(client, DEADLINE_SECONDS)
        for other in others:
            await self._ask_all(other)

    async def look_again(self) -> None:
        """Whether the fleet, as it is now, still gives every answer at every gateway."""
        for client in self._clients:
            await self._ask_all(client)

    async def _ask_all(self, client: AsyncClient) -> None:
        """At once, so that a fleet that is quick is quick here."""
        asked = [client.complete(request, timeout_seconds=DEADLINE_SECONDS) for request, _ in self._right]
        for (request, right), completion in zip(self._right, await asyncio.gather(*asked), strict=True):
            assert answer_of(completion) == right, (request, completion, right)

    async def call(self, dice: random.Random) -> None:
        """Ask at random until stopped."""
        while not self.stopped:
            request, right = dice.choice(self._right)
            request = replace(request, priority=dice.randint(-1, 1))
            door = dice.choice(self._doors)
            way = dice.choice([*door.ways])
            leaves_after = dice.randint(1, 12) if dice.random() < 0.2 else None
            heard = Heard()
            self._account.asked[way] += 1
            try:
                async with asyncio.timeout(DEADLINE_SECONDS):
                    whole = await door.ways[way](request, heard, leaves_after)
                end = "right" if whole else "left"
            except Refused as refusal:
                end = "refused"
                self._account.refused[str(refusal)] += 1
            except GatewayLost:
                end = "gateway lost"
            except CutShort as error:
                end = "lost"
                self._account.lost.append(f"{way}: {request}: {error}")
            except TimeoutError:
                end = "hung"
                self._account.hung.append(f"{way}: {request}: {heard}")
            self._take(end, heard, problem_with(heard, right, whole=end == "right"))
            if end not in ("right", "left"):
                await asyncio.sleep(0.2)  # as clients do

    def _take(self, end: str, heard: Heard, problem: str | None) -> None:
        account = self._account
        account.ends["wrong" if problem else end] += 1
        account.tokens += heard.num_tokens
        account.carried_over += heard.carried_over > 0
        account.moves += heard.carried_over
        if problem:
            account.wrong.append(problem)


class Breaker:
    """What goes wrong, one after the other; whatever it is heals by itself after a while.

    Mishaps are dealt from a shuffled deck of all kinds, so that none is missing in a run that is long enough.
    """

    def __init__(self, cluster: Cluster, ways: Network, account: Account, dice: random.Random) -> None:
        self._cluster = cluster
        self._ways = ways
        self._account = account
        self._dice = dice
        self._deck: list[Mishap] = []
        self._broken: set[Process] = set()

    async def go_on(self, seconds: float) -> None:
        """For so long; then return when everything is whole again."""
        async with asyncio.timeout(seconds + 2 * HEAL_SECONDS), asyncio.TaskGroup() as tasks:
            for beat in range(round(seconds / BEAT_SECONDS)):
                if (dealt := self._deal()) is not None:
                    mishap, victim = dealt
                    self._account.mishaps[mishap] += 1
                    sys.stderr.write(f"{beat * BEAT_SECONDS:6.0f} s  {victim.name}: {mishap}\n")
                    tasks.create_task(self._break(mishap, victim))
                await asyncio.sleep(BEAT_SECONDS)

    def _deal(self) -> tuple[Mishap, Process] | None:
        """The next of the deck that has a victim."""
        if not self._deck:
            self._deck = self._dice.sample(MISHAPS, len(MISHAPS))
        for mishap in self._deck:
            if victims := self._well(mishap.whom):
                self._deck.remove(mishap)
                return mishap, self._dice.choice(victims)
        return None

    def _well(self, kind: str) -> list[Process]:
        """Who of a kind may be a victim. One worker and one gateway are always left, as requests are to end somehow."""
        well = [each for each in self._cluster.processes if kind_of(each) == kind and each not in self._broken]
        return [] if kind in ("worker", "gateway") and len(well) == 1 else well

    async def _break(self, mishap: Mishap, victim: Process) -> None:
        break_: dict[str, Callable[[Process], Awaitable[None]]] = {
            "killed": self._kill,
            "frozen": self._freeze,
            "replaced": self._replace,
            "cut off from": lambda victim: self._cut_off(victim, mishap.whence),
        }
        self._broken.add(victim)
        try:
            await break_[mishap.how](victim)
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
        await asyncio.sleep(self._dice.choice(BROKEN_SECONDS))
        victim.thaw()

    async def _cut_off(self, victim: Process, kind: str) -> None:
        """From all of a kind, or from one of them."""
        ways = self._ways.between(victim, kind)
        cut = self._dice.choice((ways, ways[:1]))
        for way in cut:
            way.flows.clear()
        await asyncio.sleep(self._dice.choice(BROKEN_SECONDS))
        for way in cut:
            way.flows.set()

    async def _start(self, victim: Process) -> None:
        async with asyncio.timeout(HEAL_SECONDS):
            await self._cluster.restart(victim)


@asynccontextmanager
async def fleet() -> AsyncIterator[tuple[Cluster, Network]]:
    """The processes, and the ways between them."""
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
    async with network(cluster) as ways, cluster:
        yield cluster, ways


@asynccontextmanager
async def load_on(cluster: Cluster, account: Account) -> AsyncIterator[Load]:
    """Callers of every gateway, over both of its doors."""
    async with AsyncExitStack() as stack:
        clients: list[AsyncClient] = []
        doors: list[Door] = []
        for gateway in cluster.gateways:
            url = f"http://{gateway.env['OCTAVO_HTTP_LISTEN']}"
            grpc = await stack.enter_async_context(AsyncClient(gateway.address, retries=NEVER))
            http = await stack.enter_async_context(httpx2.AsyncClient(base_url=url, timeout=DEADLINE_SECONDS + 1))
            clients.append(grpc)
            doors.append(Door(grpc, http, DEADLINE_SECONDS))
        yield Load(clients, doors, account)


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
    rehearse()
    dice, account = random.Random(seed), Account()
    async with fleet() as (cluster, ways), load_on(cluster, account) as load:
        await load.learn()
        async with asyncio.TaskGroup() as callers:
            for caller in range(CALLERS):
                callers.create_task(load.call(random.Random(f"{seed}/{caller}")))
            try:
                await Breaker(cluster, ways, account, dice).go_on(60 * minutes)
            finally:
                load.stopped = True
        await at_rest(cluster)
        await load.look_again()
        await at_rest(cluster)
    return account


def report(account: Account, **of: float) -> str:
    """One JSON object."""
    return json.dumps(
        {
            **of,
            "requests": account.ends.total(),
            "asked": dict(account.asked.most_common()),
            "tokens": account.tokens,
            "ends": dict(account.ends.most_common()),
            "refused": dict(account.refused.most_common()),
            "carried_over": account.carried_over,
            "moves": account.moves,
            "mishaps": {str(mishap): times for mishap, times in sorted(account.mishaps.items())},
            "wrong": len(account.wrong),
            "hung": len(account.hung),
            "lost": len(account.lost),
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
    for fault in account.faults:
        sys.stderr.write(f"{fault}\n")
    sys.exit(1 if account.faults else 0)


if __name__ == "__main__":
    main()
