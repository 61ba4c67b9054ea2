"""The Python client: ask a gateway for text, whole or as it grows.

    async with AsyncClient("127.0.0.1:8500") as client:
        answer = await client.complete("The capital of France is")
        print(answer.text, answer.usage.cached_tokens)

A string is short for `Generation(prompt=TextPrompt(string))`. Errors come back as the classes of `octavo.errors` that
the gateway raised; besides them, TimeoutError when the deadline passed and ConnectionError when there is no gateway.
A call that is refused for the moment, or finds no gateway, is made again (`gateway.core.retries`).

    with Client("127.0.0.1:8500") as client:                       # the same without asyncio
        for event in client.generate(Generation(prompt=TextPrompt("Once"), temperature=0.8, max_tokens=50)):
            if isinstance(event, Delta):
                print(event.text, end="")
        print(client.explain("Once").chosen, [worker.load for worker in client.fleet().workers])
"""

from gateway.client.asynchronous import AsyncClient
from gateway.client.blocking import Client
from gateway.client.values import (
    Completion,
    Ended,
    Explanation,
    FleetState,
    GatewayLoad,
    Model,
    Sample,
    WorkerExplanation,
)

__all__ = [
    "AsyncClient",
    "Client",
    "Completion",
    "Ended",
    "Explanation",
    "FleetState",
    "GatewayLoad",
    "Model",
    "Sample",
    "WorkerExplanation",
]
