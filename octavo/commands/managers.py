"""Asking cache managers: one that is away does not keep the others from being asked."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import grpc

from octavo.commands.connection import transport
from octavo.commands.console import CommandFailed
from octavo.service import open_blocking_channel
from octavo.status import translated
from octavo.v1.cache_manager_pb2_grpc import CacheManagerStub

Answer = TypeVar("Answer")


Metadata = tuple[tuple[str, str], ...]


def answers(
    addresses: Iterable[str], ask: Callable[[CacheManagerStub, Metadata], Answer]
) -> Iterator[tuple[str, Answer]]:
    """The address and the answer of each cache manager that answers `ask`, which sends the metadata with its calls.

    Raises:
        CommandFailed: after the last of them, where others do not answer; names those.
        OctavoError: the one that is asked refuses.
    """
    own = transport()
    silent: list[str] = []
    for address in addresses:
        with open_blocking_channel(address, own) as channel:
            try:
                with translated():
                    answer = ask(CacheManagerStub(channel), own.fleet_metadata)
            except grpc.RpcError:
                silent.append(address)
                continue
        yield address, answer
    if silent:
        raise CommandFailed(
            f"no cache manager answers at {', '.join(silent)}; `octavo up` says where its own is, --cache-manager or "
            "OCTAVO_CACHE_MANAGER names it"
        )
